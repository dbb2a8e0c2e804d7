"""Performance model: milliseconds of one layer, of the head, of all-reduce and of a hop."""
