"""Pure planning maths: performance model, placement, allocation, baselines.

Values in, values out: nothing here reads a clock, a file, the environment or a database.
"""
