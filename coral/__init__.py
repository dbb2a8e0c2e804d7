"""The `coral` command: parses, calls a flow or a plain function, prints."""

__version__ = "0.1.0"
