"""What is asked of AWS, as values; no I/O. `POLICY` lists the same actions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from importlib import resources
from typing import Any

from planner.types import InstanceType

PAGE = 1000
PRICE_PAGE = 100
FEWEST_TYPES = 3  # asked for together, or a placement score is always low
SCORE_REGIONS = 10  # of one placement score request: it answers for ten at most
SCORE_NODES = 8
PRODUCT = "Linux/UNIX"
RUNNING = ("pending", "running", "shutting-down", "stopping")  # what counts against a quota

Request = dict[str, Any]


def regions_request() -> Request:
    """Regions that the account has on."""
    return {"AllRegions": False}


def zones_request() -> Request:
    """Zones of a region, local and wavelength zones apart."""
    return {"Filters": [_filter("zone-type", ["availability-zone"])]}


def spot_request(types: Sequence[str], since: datetime) -> Request:
    """Spot price changes since a time, and the prices that held then."""
    return {
        "StartTime": since,
        "Filters": [
            _filter("instance-type", types),
            _filter("product-description", [PRODUCT]),
        ],
        "PaginationConfig": {"PageSize": PAGE},
    }


def offerings_request(types: Sequence[str]) -> Request:
    """Which types each zone has."""
    return {
        "LocationType": "availability-zone-id",
        "Filters": [_filter("instance-type", types)],
        "PaginationConfig": {"PageSize": PAGE},
    }


def facts_request(types: Sequence[str]) -> Request:
    """What AWS says of the types that a region has."""
    return {"Filters": [_filter("instance-type", types)], "PaginationConfig": {"PageSize": 100}}


def on_demand_request(instance_type: str) -> Request:
    """The on-demand price of a type in all regions."""
    wanted = {
        "instanceType": instance_type,
        "operatingSystem": "Linux",
        "preInstalledSw": "NA",
        "tenancy": "Shared",
        "capacitystatus": "Used",
    }
    return {
        "ServiceCode": "AmazonEC2",
        "FormatVersion": "aws_v1",
        "Filters": [
            {"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in wanted.items()
        ],
        "PaginationConfig": {"PageSize": PRICE_PAGE},
    }


def quotas_request() -> Request:
    """Quotas of EC2."""
    return {"ServiceCode": "ec2", "PaginationConfig": {"PageSize": 100}}


def instances_request() -> Request:
    """Instances that count against quotas."""
    return {
        "Filters": [_filter("instance-state-name", RUNNING)],
        "PaginationConfig": {"PageSize": PAGE},
    }


def scores_request(types: Sequence[str], regions: Sequence[str]) -> Request:
    """How likely spot requests of some nodes of these types are to be met, by region."""
    return {
        "InstanceTypes": list(types),
        "TargetCapacity": SCORE_NODES,
        "TargetCapacityUnitType": "units",
        "SingleAvailabilityZone": False,
        "RegionNames": list(regions),
    }


def score_groups(types: Sequence[InstanceType]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Types to ask for together: (all asked for, those that the score is for).

    The types of one GPU, filled up with the nearest others (the same letter of the family, then a
    like number of GPUs) where they are fewer than three. AWS admits few different requests a day,
    so groups depend on nothing but the types.
    """
    by_gpu: dict[str, list[InstanceType]] = {}
    for kind in sorted(types, key=lambda kind: kind.name):
        by_gpu.setdefault(kind.node.gpu.name, []).append(kind)
    groups = []
    for gpu, mine in sorted(by_gpu.items()):
        count = max(kind.node.gpu_count for kind in mine)
        others = [kind for kind in types if kind.node.gpu.name != gpu]
        others.sort(
            key=lambda kind: (
                kind.name[0] != mine[0].name[0], abs(kind.node.gpu_count - count), kind.name
            )
        )  # fmt: skip
        missing = max(0, FEWEST_TYPES - len(mine))
        names = [kind.name for kind in mine]
        asked = sorted([*names, *(kind.name for kind in others[:missing])])
        groups.append((tuple(asked), tuple(names)))
    return groups


def batches(items: Sequence[str], size: int) -> list[list[str]]:
    """Slices of at most so many."""
    return [list(items[first : first + size]) for first in range(0, len(items), size)]


def read_policy() -> dict[str, Any]:
    """The IAM policy with which all of this may be asked, and nothing else."""
    text = resources.files("tasks.market.aws").joinpath("policy.json").read_text(encoding="utf-8")
    policy: dict[str, Any] = json.loads(text)
    return policy


def _filter(name: str, values: Sequence[str]) -> Request:
    return {"Name": name, "Values": sorted(values)}
