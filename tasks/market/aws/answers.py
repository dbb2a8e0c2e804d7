"""What AWS answered, as rows of Coral's; no I/O.

A missing key raises KeyError: the caller says that the answer has changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from catalog.market.pull import Fact, QuotaRow, Score
from executor.aws import LEASE_TAG
from planner.cloud_site import CLOUD

SPOT_SOURCE = "ec2 DescribeSpotPriceHistory"
ON_DEMAND_SOURCE = "AWS price list, GetProducts"
GBIT = re.compile(r"([\d.]+) Gigabit")
# (name, instance types, market) of the quotas that GPU instances fall under, by code. Types that
# none covers have no quota that Coral knows.
QUOTAS = {
    "L-DB2E81BA": ("G and VT", "g*", "on_demand"),
    "L-3819A6DF": ("G and VT", "g*", "spot"),
    "L-417A185B": ("P", "p*", "on_demand"),
    "L-7212CCBC": ("P2 to P4", "p[234]*", "spot"),
    "L-C4BD4855": ("P5", "p5*", "spot"),
}

Page = Mapping[str, Any]
Price = dict[str, object]  # as catalog.market.pull.PRICES


def domain_of(region: str) -> str:
    """'aws:us-east-1'."""
    return f"{CLOUD}:{region}"


def regions_of(pages: Iterable[Page]) -> list[str]:
    """Regions that are on."""
    return sorted(
        item["RegionName"]
        for page in pages
        for item in page["Regions"]
        if item.get("OptInStatus") != "not-opted-in"
    )


def zones_of(pages: Iterable[Page]) -> dict[str, str]:
    """Zone ids by the account's own names."""
    return {
        item["ZoneName"]: item["ZoneId"] for page in pages for item in page["AvailabilityZones"]
    }


def spot_prices(pages: Iterable[Page], region: str, zones: Mapping[str, str]) -> list[Price]:
    """Spot price changes with zone ids."""
    return [
        _price(
            region,
            item.get("AvailabilityZoneId") or zones[item["AvailabilityZone"]],
            item["InstanceType"],
            "spot",
            float(item["SpotPrice"]),
            item["Timestamp"],
            SPOT_SOURCE,
        )
        for page in pages
        for item in page["SpotPriceHistory"]
    ]


def zone_offerings(pages: Iterable[Page]) -> list[tuple[str, str]]:
    """(zone id, instance type)."""
    return sorted(
        (item["Location"], item["InstanceType"])
        for page in pages
        for item in page["InstanceTypeOfferings"]
    )


def on_demand_prices(pages: Iterable[Page]) -> dict[str, float]:
    """USD per hour of one type by region."""
    found: dict[str, float] = {}
    for product in (json.loads(text) for page in pages for text in page["PriceList"]):
        region = product["product"]["attributes"].get("regionCode")
        for price in _hourly(product["terms"].get("OnDemand", {})):
            if region and price > 0:  # capacity that is paid for elsewhere is listed at zero
                found[region] = min(price, found.get(region, price))
    return found


def on_demand_rows(
    region: str, prices: Mapping[str, float], offerings: Sequence[tuple[str, str]]
) -> list[Price]:
    """One row per zone that has the type: an on-demand price is the region's."""
    return [
        _price(region, zone, kind, "on_demand", prices[kind], None, ON_DEMAND_SOURCE)
        for zone, kind in offerings
        if kind in prices
    ]


def facts_of(pages: Iterable[Page]) -> list[Fact]:
    """GPUs, vCPUs, memory and network of types."""
    found = []
    for item in (item for page in pages for item in page["InstanceTypes"]):
        gpus = item.get("GpuInfo", {}).get("Gpus", [{}])
        network = GBIT.search(item.get("NetworkInfo", {}).get("NetworkPerformance", ""))
        found.append(
            Fact(
                cloud=CLOUD,
                instance_type=item["InstanceType"],
                gpu=str(gpus[0].get("Name", "")),
                gpu_count=sum(int(gpu.get("Count", 0)) for gpu in gpus),
                gpu_memory_gib=gpus[0].get("MemoryInfo", {}).get("SizeInMiB", 0) / 1024.0,
                vcpus=int(item["VCpuInfo"]["DefaultVCpus"]),
                memory_gib=item["MemoryInfo"]["SizeInMiB"] / 1024.0,
                network_gbit_per_s=float(network.group(1)) if network else None,
            )
        )
    return found


def quotas_of(
    pages: Iterable[Page], instances: Iterable[Page], region: str, vcpus: Mapping[str, int]
) -> list[QuotaRow]:
    """Quotas of GPU families with what runs against them; `vcpus` by instance type."""
    limits = {item["QuotaCode"]: float(item["Value"]) for page in pages for item in page["Quotas"]}
    running = list(_running(instances, vcpus))
    rows = []
    for code, (family, kinds, market) in QUOTAS.items():
        if code in limits:
            pattern = re.compile(kinds.replace("*", ".*"))
            mine = [one for one in running if one[1] == market and pattern.match(one[0])]
            rows.append(
                QuotaRow(
                    domain=domain_of(region),
                    family=family,
                    instance_types=kinds,
                    market=market,
                    limit_vcpus=limits[code],
                    used_vcpus=sum(count for _, _, count, own in mine if not own),
                    own_vcpus=sum(count for _, _, count, own in mine if own),
                )
            )
    return rows


def scores_of(page: Page, asked: Sequence[str], concerns: Sequence[str], nodes: int) -> list[Score]:
    """Placement scores by region."""
    return [
        Score(domain_of(item["Region"]), tuple(asked), tuple(concerns), nodes, int(item["Score"]))
        for item in page["SpotPlacementScores"]
    ]


def _running(
    pages: Iterable[Page], vcpus: Mapping[str, int]
) -> Iterator[tuple[str, str, int, bool]]:
    """Instance type, market, vCPUs and whether it is Coral's, of every instance."""
    for page in pages:
        for item in (one for group in page["Reservations"] for one in group["Instances"]):
            cpu = item.get("CpuOptions", {})
            count = int(cpu.get("CoreCount", 0)) * int(cpu.get("ThreadsPerCore", 1))
            kind = item["InstanceType"]
            market = "spot" if item.get("InstanceLifecycle") == "spot" else "on_demand"
            own = any(tag["Key"] == LEASE_TAG for tag in item.get("Tags", []))
            yield kind, market, vcpus.get(kind, count), own


def _hourly(terms: Mapping[str, Any]) -> Iterator[float]:
    for term in terms.values():
        for dimension in term["priceDimensions"].values():
            if dimension["unit"] == "Hrs":
                yield float(dimension["pricePerUnit"]["USD"])


def _price(
    region: str,
    zone: str,
    instance_type: str,
    market: str,
    price: float,
    at: datetime | None,
    source: str,
) -> Price:
    return {
        "observed_at": at, "cloud": CLOUD, "domain": domain_of(region), "zone": zone,
        "instance_type": instance_type, "market": market, "price_usd_per_hour": price,
        "nodes": None, "source": source,
    }  # fmt: skip
