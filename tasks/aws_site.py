"""The fleet on EC2 that a scenario describes, and how engines start on its nodes."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

from executor.aws.clients import AwsClients
from executor.aws.fleet import AwsFleet
from executor.aws.groups import admit_where_it_is, group_name
from executor.aws.home import note_admitted, note_fleet, read_aws_file, with_scenario
from executor.aws.regions import RegionSettings
from executor.aws.user_data import PIPELINES, NodeBoot, this_coral, user_data
from executor.control.enrolment import ticket_of
from executor.deployment import EngineSpec
from executor.home import HomeFiles
from executor.local import LocalFleet
from executor.nodes_file import read_nodes
from planner.cloud_site import AwsSite, region_of
from planner.engine import Engine
from planner.errors import InputError
from planner.leases import Lease, LeaseKey
from planner.scenario import ScenarioSpec
from tasks.local_site import engine_spec

DRAFT_FLEET = "new"  # a fleet that no launch has made yet


class UnreachableControllerError(InputError):
    """Nodes of a cloud would not find the controller."""


class WeightsPlaceError(InputError):
    """Nodes of a cloud would not find a model."""


def aws_fleet(
    home: Path, spec: ScenarioSpec, zones: Mapping[LeaseKey, Sequence[str]], *, draft: bool = False
) -> AwsFleet:
    """To launch with; its regions are those of the domains, and where nodes of the home may be.

    A draft leaves nothing behind. Raises NoControllerError, UnreachableControllerError,
    WeightsPlaceError, AwsFileError; BotoMissingError, CredentialsError: no AWS from here.
    """
    files, site = HomeFiles(home), spec.fleet.aws
    for model, engine in spec.fleet.engines.items():
        _check_place(model, engine.path, engine.weights)
    clients = AwsClients(endpoint_url=site.endpoint_url)
    wanted = {region_of(domain, f"scenario {spec.name!r}") for domain in spec.domains}
    if draft:
        known = with_scenario(read_aws_file(files.aws), spec.name, site, wanted, DRAFT_FLEET)
        boots = None
    else:
        controller = LocalFleet(home).require_controller()
        boots = Boots(files, site, controller, pipelines=spec.engine is Engine.CORAL)
        known = note_fleet(files, spec.name, site, wanted)
    return AwsFleet(
        clients,
        known.fleet_id,
        known.regions,
        RegionSettings(
            root_gib=site.root_gib,
            instance_profile=site.instance_profile,
            images=site.images,
            networks=site.networks,
            admit=known.networks,
        ),
        zones,
        user_data=boots.script if boots is not None else lambda _: "",
        nodes=lambda: read_nodes(files.nodes).nodes,
        expires_after=timedelta(hours=site.expire_hours),
    )


def admit_networks(home: Path, fleet: AwsFleet, spec: ScenarioSpec, *, draft: bool) -> list[str]:
    """Bring every region's security group to what the home's scenarios admit now; what, in words.

    What a scenario no longer admits is revoked, also where nothing is launched. A draft says it
    alone. Raises TransientError, FatalError.
    """
    files, said = HomeFiles(home), []
    known = read_aws_file(files.aws)
    if draft:
        known = with_scenario(known, spec.name, spec.fleet.aws, (), fleet.fleet_id)
    for name in known.outdated:
        there = known.admitted.get(name, ())
        for verb, networks in (
            ("Authorize", set(known.networks) - {*there}),
            ("Revoke", {*there} - {*known.networks}),
        ):
            said += [
                f"ec2:{verb}SecurityGroupIngress {network} in {name}, {group_name(fleet.fleet_id)}"
                for network in sorted(networks)
            ]
        if not draft:
            admit_where_it_is(fleet.clients, name, fleet.fleet_id, known.networks)
            note_admitted(files, name, known.networks)
    return said


def check_aws(home: Path, spec: ScenarioSpec) -> None:
    """Find what would keep the fleet from AWS, before anything is planned; nothing is changed.

    Raises an InputError as `aws_fleet` does, or FatalError: no credentials, regions that are off,
    actions that are denied. TransientError: no answer now.
    """
    aws_fleet(home, spec, {}, draft=True).instances(datetime.now(UTC))


class Boots:
    """What nodes of one controller are told.

    Raises UnreachableControllerError.
    """

    def __init__(
        self,
        files: HomeFiles,
        site: AwsSite,
        controller: Mapping[str, object],
        *,
        pipelines: bool = False,
    ) -> None:
        self.files, self.site, self.pipelines = files, site, pipelines
        self.key = str(controller["public_key"])
        self.address = _reached(str(controller["address"]), site)
        self.enrol = _reached(str(controller["enrol"]), site)

    def script(self, lease: Lease) -> str:
        """The lease's user data."""
        return user_data(
            NodeBoot(
                lease_id=lease.id,
                controller=self.address,
                enrol=self.enrol,
                controller_key=self.key,
                ticket=ticket_of(self.files.keys, lease.id),
                root=self.site.root,
                coral=self.site.install or (this_coral(),),
                engine=self.site.engine,
                metadata=self.site.metadata,
                pipelines=self.pipelines,
            )
        )


def aws_engines(spec: ScenarioSpec) -> Mapping[str, EngineSpec]:
    """How the deployment starts each model on its nodes."""
    root, coral = spec.fleet.aws.root, spec.engine is Engine.CORAL
    return {
        name: engine_spec(
            engine,
            command=(f"{root}/engine/bin/vllm",),
            model_path=_on_node(root, engine.path),
            kv_folder=f"{root}/kv",
            environment={
                **({"PYTHONPATH": f"{root}/{PIPELINES}"} if coral else {}),
                **_with_endpoint(engine.environment, spec.fleet.aws),
            },
            pipeline_python=f"{root}/engine/bin/python" if coral else "",
            transport=engine.transport,
        )
        for name, engine in sorted(spec.fleet.engines.items())
    }


def policy() -> Mapping[str, object]:
    """What the credentials of whoever moves such a fleet must allow."""
    import executor.aws

    found: Mapping[str, object] = json.loads(
        (Path(executor.aws.__file__).parent / "policy.json").read_text()
    )
    return found


def _with_endpoint(environment: Mapping[str, str], site: AwsSite) -> dict[str, str]:
    """Nodes fetch weights where the fleet is."""
    own = {"AWS_ENDPOINT_URL": site.endpoint_url} if site.endpoint_url else {}
    return {**own, **environment}


def _on_node(root: str, path: str) -> str:
    return path if path.startswith("/") else f"{root}/{path}"


def _check_place(model: str, path: str, weights: str) -> None:
    if not weights and not path.startswith("/"):
        raise WeightsPlaceError(
            f"nodes would not find {model}: give fleet.engines its `weights` (s3://bucket/prefix, "
            "from `coral weights push`), or as `path` its whole path in the image"
        )
    if weights and urlsplit(weights).scheme not in {"s3", "file", ""}:
        raise WeightsPlaceError(
            f"weights of {model} cannot lie at {weights}; use s3://bucket/prefix"
        )


def _reached(address: str, site: AwsSite) -> str:
    """The controller's address as nodes reach it."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    found = site.controller or host
    try:
        there = ipaddress.ip_address(found.strip("[]"))
    except ValueError:
        return f"tcp://{found}:{port}"  # a name
    if there.is_unspecified or (there.is_loopback and site.endpoint_url is None):
        raise UnreachableControllerError(
            f"nodes cannot reach the controller at {found}: start it with `coral controller "
            "--address tcp://0.0.0.0:7000`, and say in fleet.aws.controller by which address nodes "
            "reach this machine"
        )
    return f"tcp://{found}:{port}"
