"""One file per flow; each reads like a table of contents."""
