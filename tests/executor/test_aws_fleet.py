"""The AWS fleet over HTTP against the local server: launches, zones, tags, ends, errors, chaos."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
import pytest

from bench.chaos import MemoryStore
from bench.chaos_aws import run_aws_schedule
from executor.apply import REFUSED, apply_actions, end_all, settle
from executor.aws.clients import AwsClients
from executor.aws.fleet import FLEET_TAG, LEASE_TAG, AwsFleet
from executor.aws.groups import admit_where_it_is
from executor.aws.launch_errors import NO_CAPACITY, TRANSIENT
from executor.aws.regions import RegionSettings
from executor.fleet import FatalError, NoCapacityError, TransientError
from planner.catch_up import InstanceState
from planner.leases import Lease, LeaseKey, LeaseState, reconcile
from planner.types import Market, Offer
from tests.support.aws_answers import IMAGE
from tests.support.aws_server import AwsServer

NOW = datetime.now(UTC)
TYPE = "g6.xlarge"
EAST, WEST = "us-east-1", "us-west-2"
SPOT = (f"aws:{EAST}", TYPE, Market.SPOT)
WESTERN = (f"aws:{WEST}", TYPE, Market.ON_DEMAND)
ZONES = {"use1-az1": "", "use1-az2": ""}


def offer(key: LeaseKey, zone: str | None = None) -> Offer:
    return Offer(
        domain=key[0], instance_type=key[1], node_class="L4 x1", market=key[2],
        price_usd_per_hour=0.3, stock=9, stock_source="a test", zone=zone, gpus=1, vcpus=4,
    )  # fmt: skip


@pytest.fixture
def server() -> Iterator[AwsServer]:
    with AwsServer() as found, found.environment():
        yield found
        for name in (EAST, WEST):  # moto's instances outlive its server
            ec2 = boto3.client("ec2", region_name=name)
            rows = ec2.describe_instances()["Reservations"]
            mine = [one["InstanceId"] for row in rows for one in row["Instances"]]
            if mine:
                ec2.terminate_instances(InstanceIds=mine)


@pytest.fixture
def fleet(server: AwsServer, request: pytest.FixtureRequest) -> AwsFleet:
    zones = {SPOT: ["use1-az1", "use1-az2"]}
    name = f"f{abs(hash(request.node.name)) % 10**8}"
    return AwsFleet(
        AwsClients(), name, (EAST, WEST), RegionSettings(IMAGE, root_gib=30), zones,
        user_data=lambda lease: f"#!/bin/sh\n# {lease.id}\n",
    )  # fmt: skip


def lease(name: str = "a", key: LeaseKey = SPOT, zone: str | None = "use1-az1") -> Lease:
    made = offer(key, zone)
    return Lease(
        name, made.domain, made.instance_type, made.node_class, made.market, 0.3,
        LeaseState.PLANNED, NOW, zone=zone, fleet="aws", requested_at=NOW,
    )  # fmt: skip


def alive(fleet: AwsFleet) -> list[str]:
    return [one.lease_id for one in fleet.instances(NOW) if one.state.lives]


def described(instance_id: str, region: str = EAST) -> dict[str, Any]:
    ec2 = boto3.client("ec2", region_name=region)
    found = ec2.describe_instances(InstanceIds=[instance_id])
    return found["Reservations"][0]["Instances"][0]


def test_a_token_is_one_instance_with_the_leases_tags(server: AwsServer, fleet: AwsFleet) -> None:
    first = fleet.launch(lease(), NOW)
    again = fleet.launch(lease(), NOW + timedelta(minutes=5))
    assert again == first
    (one,) = fleet.instances(NOW)
    assert (one.id, one.lease_id, one.state) == (first.instance_id, "a", InstanceState.RUNNING)
    found = described(one.id)
    tags = {tag["Key"]: tag["Value"] for tag in found["Tags"]}
    assert (tags[FLEET_TAG], tags[LEASE_TAG]) == (fleet.fleet_id, "a")
    assert found["InstanceType"] == TYPE
    (asked,) = {
        (c.parameters["InstanceMarketOptions.MarketType"], c.parameters["ClientToken"])
        for c in server.calls
        if c.action == "RunInstances"
    }
    assert asked == ("spot", lease().token)
    fleet.terminate(one.id)
    fleet.terminate(one.id)
    assert alive(fleet) == []


def test_a_region_is_prepared_once_and_admits_the_fleet_alone(
    server: AwsServer, fleet: AwsFleet
) -> None:
    fleet.launch(lease("a"), NOW)
    fleet.launch(lease("b"), NOW)
    assert server.actions()["ec2:CreateLaunchTemplate"] == 1
    again = replace(fleet)  # another controller of the same home
    again.launch(lease("c"), NOW)
    ec2 = boto3.client("ec2", region_name=EAST)
    name = f"coral-{fleet.fleet_id}"
    (group,) = ec2.describe_security_groups(GroupNames=[name])["SecurityGroups"]
    (rule,) = group["IpPermissions"]
    assert [pair["GroupId"] for pair in rule["UserIdGroupPairs"]] == [group["GroupId"]]
    assert not rule["IpRanges"]
    templates = ec2.describe_launch_templates()["LaunchTemplates"]
    (template,) = [t for t in templates if t["LaunchTemplateName"].startswith(name)]
    versions = ec2.describe_launch_template_versions(LaunchTemplateId=template["LaunchTemplateId"])
    data = versions["LaunchTemplateVersions"][0]["LaunchTemplateData"]
    assert data["MetadataOptions"]["HttpTokens"] == "required"
    assert data["InstanceInitiatedShutdownBehavior"] == "terminate"
    (volume,) = data["BlockDeviceMappings"]
    assert (volume["Ebs"]["VolumeSize"], volume["Ebs"]["DeleteOnTermination"]) == (30, True)


def rules(name: str) -> set[str]:
    """Networks that reach the engines of a security group in the east."""
    ec2 = boto3.client("ec2", region_name=EAST)
    (group,) = ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": [name]}])[
        "SecurityGroups"
    ]
    return {one["CidrIp"] for rule in group["IpPermissions"] for one in rule["IpRanges"]}


def test_networks_that_are_admitted_no_more_are_revoked_unless_others_made_the_rule(
    server: AwsServer, fleet: AwsFleet
) -> None:
    name, both = f"coral-{fleet.fleet_id}", ("10.1.0.0/16", "10.2.0.0/16")
    admitting = replace(fleet, settings=replace(fleet.settings, admit=both))
    admitting.launch(lease("a"), NOW)
    assert rules(name) == set(both)
    ec2 = boto3.client("ec2", region_name=EAST)
    (group,) = ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": [name]}])[
        "SecurityGroups"
    ]
    for first, last, network in ((20000, 20099, "10.3.0.0/16"), (22, 22, "10.1.0.0/16")):
        ec2.authorize_security_group_ingress(
            GroupId=group["GroupId"], IpProtocol="tcp", FromPort=first, ToPort=last, CidrIp=network
        )  # by hand
    admit_where_it_is(fleet.clients, EAST, fleet.fleet_id, both[1:])
    assert rules(name) == {"10.2.0.0/16", "10.3.0.0/16", "10.1.0.0/16"}  # the last for port 22
    assert server.actions()["ec2:RevokeSecurityGroupIngress"] == 1
    admit_where_it_is(fleet.clients, WEST, fleet.fleet_id, both)  # no group there yet
    admit_where_it_is(fleet.clients, EAST, fleet.fleet_id, both[1:])
    assert server.actions()["ec2:RevokeSecurityGroupIngress"] == 1


def test_instances_that_no_region_lists_cost_one_look(server: AwsServer, fleet: AwsFleet) -> None:
    made = fleet.launch(lease("a"), NOW)
    before = server.actions()["ec2:DescribeInstances"]
    for number in range(20):
        fleet.terminate(f"i-{number:017x}")
    assert server.actions()["ec2:DescribeInstances"] == before + len(fleet.regions)
    fleet.terminate(made.instance_id)  # where it is was said at its launch
    assert server.actions()["ec2:DescribeInstances"] == before + len(fleet.regions)
    assert alive(fleet) == []


def test_without_capacity_the_next_zone_is_asked_with_another_token(
    server: AwsServer, fleet: AwsFleet
) -> None:
    store = MemoryStore()
    names = {z["ZoneId"]: z["ZoneName"] for z in boto3.client("ec2", region_name=EAST)
             .describe_availability_zones()["AvailabilityZones"]}  # fmt: skip
    server.capacity[TYPE, names["use1-az1"]] = 0
    offers = {SPOT: offer(SPOT, "use1-az1")}
    found = apply_actions(store, fleet, reconcile({SPOT: 1}, offers, []), NOW)
    assert (found.launched, found.failed) == (1, 0)
    (one,) = store.all()
    assert (one.zone, one.attempt, one.state) == ("use1-az2", 1, LeaseState.LAUNCHING)
    zone = described(one.instance_id or "")["Placement"]["AvailabilityZone"]
    assert zone == names["use1-az2"]
    server.capacity[TYPE, names["use1-az2"]] = 0
    more = apply_actions(store, fleet, reconcile({SPOT: 2}, offers, store.all()), NOW)
    assert more.failed == 1
    assert "InsufficientInstanceCapacity" in more.why[0]
    (failed,) = [x for x in store.all() if x.state is LeaseState.FAILED]
    assert failed.zone is None  # none of its zones had any
    sent = server.actions()["ec2:RunInstances"]
    assert sent == 4  # each zone once: the client does not repeat what has no capacity


@pytest.mark.parametrize("code", sorted(NO_CAPACITY))
def test_codes_of_no_capacity(server: AwsServer, fleet: AwsFleet, code: str) -> None:
    server.fail("RunInstances", code, status=500)
    with pytest.raises(NoCapacityError, match=code):
        fleet.launch(lease(), NOW)


@pytest.mark.parametrize("code", sorted(TRANSIENT))
def test_codes_that_are_asked_again(server: AwsServer, fleet: AwsFleet, code: str) -> None:
    server.fail("RunInstances", code, status=503, times=1)
    with pytest.raises(TransientError, match=code):
        fleet.launch(lease(), NOW)
    fleet.launch(lease(), NOW)
    assert alive(fleet) == ["a"]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("UnauthorizedOperation", "ec2:RunInstances"),
        ("InvalidAMIID.NotFound", "; correct fleet.aws.images"),
        ("ExpiredToken", "have expired"),
    ],
)
def test_what_will_never_work_is_refused_at_once(
    server: AwsServer, fleet: AwsFleet, code: str, message: str
) -> None:
    store, offers = MemoryStore(), {SPOT: offer(SPOT)}
    server.fail("RunInstances", code)
    found = apply_actions(store, fleet, reconcile({SPOT: 1}, offers, []), NOW)
    assert (found.failed, found.refused) == (1, 1)
    (one,) = store.all()
    assert one.state is LeaseState.FAILED
    assert one.reason.startswith(REFUSED) and message in one.reason
    assert server.actions()["ec2:RunInstances"] == 1


def test_places_that_the_fleet_does_not_have_are_named(fleet: AwsFleet) -> None:
    for domain in ("aws:eu-west-1", "gcp:us-central1"):
        with pytest.raises(FatalError, match=f"no region of domain {domain}; add it to"):
            fleet.launch(lease(key=(domain, TYPE, Market.SPOT), zone=None), NOW)
    with pytest.raises(FatalError, match="no zone use1-az99 for this account, but use1-az"):
        fleet.launch(lease(zone="use1-az99"), NOW)


def test_a_region_that_does_not_answer_leaves_leases_as_they_are(
    server: AwsServer, fleet: AwsFleet
) -> None:
    store, offers = MemoryStore(), {SPOT: offer(SPOT), WESTERN: offer(WESTERN)}
    apply_actions(store, fleet, reconcile({SPOT: 1, WESTERN: 1}, offers, []), NOW)
    settle(store, fleet, NOW)
    fault = server.fail("DescribeInstances", "RequestLimitExceeded", region=WEST, status=503)
    with pytest.raises(TransientError, match=f"in {WEST}"):
        settle(store, fleet, NOW + timedelta(minutes=10))
    assert {x.state for x in store.all()} == {LeaseState.RUNNING}
    server.faults.remove(fault)
    assert len(settle(store, fleet, NOW + timedelta(minutes=10))) == 2


def test_instances_that_users_stop_or_end_by_hand_are_seen(fleet: AwsFleet) -> None:
    store, offers = MemoryStore(), {WESTERN: offer(WESTERN)}
    apply_actions(store, fleet, reconcile({WESTERN: 2}, offers, []), NOW)
    settle(store, fleet, NOW)
    first, second = [x.instance_id or "" for x in store.all()]
    ec2 = boto3.client("ec2", region_name=WEST)
    ec2.terminate_instances(InstanceIds=[first])
    ec2.stop_instances(InstanceIds=[second])
    settle(store, fleet, NOW + timedelta(minutes=5))
    assert {x.state for x in store.all()} == {LeaseState.TERMINATED}
    assert alive(fleet) == []  # the stopped one would have billed its volume for ever


def test_orphans_are_swept_and_down_ends_everything(fleet: AwsFleet) -> None:
    fleet.launch(lease("nobody"), NOW)
    store, offers = MemoryStore(), {WESTERN: offer(WESTERN)}
    apply_actions(store, fleet, reconcile({WESTERN: 2}, offers, []), NOW)
    later = datetime.now(UTC) + timedelta(minutes=2)  # by the cloud's clock
    settle(store, fleet, later)
    assert "nobody" not in alive(fleet)
    assert end_all(store, fleet, store.all(), later) == 2
    settle(store, fleet, later)
    assert {x.state for x in store.all()} == {LeaseState.TERMINATED}
    assert alive(fleet) == []


@pytest.mark.parametrize("seed", range(4))
def test_kills_and_lost_answers_leak_nothing(server: AwsServer, fleet: AwsFleet, seed: int) -> None:
    offers = {SPOT: offer(SPOT, "use1-az1"), WESTERN: offer(WESTERN)}
    assert run_aws_schedule(seed, server, fleet, offers, NOW).found == {}
