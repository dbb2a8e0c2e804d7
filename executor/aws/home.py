"""What a home knows of its fleet on EC2, whatever scenario moves it: `aws.json`.

Written before the first launch, so that whoever looks at the home later sees every region that may
have instances of it.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from pathlib import Path

from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field

from executor.aws.clients import AwsClients
from executor.aws.fleet import AwsFleet
from executor.aws.regions import RegionSettings
from executor.files import UnreadableError, read_model, write_model
from executor.home import HomeFiles
from executor.nodes_file import read_nodes
from planner.cloud_site import AwsSite
from planner.errors import InputError


class AwsFileError(InputError):
    """An `aws.json` that cannot be read, or that another endpoint is in."""


class AwsFile(BaseModel):
    """Its content."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fleet_id: str = ""
    regions: tuple[str, ...] = ()
    endpoint_url: str | None = None
    admit: dict[str, tuple[str, ...]] = Field(default_factory=dict)  # networks, by scenario
    admitted: dict[str, tuple[str, ...]] = Field(default_factory=dict)  # the same, by region

    @property
    def networks(self) -> tuple[str, ...]:
        """That all scenarios together let in."""
        return tuple(sorted({network for mine in self.admit.values() for network in mine}))

    @property
    def outdated(self) -> tuple[str, ...]:
        """Regions whose security group may admit others."""
        return tuple(name for name in self.regions if self.admitted.get(name, ()) != self.networks)


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


def note_fleet(files: HomeFiles, scenario: str, site: AwsSite, regions: Collection[str]) -> AwsFile:
    """Keep that instances may be in these regions from now on, and whom they let in; what is known.

    Raises AwsFileError: the home's instances are behind another endpoint.
    """
    files.home.mkdir(parents=True, exist_ok=True)
    with _locked(files):
        known = read_aws_file(files.aws)
        if known.fleet_id and known.endpoint_url != site.endpoint_url:
            raise AwsFileError(
                f"the nodes of {files.home} are behind {known.endpoint_url or 'AWS itself'}, "
                f"and the scenario says {site.endpoint_url or 'AWS itself'}; end them with `coral "
                f"down` and delete {files.aws.name}, or use another --home"
            )
        made = with_scenario(known, scenario, site, regions)
        if made != known:
            write_model(files.aws, made)
        return made


def with_scenario(
    known: AwsFile, scenario: str, site: AwsSite, regions: Collection[str], fleet_id: str = ""
) -> AwsFile:
    """The file as it is once the scenario runs; a new fleet gets the id, or one of its own."""
    return AwsFile(
        fleet_id=known.fleet_id or fleet_id or uuid.uuid4().hex[:8],
        regions=tuple(sorted({*known.regions, *regions})),
        endpoint_url=site.endpoint_url,
        admit={**known.admit, scenario: tuple(sorted(site.admit))},
        admitted=known.admitted,
    )


def note_admitted(files: HomeFiles, region: str, networks: tuple[str, ...]) -> None:
    """The region's security group admits these, and no others that Coral let in."""
    with _locked(files):
        known = read_aws_file(files.aws)
        admitted = {**known.admitted, region: networks}
        write_model(files.aws, known.model_copy(update={"admitted": admitted}))


def forget_scenarios(files: HomeFiles) -> None:
    """No scenario lets anybody in any more: the next that runs says it anew."""
    if files.aws.exists():
        with _locked(files):
            write_model(files.aws, read_aws_file(files.aws).model_copy(update={"admit": {}}))


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


def _locked(files: HomeFiles) -> FileLock:
    return FileLock(files.aws.with_suffix(".lock"))
