"""Thin Prefect tasks around plain functions that join the catalog and the planner."""
