"""The AWS fleet: nodes are EC2 instances, one request each, found again by their tags.

Facts that it stands on: a client token makes a request idempotent and is zonal, so every zone is
another attempt with a token of its own; a new instance may be listed a second late; an instance is
gone when `describe_instances` says so. The launch client sends once: botocore would repeat a
request whose zone has no capacity.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from executor.aws import LEASE_TAG
from executor.aws.clients import AwsClients
from executor.aws.launch_errors import raised_by
from executor.aws.regions import Region, RegionSettings
from executor.fleet import FatalError, Launched
from planner.catch_up import Instance, InstanceState
from planner.leases import Lease, LeaseKey
from planner.types import Market

CLOUD = "aws"
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


@dataclass
class AwsFleet:
    """Instances of one home (`fleet_id`) in some regions."""

    clients: AwsClients
    fleet_id: str
    regions: tuple[str, ...]
    settings: RegionSettings
    zones: Mapping[LeaseKey, Sequence[str]] = field(default_factory=dict)  # ids, best first
    user_data: Callable[[Lease], str] = lambda _: ""
    expires_after: timedelta = timedelta(days=1)
    kind: str = CLOUD

    def __post_init__(self) -> None:
        self.launcher = AwsClients(attempts=1)
        self._regions: dict[str, Region] = {}
        self._where: dict[str, str] = {}  # regions of instances, as listed last

    def launch(self, lease: Lease, now: datetime) -> Launched:
        """Run the lease's instance; its token again gives the same one.

        Raises NoCapacityError, TransientError, FatalError.
        """
        name = region_of(lease.domain)
        with raised_by("ec2:RunInstances", name):
            answer = self.launcher.get("ec2", name).run_instances(**self._request(lease))
            return Launched(str(answer["Instances"][0]["InstanceId"]))

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
        self._where = {one.id: name for name, one in found}
        return [one for _, one in found]

    def elsewhere(self, lease: Lease) -> str | None:
        """The next zone of the same offer, after this one had no capacity."""
        zones = list(self.zones.get(lease.key, ()))
        left = zones[zones.index(lease.zone) + 1 :] if lease.zone in zones else zones
        return left[0] if left else None

    def _listed(self, name: str) -> list[tuple[str, Instance]]:
        found = []
        with raised_by("ec2:DescribeInstances", name):
            pages = self.clients.get("ec2", name).get_paginator("describe_instances")
            wanted = [{"Name": f"tag:{FLEET_TAG}", "Values": [self.fleet_id]}]
            for page in pages.paginate(Filters=wanted):
                for reservation in page["Reservations"]:
                    found += [(name, _instance(one)) for one in reservation["Instances"]]
        return found

    def _region_of_instance(self, instance_id: str) -> str | None:
        if instance_id not in self._where:
            for name in self.regions:
                if any(one.id == instance_id for _, one in self._listed(name)):
                    return name
            return None
        return self._where[instance_id]

    def _request(self, lease: Lease) -> dict[str, Any]:
        """The same for the same attempt of a lease, always: else its token would be refused."""
        name = region_of(lease.domain)
        region = self._prepared(name)
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
            "UserData": base64.b64encode(self.user_data(lease).encode()).decode(),
            "TagSpecifications": [
                {"ResourceType": kind, "Tags": tags} for kind in ("instance", "volume")
            ],
        }  # fmt: skip
        if lease.zone is not None:
            request["Placement"] = {"AvailabilityZone": region.zone_name(lease.zone)}
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
        if name not in self.regions:
            raise FatalError(
                f"the fleet has no region {name}; add it to fleet.regions, or take its domain out"
            )
        if name not in self._regions:
            self._regions[name] = Region.prepare(self.clients, name, self.fleet_id, self.settings)
        return self._regions[name]


def region_of(domain: str) -> str:
    """'aws:us-east-1' -> 'us-east-1'. Raises FatalError: a domain of another cloud."""
    cloud, _, region = domain.partition(":")
    if cloud != CLOUD or not region:
        raise FatalError(f"domain {domain} is not of AWS, and the scenario's fleet is")
    return region


def _instance(found: Mapping[str, Any]) -> Instance:
    tags = {tag["Key"]: tag["Value"] for tag in found.get("Tags", ())}
    state = STATES[found["State"]["Name"]]
    return Instance(found["InstanceId"], tags.get(LEASE_TAG, ""), state, found["LaunchTime"])
