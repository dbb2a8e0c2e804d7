"""The catalog: one DuckDB file with everything Coral knows and decided."""
