"""Measures a model on a GPU, or on CPU cores, from its config.json alone.

Runs where torch is, and vLLM perhaps, and imports nothing of Coral: `start.py` runs the package
from its folder. What it writes is raw: times of points. Coral makes tables of them
(tasks/profile_tables.py).
"""
