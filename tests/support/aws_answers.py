"""Answers that moto does not have, as AWS gives them: each returns (status, body) or None."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from tests.support.aws_query import filters_of, pages, values_of

if TYPE_CHECKING:
    from tests.support.aws_server import AwsServer, Call
Answer = tuple[int, bytes]
NAMESPACE = "http://ec2.amazonaws.com/doc/2016-11-15/"
QUOTAS = {
    "L-DB2E81BA": "Running On-Demand G and VT instances",
    "L-3819A6DF": "All G and VT Spot Instance Requests",
    "L-417A185B": "Running On-Demand P instances",
    "L-7212CCBC": "All P4, P3 and P2 Spot Instance Requests",
    "L-C4BD4855": "All P5 Spot Instance Requests",
    "L-1216C47A": "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances",
}
VCPUS = 512.0
IMAGE = "ami-12c6146b"  # one that moto has in every region
SCORE = 7
BEST = 10  # places that a placement score answer has at most


def ec2_error(code: str, message: str) -> bytes:
    """An error of EC2's query protocol."""
    return (
        f"<Response><Errors><Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>"
        "</Errors><RequestID>local</RequestID></Response>"
    ).encode()


def json_error(code: str, message: str) -> bytes:
    """An error of the JSON protocols."""
    return json.dumps({"__type": code, "message": message}).encode()


def describe_regions(server: AwsServer, call: Call) -> Answer:
    """Regions that the account has switched on."""
    rows = [
        {"regionName": name, "regionEndpoint": f"ec2.{name}.amazonaws.com",
         "optInStatus": "opt-in-not-required"}
        for name in sorted(server.enabled)
    ]  # fmt: skip
    return _items(call.action, "regionInfo", rows)


def describe_zones(server: AwsServer, call: Call) -> Answer:
    """The zones of a region: moto's names, and the snapshot's zones that moto lacks."""
    rows = [
        {"zoneName": name, "zoneState": "available", "regionName": call.region, "zoneId": zone}
        for zone, name in zone_names(server, call.region).items()
    ]
    return _items(call.action, "availabilityZoneInfo", rows)


def describe_spot_price_history(server: AwsServer, call: Call) -> Answer:
    """Changes from StartTime on, and before them the price that held then; newest first."""
    wanted = filters_of(call.parameters)
    kinds = set(wanted.get("instance-type", []))
    start = _time(call.parameters.get("StartTime"))
    mine = [
        p
        for p in server.data.spot
        if p.region == call.region and (not kinds or p.instance_type in kinds)
    ]
    if start is not None:
        held = {
            (p.zone_id, p.instance_type): p
            for p in sorted(mine, key=lambda p: p.at)
            if p.at <= start
        }
        mine = [p for p in mine if p.at > start] + list(held.values())
    mine.sort(key=lambda p: (p.at, p.zone_id, p.instance_type), reverse=True)
    found, token = pages(mine, call.parameters.get("NextToken"), server.page_size)
    names = zone_names(server, call.region)
    rows = [
        {"instanceType": p.instance_type, "productDescription": "Linux/UNIX",
         "spotPrice": f"{p.price:.6f}", "timestamp": p.at.strftime("%Y-%m-%dT%H:%M:%S.000Z"),
         "availabilityZone": names[p.zone_id]}
        for p in found
    ]  # fmt: skip
    return _items(call.action, "spotPriceHistorySet", rows, token)


def describe_offerings(server: AwsServer, call: Call) -> Answer:
    """Which types a zone has: moto's data and the snapshot's."""
    from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS

    kinds = set(filters_of(call.parameters).get("instance-type", []))
    known = INSTANCE_TYPE_OFFERINGS["availability-zone-id"].get(call.region, [])
    pairs = {(o["Location"], o["InstanceType"]) for o in known}
    pairs |= {(p.zone_id, p.instance_type) for p in server.data.spot if p.region == call.region}
    rows = [
        {"instanceType": kind, "locationType": "availability-zone-id", "location": zone}
        for zone, kind in sorted(pairs)
        if not kinds or kind in kinds
    ]
    found, token = pages(rows, call.parameters.get("NextToken"), server.page_size)
    return _items(call.action, "instanceTypeOfferingSet", found, token)


def get_spot_placement_scores(server: AwsServer, call: Call) -> Answer:
    """A score by region; low for fewer than three types, as AWS answers."""
    kinds = set(values_of(call.parameters, "InstanceType"))
    regions = values_of(call.parameters, "RegionName") or sorted(server.enabled)
    rows = [
        {"region": region,
         "score": 1 if len(kinds) < 3 else server.scores.get(region, SCORE)}
        for region in regions
    ]  # fmt: skip
    rows.sort(key=lambda row: -int(str(row["score"])))
    return _items(call.action, "spotPlacementScoreSet", rows[:BEST])


