"""Online allocation: which templates to run where, at least cost."""
