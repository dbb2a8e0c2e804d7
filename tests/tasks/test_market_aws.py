"""AWS as a source, over HTTP to a server on this machine."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest

from catalog import reads
from catalog.market.pull import Of, Pull
from catalog.seed import import_seed
from catalog.store import Catalog
from executor.aws import LEASE_TAG
from executor.aws.errors import (
    AwsAnswerError,
    ClockSkewError,
    CredentialsError,
    DeniedError,
    RegionOffError,
)
from planner.types import InstanceType
from tasks.market.aws import answers, requests
from tasks.market.aws.source import WORKERS, AwsSource
from tests.support.aws_data import shipped_snapshot
from tests.support.aws_server import AwsServer

EAST = "aws:us-east-1"
FEW = {"g6.xlarge", "g6.12xlarge", "g5.xlarge", "p4d.24xlarge", "p5.48xlarge"}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> list[InstanceType]:
    catalog = Catalog(tmp_path_factory.mktemp("types"))
    with catalog.write() as connection:
        import_seed(connection)
        return [k for k in reads.read_instance_types(connection) if k.cloud == "aws"]


@pytest.fixture
def source(kinds: list[InstanceType], aws: AwsServer) -> AwsSource:
    """A few types in two regions."""
    aws.enabled -= {"eu-central-1"}
    return AwsSource([kind for kind in kinds if kind.name in FEW], deadline_s=120.0)


def now() -> datetime:
    return datetime.now(UTC)


def failed(pull: Pull) -> dict[tuple[str, Of], str]:
    return {(part.domain, part.of): part.failed for part in pull.parts if part.failed}


def prices(pull: Pull, **where: str) -> list[tuple]:
    frame = pull.prices
    for name, value in where.items():
        frame = frame.filter(pl.col(name) == value)
    return sorted(frame.select("domain", "zone", "instance_type", "price_usd_per_hour").rows())


def test_prices_are_those_of_the_cloud_by_zone_id(source: AwsSource, aws: AwsServer) -> None:
    pull = source.pull(now())
    assert failed(pull) == {}
    mine = {kind.name for kind in source.types}
    assert prices(pull, market="spot") == sorted(
        (f"aws:{p.region}", p.zone_id, p.instance_type, p.price)
        for p in aws.data.spot
        if p.region in aws.enabled and p.instance_type in mine
    )
    on_demand = prices(pull, market="on_demand")
    assert ("aws:us-east-1", "use1-az6", "p5.48xlarge", 55.04) in on_demand
    assert all(
        usd == aws.data.on_demand[domain.removeprefix("aws:"), kind]
        for domain, _, kind, usd in on_demand
    )
    offered = {(domain, zone, kind) for domain, zone, kind in pull.offerings}
    assert {row[:3] for row in on_demand} <= offered


def test_every_action_is_one_of_the_policy_and_goes_to_this_machine(
    source: AwsSource, aws: AwsServer
) -> None:
    source.pull(now())
    allowed = {
        action for one in requests.read_policy()["Statement"] for action in one["Action"]
    }  # fmt: skip
    assert set(aws.actions()) == allowed  # all that it needs, and nothing that it does not
    assert all(one["Effect"] == "Allow" for one in requests.read_policy()["Statement"])
    assert "unsigned" not in {call.service for call in aws.calls}
    assert {call.region for call in aws.calls} <= aws.enabled


def test_answers_in_many_pages_are_whole(source: AwsSource, aws: AwsServer) -> None:
    whole = prices(source.pull(now()))
    aws.page_size = 7
    before = len(aws.calls)
    assert prices(source.pull(now())) == whole
    assert len(aws.calls) > 2 * before


def test_calls_side_by_side_are_bounded(source: AwsSource, aws: AwsServer) -> None:
    aws.fail("*", delay_s=0.05)
    source.pull(now())
    assert 3 < aws.most_in_flight <= WORKERS


def test_the_next_pull_asks_from_the_last_one_on(source: AwsSource, aws: AwsServer) -> None:
    aws.move_spot("g6.xlarge", 1.1, now() - timedelta(minutes=30))
    aws.move_spot("g6.xlarge", 1.2, now() - timedelta(minutes=3))
    last = now() - timedelta(minutes=5)
    later = replace(source, since={EAST: last}, regions=["us-east-1"]).pull(now())
    asked = [c for c in aws.calls if c.action == "DescribeSpotPriceHistory"]
    start = datetime.fromisoformat(asked[-1].parameters["StartTime"].replace("Z", "+00:00"))
    assert last - start == timedelta(minutes=10)
    mine = later.prices.filter(
        (pl.col("instance_type") == "g6.xlarge") & (pl.col("market") == "spot")
        & (pl.col("zone") == "use1-az6")
    ).sort("observed_at")  # fmt: skip
    assert mine.height == 2  # what held fifteen minutes ago, and the change since


def test_facts_are_the_clouds(source: AwsSource) -> None:
    facts = {fact.instance_type: fact for fact in source.pull(now()).facts}
    h100 = facts["p5.48xlarge"]
    assert (h100.gpu, h100.gpu_count, h100.vcpus) == ("H100", 8, 192)
    assert (h100.gpu_memory_gib, h100.memory_gib) == (80.0, 2048.0)
    assert h100.network_gbit_per_s == 3200.0
    assert facts["g6.xlarge"].gpu == "L4"


def test_placement_scores_are_asked_for_three_types_or_more_in_batches(
    kinds: list[InstanceType], aws: AwsServer
) -> None:
    aws.enabled = set(shipped_snapshot().regions)
    aws.scores["us-west-2"] = 3
    regions = [*sorted(aws.enabled)[:12], "us-east-1", "us-west-2"]
    pull = AwsSource(kinds, regions=sorted(set(regions)), deadline_s=120.0).pull(now())
    asked = [c.parameters for c in aws.calls if c.action == "GetSpotPlacementScores"]
    assert all("InstanceType.3" in one and "RegionName.11" not in one for one in asked)
    scored = {(s.domain, kind): s.score for s in pull.scores for kind in s.concerns}
    assert scored["aws:us-west-2", "p5.48xlarge"] == 3
    assert scored[EAST, "p5.48xlarge"] == 7
    assert {kind for _, kind in scored} == {kind.name for kind in kinds}


def test_score_groups_depend_on_the_types_alone(kinds: list[InstanceType]) -> None:
    groups = requests.score_groups(kinds)
    assert groups == requests.score_groups(kinds[::-1])
    h100 = next(asked for asked, mine in groups if "p5.48xlarge" in mine)
    assert len(h100) == 3
    assert {"p5.4xlarge", "p5.48xlarge"} < set(h100)
    assert all(name.startswith("p") for name in h100)


def test_quotas_count_what_runs_and_know_what_is_corals(source: AwsSource, aws: AwsServer) -> None:
    import boto3

    ec2 = boto3.client("ec2", region_name="us-east-1")
    image = ec2.describe_images()["Images"][0]["ImageId"]
    for kind, tags in (("g6.xlarge", []), ("g6.12xlarge", [{"Key": LEASE_TAG, "Value": "a"}])):
        ec2.run_instances(
            ImageId=image, InstanceType=kind, MinCount=1, MaxCount=1,
            TagSpecifications=[{"ResourceType": "instance", "Tags": tags}] if tags else [],
        )  # fmt: skip
    aws.quotas["us-east-1", "L-DB2E81BA"] = 96.0
    pull = replace(source, regions=["us-east-1"]).pull(now())
    mine = next(q for q in pull.quotas if (q.family, q.market) == ("G and VT", "on_demand"))
    assert (mine.limit_vcpus, mine.used_vcpus, mine.own_vcpus) == (96.0, 4.0, 48.0)
    for one in ec2.describe_instances()["Reservations"]:
        ec2.terminate_instances(InstanceIds=[i["InstanceId"] for i in one["Instances"]])


def test_throttling_that_ends_is_waited_out(source: AwsSource, aws: AwsServer) -> None:
    fault = aws.fail("DescribeSpotPriceHistory", "RequestLimitExceeded", status=503, times=2)
    pull = source.pull(now())
    assert failed(pull) == {}
    assert fault.times == 0


def test_throttling_that_goes_on_fails_its_part_alone(
    source: AwsSource, aws: AwsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor.aws.clients.ATTEMPTS", 2)
    aws.fail("DescribeSpotPriceHistory", "RequestLimitExceeded", status=503, region="us-west-2")
    pull = source.pull(now())
    assert list(failed(pull)) == [("aws:us-west-2", Of.SPOT)]
    said = failed(pull)["aws:us-west-2", Of.SPOT]
    assert "AWS throttles ec2:DescribeSpotPriceHistory in us-west-2" in said
    assert "market.aws_regions" in said
    assert not prices(pull, domain="aws:us-west-2", market="spot")
    assert prices(pull, domain="aws:us-west-2", market="on_demand")


def test_a_denied_action_is_named_with_the_line_to_add(source: AwsSource, aws: AwsServer) -> None:
    aws.fail("GetSpotPlacementScores", "UnauthorizedOperation", status=403)
    pull = source.pull(now())
    assert {of for _, of in failed(pull)} == {Of.SCORES}
    said = failed(pull)[EAST, Of.SCORES]
    assert "AWS denies ec2:GetSpotPlacementScores in us-east-1" in said
    assert '{"Effect": "Allow", "Action": "ec2:GetSpotPlacementScores", "Resource": "*"}' in said
    assert prices(pull)
    aws.fail("DescribeRegions", "UnauthorizedOperation", status=403)
    with pytest.raises(DeniedError, match="ec2:DescribeRegions"):
        source.pull(now())
    aws.faults.clear()
    aws.fail("GetProducts", "AccessDeniedException")
    pull = source.pull(now())
    assert {of for _, of in failed(pull)} == {Of.ON_DEMAND}
    assert "AWS denies pricing:GetProducts" in failed(pull)[EAST, Of.ON_DEMAND]


def test_no_credentials(source: AwsSource, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    with pytest.raises(CredentialsError, match="no AWS credentials: run `aws configure`") as found:
        source.pull(now())
    assert found.value.exit_code == 2


def test_a_profile_that_is_not_there(source: AwsSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(CredentialsError, match=r"nobody.*set AWS_PROFILE"):
        source.pull(now())


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("ExpiredToken", "the AWS credentials have expired"),
        ("RequestExpired", "the AWS credentials have expired"),
        ("InvalidClientTokenId", "AWS does not know these credentials"),
    ],
)
def test_credentials_that_are_no_good(
    source: AwsSource, aws: AwsServer, code: str, message: str
) -> None:
    aws.fail("*", code)
    with pytest.raises(CredentialsError, match=message):
        source.pull(now())


def test_credentials_that_expire_in_the_middle_leave_what_came(
    source: AwsSource, aws: AwsServer
) -> None:
    aws.fail("DescribeInstanceTypes", "ExpiredToken")
    pull = source.pull(now())
    assert {of for _, of in failed(pull)} == {Of.FACTS}
    assert "expired" in failed(pull)[EAST, Of.FACTS]


def test_a_clock_that_is_off_is_said_with_its_minutes(source: AwsSource, aws: AwsServer) -> None:
    aws.clock = timedelta(minutes=-17)
    aws.fail("*", "RequestExpired")
    with pytest.raises(ClockSkewError, match="clock is off by 17 minutes"):
        source.pull(now())


def test_a_region_that_is_off_is_named_and_the_others_land(
    source: AwsSource, aws: AwsServer
) -> None:
    aws.enabled = {"us-east-1", "eu-central-1"}
    pull = replace(source, regions=["us-east-1", "us-west-2"]).pull(now())
    assert failed(pull) == {
        ("aws:us-west-2", of): "region us-west-2 is not switched on for this account"
        for of in (Of.SPOT, Of.ON_DEMAND)
    }
    assert prices(pull, domain=EAST)
    with pytest.raises(RegionOffError, match=r"us-west-2.*it has eu-central-1, us-east-1"):
        replace(source, regions=["us-west-2"]).pull(now())


def test_a_region_that_says_it_is_off_when_asked(source: AwsSource, aws: AwsServer) -> None:
    aws.fail("*", "AuthFailure", region="us-west-2", status=401)
    pull = source.pull(now())
    said = failed(pull)["aws:us-west-2", Of.SPOT]
    assert "region us-west-2 is not switched on for this account (AuthFailure" in said
    assert {domain for domain, _ in failed(pull)} == {"aws:us-west-2"}


def test_a_region_that_hangs_is_cut_off_and_what_was_answered_counts(
    source: AwsSource, aws: AwsServer
) -> None:
    aws.enabled.add("eu-central-1")
    aws.fail("*", region="us-west-2", delay_s=60.0)
    aws.fail("DescribeInstanceTypes", region="eu-central-1", delay_s=60.0)
    started = time.monotonic()
    pull = replace(source, deadline_s=8.0).pull(now())
    assert time.monotonic() - started < 12.0
    west = {("aws:us-west-2", of) for of in Of} - {("aws:us-west-2", Of.SCORES)}
    assert set(failed(pull)) == west | {("aws:eu-central-1", Of.FACTS)}
    assert set(failed(pull).values()) == {"no answer within 8 s"}
    assert prices(pull, domain=EAST, market="spot")
    assert prices(pull, domain="aws:eu-central-1", market="spot")


@pytest.mark.parametrize(
    ("action", "body", "part"),
    [
        ("DescribeSpotPriceHistory",
         b"<DescribeSpotPriceHistoryResponse><spotPriceHistorySet><item><instanceType>g6.xlarge"
         b"</instanceType></item></spotPriceHistorySet></DescribeSpotPriceHistoryResponse>",
         Of.SPOT),
        ("DescribeSpotPriceHistory", b"<html>maintenance", Of.SPOT),
        ("ListServiceQuotas", b'{"Quotas": [{"QuotaCode": "L-DB2E81BA"}]}', Of.QUOTAS),
        ("GetProducts", b'{"PriceList": ["{\\"product\\": {}}"]}', Of.ON_DEMAND),
    ],
)  # fmt: skip
def test_an_answer_that_has_changed_is_said(
    source: AwsSource, aws: AwsServer, action: str, body: bytes, part: Of
) -> None:
    aws.fail(action, body=body, status=200)
    pull = source.pull(now())
    assert {of for _, of in failed(pull)} == {part}
    assert f":{action}" in failed(pull)[EAST, part]


def test_an_answer_without_regions_is_no_market(source: AwsSource, aws: AwsServer) -> None:
    aws.enabled.clear()
    aws.fail("DescribeRegions", status=200, body=b"<DescribeRegionsResponse/>")
    with pytest.raises((RegionOffError, AwsAnswerError)):
        source.pull(now())


def test_prices_of_the_price_list_are_hourly_and_not_zero() -> None:
    def product(*prices: tuple[str, str]) -> str:
        import json

        terms = {
            str(number): {"unit": unit, "pricePerUnit": {"USD": usd}}
            for number, (unit, usd) in enumerate(prices)
        }
        return json.dumps(
            {"product": {"attributes": {"regionCode": "us-east-1"}},
             "terms": {"OnDemand": {"term": {"priceDimensions": terms}}}}
        )  # fmt: skip

    assert answers.on_demand_prices(
        [{"PriceList": [product(("Hrs", "0.0")), product(("Hrs", "2.5"), ("Quantity", "0.1"))]}]
    ) == {"us-east-1": 2.5}


def test_without_boto3_it_says_what_to_install(
    kinds: list[InstanceType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    with pytest.raises(Exception, match=r"pip install 'coral-serving\[aws\]'"):
        AwsSource(kinds).pull(now())


def test_commands_do_not_load_boto3_or_moto(repository: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys, coral.cli, tasks.inputs, tasks.market.refresh, flows.refresh_market\n"
        "print([n for n in ('boto3', 'moto', 'gpuhunt', 'matplotlib') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=repository, check=True
    )
    assert done.stdout.strip() == "[]"