def list_service_quotas(server: AwsServer, call: Call) -> Answer:
    """Quotas of EC2 in vCPUs."""
    rows = [
        {"ServiceCode": "ec2", "QuotaCode": code, "QuotaName": name, "Unit": "None",
         "Value": server.quotas.get((call.region, code), VCPUS)}
        for code, name in QUOTAS.items()
    ]  # fmt: skip
    found, token = pages(rows, call.parameters.get("NextToken"), min(4, server.page_size))
    return 200, json.dumps({"Quotas": found, **({"NextToken": token} if token else {})}).encode()


def get_products(server: AwsServer, call: Call) -> Answer:
    """The price list: one product by region of an instance type."""
    wanted = {f["Field"]: f["Value"] for f in call.parameters.get("Filters", [])}
    kind = wanted.get("instanceType")
    products = [
        _product(region, kind, price)
        for (region, name), price in sorted(server.data.on_demand.items())
        if name == kind
    ]
    found, token = pages(products, call.parameters.get("NextToken"), min(20, server.page_size))
    answer = {"FormatVersion": "aws_v1", "PriceList": found}
    return 200, json.dumps(answer | ({"NextToken": token} if token else {})).encode()


def get_parameter(server: AwsServer, call: Call) -> Answer | None:
    """AWS's own parameters of images, which moto has of another year."""
    name = str(call.parameters.get("Name", ""))
    if not name.startswith("/aws/service/deeplearning/ami/"):
        return None
    return 200, json.dumps({"Parameter": {"Name": name, "Type": "String", "Value": IMAGE}}).encode()


ANSWERS: Mapping[str, Callable[[AwsServer, Call], Answer | None]] = {
    "DescribeRegions": describe_regions,
    "DescribeAvailabilityZones": describe_zones,
    "DescribeSpotPriceHistory": describe_spot_price_history,
    "DescribeInstanceTypeOfferings": describe_offerings,
    "GetSpotPlacementScores": get_spot_placement_scores,
    "ListServiceQuotas": list_service_quotas,
    "GetParameter": get_parameter,
    "GetProducts": get_products,
}


def zone_names(server: AwsServer, region: str) -> dict[str, str]:
    """Zone names by zone id."""
    from moto.ec2.models.availability_zones_and_regions import RegionsAndZonesBackend

    names = {zone.zone_id: zone.name for zone in RegionsAndZonesBackend.zones.get(region, [])}
    free = (f"{region}{letter}" for letter in "abcdefghijklmn")
    for zone in server.data.zones.get(region, ()):
        if zone not in names:
            names[zone] = next(name for name in free if name not in names.values())
    return names


def _product(region: str, kind: str | None, price: float) -> str:
    """One entry of a price list: JSON in a string, as AWS sends it."""
    dimension = {
        "unit": "Hrs", "beginRange": "0", "endRange": "Inf",
        "description": f"${price} per On Demand Linux {kind} Instance Hour",
        "pricePerUnit": {"USD": f"{price:.10f}"},
    }  # fmt: skip
    return json.dumps(
        {
            "product": {
                "productFamily": "Compute Instance",
                "attributes": {
                    "instanceType": kind, "regionCode": region, "operatingSystem": "Linux",
                    "tenancy": "Shared", "preInstalledSw": "NA", "capacitystatus": "Used",
                },
                "sku": f"{region}-{kind}",
            },
            "serviceCode": "AmazonEC2",
            "terms": {
                "OnDemand": {
                    "sku.term": {"priceDimensions": {"sku.term.rate": dimension},
                                 "effectiveDate": "2026-11-01T00:00:00Z"}
                }
            },
        }
    )  # fmt: skip


def _items(
    action: str, name: str, rows: Iterable[Mapping[str, object]], token: str | None = None
) -> Answer:
    items = "".join(
        "<item>" + "".join(f"<{k}>{escape(str(v))}</{k}>" for k, v in row.items()) + "</item>"
        for row in rows
    )
    more = f"<nextToken>{token}</nextToken>" if token else ""
    return 200, (
        f'<{action}Response xmlns="{NAMESPACE}"><requestId>local</requestId>'
        f"<{name}>{items}</{name}>{more}</{action}Response>"
    ).encode()


def _time(text: Any) -> datetime | None:
    if not text:
        return None
    found = datetime.fromisoformat(str(text).replace("Z", "+00:00"))
    return found if found.tzinfo else found.replace(tzinfo=UTC)
