"""What a home knows of its fleet on EC2, whatever scenario moves it: `aws.json`.

Written before the first launch, so that whoever looks at the home later sees every region that may
have instances of it.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from pathlib import Path

from filelock import FileLock
from pydantic import BaseModel, ConfigDict

from executor.aws.clients import AwsClients
from executor.aws.fleet import AwsFleet
from executor.aws.regions import RegionSettings
from executor.files import UnreadableError, read_model, write_model
from executor.home import HomeFiles
from executor.nodes_file import read_nodes
from planner.errors import InputError


class AwsFileError(InputError):
    """An `aws.json` that cannot be read, or that another endpoint is in."""


class AwsFile(BaseModel):
    """Its content."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fleet_id: str = ""
    regions: tuple[str, ...] = ()
    endpoint_url: str | None = None


def read_aws_file(path: Path) -> AwsFile:
    """Empty where there is none.

    Raises AwsFileError.
    """
    try:
        return read_model(path, AwsFile)
    except UnreadableError as error:
        raise AwsFileError(
            f"{path} cannot be read ({error}); it says where instances may run: put it right, and "
            "do not delete it while some do"
        ) from error


def note_regions(files: HomeFiles, regions: Collection[str], endpoint_url: str | None) -> AwsFile:
    """Keep that instances may be in these regions from now on; what is known then.

    Raises AwsFileError: the home's instances are behind another endpoint.
    """
    files.home.mkdir(parents=True, exist_ok=True)
    with FileLock(files.aws.with_suffix(".lock")):
        known = read_aws_file(files.aws)
        if known.fleet_id and known.endpoint_url != endpoint_url:
            raise AwsFileError(
                f"the nodes of {files.home} are behind {known.endpoint_url or 'AWS itself'}, "
                f"and the scenario says {endpoint_url or 'AWS itself'}; end them with `coral down` "
                f"and delete {files.aws.name}, or use another --home"
            )
        made = AwsFile(
            fleet_id=known.fleet_id or uuid.uuid4().hex[:8],
            regions=tuple(sorted({*known.regions, *regions})),
            endpoint_url=endpoint_url,
        )
        if made != known:
            write_model(files.aws, made)
        return made


def fleet_of_home(files: HomeFiles) -> AwsFleet | None:
    """The fleet to look at and to end, not to launch with; None: the home never had one."""
    known = read_aws_file(files.aws)
    if not known.fleet_id:
        return None
    return AwsFleet(
        AwsClients(endpoint_url=known.endpoint_url),
        known.fleet_id,
        known.regions,
        RegionSettings(),
        nodes=lambda: read_nodes(files.nodes).nodes,
    )
