"""The AWS fleet: nodes are EC2 instances, one request each, found again by their tags.

Facts that it stands on: a client token makes a request idempotent and is zonal, so every zone is
another attempt with a token of its own; a new instance may be listed a second late; an instance is
gone when `describe_instances` says so. The launch client sends once: botocore would repeat a
request whose zone has no capacity.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from threading import Lock
from typing import Any

from executor.aws import LEASE_TAG
from executor.aws.clients import AwsClients
from executor.aws.groups import group_name
from executor.aws.launch_errors import raised_by
from executor.aws.regions import Region, RegionSettings
from executor.control.controller import DRAIN_S
from executor.fleet import ONCE, FatalError, Launched
from executor.nodes_file import Node
from planner.catch_up import Instance, InstanceState
from planner.cloud_site import CLOUD, region_in
from planner.leases import Lease, LeaseKey
from planner.types import Market

FLEET_TAG, EXPIRY_TAG = "coral:fleet", "coral:expires"
STATES = {
    "pending": InstanceState.PENDING,
    "running": InstanceState.RUNNING,
    "stopping": InstanceState.HALTED,  # by hand: the volume bills on
    "stopped": InstanceState.HALTED,
    "shutting-down": InstanceState.STOPPING,
    "terminated": InstanceState.GONE,
}
LISTERS = 8  # regions at a time
LISTED_S = 5.0  # that a list counts for; who is told to end and is not in it is listed later
NOTICE_S = 5.0  # until routing has stopped and the agents are told


@dataclass
class AwsFleet:
    """Instances of one home (`fleet_id`) in some regions."""

    clients: AwsClients
    fleet_id: str
    regions: tuple[str, ...]
    settings: RegionSettings
    zones: Mapping[LeaseKey, Sequence[str]] = field(default_factory=dict)  # ids, best first
    user_data: Callable[[Lease], str] = lambda _: ""
    nodes: Callable[[], Mapping[str, Node]] = dict  # that enrolled, by lease id
    expires_after: timedelta = timedelta(days=1)
    kind: str = CLOUD
    at_once: int = 16
    drain_s: float = DRAIN_S + NOTICE_S  # EC2 ends an instance without asking it

    def __post_init__(self) -> None:
        self._preparing, self._listing = Lock(), Lock()
        self._regions: dict[str, Region] = {}
        self._unfit: dict[str, FatalError] = {}  # regions that cannot be prepared
        self._where: dict[str, str] = {}  # regions of instances that were launched or listed
        self._listed_at = -math.inf

    @cached_property
    def launcher(self) -> AwsClients:
        """Sends once."""
        return AwsClients(attempts=1, endpoint_url=self.clients.endpoint_url)

    def launch(self, lease: Lease, now: datetime) -> Launched:
        """Run the lease's instance; its token again gives the same one.

        Raises NoCapacityError, TransientError, FatalError.
        """
        name = self._region(lease)
        with raised_by("ec2:RunInstances", name):
            answer = self.launcher.get("ec2", name).run_instances(**self._request(lease))
            instance_id = str(answer["Instances"][0]["InstanceId"])
        self._where[instance_id] = name
        return Launched(instance_id)

    def terminate(self, instance_id: str) -> None:
        """Tell EC2 to end it, in whichever region it is; one that is gone is quiet.

        Raises TransientError, FatalError.
        """
        name = self._region_of_instance(instance_id)
        if name is None:
            return
        with raised_by("ec2:TerminateInstances", name, quiet=("InvalidInstanceID.NotFound",)):
            self.clients.get("ec2", name).terminate_instances(InstanceIds=[instance_id])

    def instances(self, now: datetime) -> list[Instance]:
        """Of all regions at once; none where one of them does not answer.

        Raises TransientError, FatalError.
        """
        with ThreadPoolExecutor(LISTERS) as pool:
            found = [one for rows in pool.map(self._listed, self.regions) for one in rows]
        self._where.update({one.id: name for name, one in found})
        self._listed_at = time.monotonic()
        return [one for _, one in found]

    def elsewhere(self, lease: Lease) -> str | None:
        """The next zone of the same offer, after this one had no capacity."""
        zones = list(self.zones.get(lease.key, ()))
        left = zones[zones.index(lease.zone) + 1 :] if lease.zone in zones else zones
        return left[0] if left else None

    def of_lease(self, lease_id: str) -> list[Instance]:
        """Its instances, in whichever region.

        Raises TransientError, FatalError.
        """
        return [one for name in self.regions for _, one in self._listed(name, lease_id)]

    def calls(self, lease: Lease) -> list[str]:
        """What a launch of the lease would ask of EC2, in words; nothing is asked."""
        name = self._region(lease)
        zone = f" in zone {lease.zone}" if lease.zone else ""
        market = "spot" if lease.market is Market.SPOT else "on demand"
        once = [
            f"ec2:CreateSecurityGroup {group_name(self.fleet_id)} in {name}, {ONCE}",
            f"ec2:CreateLaunchTemplate coral-{self.fleet_id}-* in {name}, {ONCE}",
        ]
        return [
            *(once if name not in self._regions else ()),
            f"ec2:RunInstances {lease.instance_type} in {name}{zone}, {market}, "
            f"${lease.price_usd_per_hour:.4f}/h",
        ]

    def _listed(self, name: str, lease_id: str | None = None) -> list[tuple[str, Instance]]:
        found, known = [], self.nodes()
        with raised_by("ec2:DescribeInstances", name):
            pages = self.clients.get("ec2", name).get_paginator("describe_instances")
            wanted = [{"Name": f"tag:{FLEET_TAG}", "Values": [self.fleet_id]}]
            if lease_id is not None:
                wanted.append({"Name": f"tag:{LEASE_TAG}", "Values": [lease_id]})
            for page in pages.paginate(Filters=wanted):
                for reservation in page["Reservations"]:
                    found += [(name, _instance(one, known)) for one in reservation["Instances"]]
        return found

    def _region_of_instance(self, instance_id: str) -> str | None:
        """None: no region listed it just now, so that it is gone, or is listed later."""
        with self._listing:
            stale = time.monotonic() - self._listed_at > LISTED_S
            if instance_id not in self._where and stale:
                self.instances(datetime.now(UTC))
            return self._where.get(instance_id)

    def _region(self, lease: Lease) -> str:
        """Raises FatalError: the fleet has none of its domain."""
        name = region_in(lease.domain)
        if name is None or name not in self.regions:
            raise FatalError(
                f"the fleet has no region of domain {lease.domain}; add it to the scenario's "
                "domains, or end what is there with `coral down`"
            )
        return name

    def _request(self, lease: Lease) -> dict[str, Any]:
        """The same for the same attempt of a lease, always: else its token would be refused."""
        region = self._prepared(self._region(lease))
        tags = [
            {"Key": FLEET_TAG, "Value": self.fleet_id},
            {"Key": LEASE_TAG, "Value": lease.id},
            {"Key": EXPIRY_TAG, "Value": (lease.created_at + self.expires_after).isoformat()},
            {"Key": "Name", "Value": f"coral-{lease.id[:8]}"},
        ]
        request: dict[str, Any] = {
            "MinCount": 1, "MaxCount": 1,
            "InstanceType": lease.instance_type,
            "ClientToken": lease.token,
            "LaunchTemplate": {"LaunchTemplateId": region.template, "Version": "$Latest"},
            "UserData": self.user_data(lease),  # boto3 encodes it
            "TagSpecifications": [
                {"ResourceType": kind, "Tags": tags} for kind in ("instance", "volume")
            ],
        }  # fmt: skip
        request |= region.place(lease.zone)
        if lease.market is Market.SPOT:
            request["InstanceMarketOptions"] = {
                "MarketType": "spot",
                "SpotOptions": {
                    "SpotInstanceType": "one-time",
                    "InstanceInterruptionBehavior": "terminate",
                },
            }
        return request

    def _prepared(self, name: str) -> Region:
        with self._preparing:
            if name in self._unfit:  # many launches ask once
                raise FatalError(str(self._unfit[name]))
            if name not in self._regions:
                try:
                    made = Region.prepare(self.clients, name, self.fleet_id, self.settings)
                except FatalError as error:
                    self._unfit[name] = error
                    raise
                self._regions[name] = made
            return self._regions[name]


def _instance(found: Mapping[str, Any], nodes: Mapping[str, Node]) -> Instance:
    """As EC2 lists it, with what the controller knows of its agent."""
    tags = {tag["Key"]: tag["Value"] for tag in found.get("Tags", ())}
    lease_id, instance_id = tags.get(LEASE_TAG, ""), found["InstanceId"]
    node = nodes.get(lease_id)
    if node is not None and node.instance_id != instance_id:
        node = None
    addresses = (found.get("PrivateIpAddress"), found.get("PublicIpAddress"))
    return Instance(
        id=instance_id,
        lease_id=lease_id,
        state=STATES[found["State"]["Name"]],
        launched_at=found["LaunchTime"],
        addresses=tuple(address for address in addresses if address),
        ready_at=None if node is None else node.enrolled_at,
        silent_s=0.0 if node is None else node.silent_s,
    )
