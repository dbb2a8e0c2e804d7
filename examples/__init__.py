"""Scenario files that are shipped: `coral quickstart --scenario NAME`."""
