"""Parameters that several flows share, with the help that Prefect's pages show beside them.

Prefect takes help from the flow's docstring (`Args:`) and drops that of pydantic's fields; what a
JSON schema says of itself stays.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import WithJsonSchema

Scenario = Annotated[
    str,
    WithJsonSchema(
        {
            "type": "string",
            "description": "A scenario file, or a shipped one: core, ec2, extended, internet, "
            "local, small-nodes, suite, tiny.",
        }
    ),
]
Home = Annotated[
    str | None,
    WithJsonSchema(
        {
            "anyOf": [{"type": "string"}, {"type": "null"}],
            "description": "Folder of the database. Default: CORAL_HOME, else "
            "~/.local/share/coral.",
        }
    ),
]
Dask = Annotated[
    str | None,
    WithJsonSchema(
        {
            "anyOf": [{"type": "string"}, {"type": "null"}],
            "description": "Address of a running Dask scheduler, tcp://host:8786. Default: a "
            "cluster beside the run.",
        }
    ),
]
Workers = Annotated[
    int | None,
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}],
            "description": "Dask workers to start; 0: none, solve in the run. Default: one per "
            "core.",
        }
    ),
]
Seed = Annotated[
    int, WithJsonSchema({"type": "integer", "description": "Of everything that is drawn."})
]
