"""A read-only dashboard of the snapshot: `coral ui`."""
