"""What can be wrong with a database, each with the way out."""

from planner.errors import InputError


class DatabaseError(InputError):
    """The database cannot be used as it is."""


class DatabaseLockedError(DatabaseError):
    """Another process keeps the database open."""


class DatabaseNewerError(DatabaseError):
    """A newer Coral wrote the database."""


class DiskFullError(DatabaseError):
    """There is no room for what was to be written; nothing of it was."""


class SnapshotError(DatabaseError):
    """The copy for readers could not be written."""


class SeedError(DatabaseError):
    """A seed file that the product ships is missing or broken."""


class QueryError(InputError):
    """A user's SQL that DuckDB refuses."""
