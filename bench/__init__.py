"""Benchmarks: both sides in one process run, with a ratio; never a timed test."""
