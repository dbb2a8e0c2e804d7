"""Files, gpuhunt's catalogues and several sources at once."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest

from catalog.market.pull import Pull
from catalog.market.reads import read_feeds, read_market
from catalog.store import Catalog
from executor.aws.errors import CredentialsError
from planner.errors import CoralError, InputError
from planner.market import MarketSpec
from tasks.market import sources
from tasks.market.files import MarketFileError, pull_file
from tasks.market.hunt import HuntFolderError, market_name, pull_provider
from tasks.market.refresh import refresh
from tasks.market.sources import MarketSpecError, with_sources
from tests.support.aws_server import AwsServer

NOW = datetime.now(UTC)
HEADER = "domain,zone,instance_type,market,price_usd_per_hour,nodes\n"
LINES = (
    "aws:us-east-1,use1-az6,g6.xlarge,spot,0.31,5\n"
    "aws:us-east-1,use1-az6,g6.xlarge,on_demand,0.81,\n"
    "onprem:hall,,g6.xlarge,on_demand,0.2,2\n"
)


def write(folder: Path, text: str, name: str = "offers.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_csv_of_offers(tmp_path: Path) -> None:
    pull = pull_file(write(tmp_path, HEADER + LINES), NOW)
    rows = pull.prices.select("domain", "zone", "market", "price_usd_per_hour", "nodes").rows()
    assert rows == [
        ("aws:us-east-1", "use1-az6", "spot", 0.31, 5),
        ("aws:us-east-1", "use1-az6", "on_demand", 0.81, None),
        ("onprem:hall", None, "on_demand", 0.2, 2),
    ]
    assert {part.domain for part in pull.parts} == {"aws:us-east-1", "onprem:hall"}


def test_a_parquet_of_offers_is_the_same(tmp_path: Path) -> None:
    csv = pull_file(write(tmp_path, HEADER + LINES), NOW)
    path = tmp_path / "offers.parquet"
    pl.read_csv(tmp_path / "offers.csv").write_parquet(path)
    parquet = pull_file(path, NOW)
    assert parquet.prices.drop("source").equals(csv.prices.drop("source"))


def test_a_file_may_describe_types_of_its_own(tmp_path: Path) -> None:
    text = (
        "domain,instance_type,market,price_usd_per_hour,gpu,gpu_count,vcpus\n"
        "onprem:hall,rack-a,on_demand,0.2,L4,4,64\n"
    )
    path = write(tmp_path, text)
    catalog = Catalog(tmp_path)
    found = refresh(catalog, MarketSpec(sources=(str(path),)), NOW)
    assert found.landed[0].new_types == ["rack-a"]
    with catalog.read() as connection:
        rows = read_market(connection, [str(path)])
    assert [(row.node_class, row.domain) for _, _, row in rows] == [("L4 x4", "onprem:hall")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read offers from"),
        ("domain,instance_type,market\na:b,g6.xlarge,spot\n",
         "column price_usd_per_hour is missing; offers need domain, instance_type, market"),
        ("domain,instance_type,market,price_eur_per_hour\na:b,g6.xlarge,spot,1\n",
         "column 'price_eur_per_hour' is no price that Coral takes; give price_usd_per_hour"),
        ("domain,instance_type,market,price_usd_per_month\na:b,g6.xlarge,spot,900\n",
         "column 'price_usd_per_month' is no price that Coral takes"),
        ("domains,instance_type,market,price_usd_per_hour\na:b,g6.xlarge,spot,1\n",
         "column domain is missing; rename 'domains'"),
        (HEADER.replace("nodes", "node") + LINES, "unknown column 'node'; did you mean 'nodes'?"),
        (HEADER + "a:b,,g6.xlarge,spot,$0.31,\n",
         "line 2: price_usd_per_hour must be a number of USD per hour, got '$0.31'"),
        (HEADER + LINES + "a:b,,g6.xlarge,preemptible,0.31,\n",
         "line 5: market must be spot or on_demand, got 'preemptible'"),
        (HEADER + "us-east-1,,g6.xlarge,spot,0.31,\n",
         "line 2: domain must be like 'aws:us-east-1', got 'us-east-1'"),
        (HEADER + "a:b,,,spot,0.31,\na:b,,,spot,0.31,\n",
         "line 2: instance_type is empty (and 1 more lines)"),
        (HEADER + "a:b,,g6.xlarge,spot,0.31,some\n", "nodes must be a whole number of nodes"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_is_named_and_nothing_of_it_is_taken(
    tmp_path: Path, text: str, message: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(MarketFileError) as found:
        pull_file(path, NOW)
    assert message in str(found.value)
    assert str(path) in str(found.value)
    assert found.value.exit_code == 2
    catalog = Catalog(tmp_path)
    with pytest.raises(MarketFileError):
        refresh(catalog, MarketSpec(sources=(str(path),)), NOW)
    with catalog.read() as connection:
        assert read_market(connection, [str(path)]) == []


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(MarketFileError, match=r"no such file of offers: nowhere\.csv"):
        pull_file(Path("nowhere.csv"), NOW)


def test_lines_that_leave_a_file_leave_the_market(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + LINES)
    catalog, market = Catalog(tmp_path), MarketSpec(sources=(str(path),))
    refresh(catalog, market, NOW)
    write(tmp_path, HEADER + LINES.splitlines(keepends=True)[0])
    second = refresh(catalog, market, NOW + timedelta(minutes=1)).landed[0]
    assert second.withdrawn == 1  # onprem:hall was refused: its cloud rents no such type
    with catalog.read() as connection:
        rows = read_market(connection, [str(path)])
    assert [(row.domain, row.price_usd_per_hour, row.nodes) for _, _, row in rows] == [
        ("aws:us-east-1", 0.31, 5)
    ]


CATALOGUE = (
    "instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot,disk_size,"
    "gpu_vendor,flags\n"
)


GCP = (
    "g2-standard-4,us-central1-a,0.71,4,16,1,L4,24,False,,nvidia,\n"
    "g2-standard-4,us-central1-a,0.28,4,16,1,L4,24,True,,nvidia,\n"
    "n1-standard-8,us-central1-b,0.73,8,30,1,T4,16,False,,nvidia,\n"
    "e2-standard-4,us-central1-a,0.13,4,16,0,,,False,,,\n"
)
LAMBDA = (
    "gpu_8x_h100_sxm5,us-west-3,23.92,208,1800,8,H100,80,False,,nvidia,\n"
    "gpu_1x_gh200,us-west-3,1.5,64,432,1,GH200,96,False,,nvidia,\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Catalogues as gpuhunt has them."""
    write(tmp_path, CATALOGUE + GCP, "gcp.csv")
    write(tmp_path, CATALOGUE + LAMBDA, "lambdalabs.csv")
    return tmp_path


def test_gpuhunt_reads_a_folder_of_catalogues(folder: Path) -> None:
    gcp = pull_provider("gcp", NOW, folder)
    columns = ["domain", "zone", "instance_type", "market", "price_usd_per_hour"]
    assert sorted(gcp.prices.select(columns).rows()) == [
        ("gcp:us-central1", "us-central1-a", "g2-standard-4", "on_demand", 0.71),
        ("gcp:us-central1", "us-central1-a", "g2-standard-4", "spot", 0.28),
        ("gcp:us-central1", "us-central1-b", "n1-standard-8+1xT4", "on_demand", 0.73),
    ]
    assert "GPUHUNT_CATALOG_DIR" not in __import__("os").environ


def test_clouds_of_gpuhunt_land_with_types_that_were_not_known(folder: Path) -> None:
    catalog = Catalog(folder / "home")
    market = MarketSpec(sources=("gcp", "lambdalabs"), gpuhunt_folder=str(folder))
    found = {one.feed: one for one in refresh(catalog, market, NOW).landed}
    assert found["gcp"].rejected == {}
    assert found["lambdalabs"].new_types == ["gpu_8x_h100_sxm5"]
    assert found["lambdalabs"].rejected == {"unknown instance type": 1}
    with catalog.read() as connection:
        rows = read_market(connection, ["lambdalabs"])
    assert [(row.domain, row.node_class) for _, _, row in rows] == [("lambda:us-west-3", "H100 x8")]


def test_a_provider_without_a_catalogue_is_named(folder: Path) -> None:
    with pytest.raises(HuntFolderError, match=r"no catalogue oci\.csv in .*gpuhunt_folder"):
        pull_provider("oci", NOW, folder)


def test_without_gpuhunt_it_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gpuhunt", None)
    with pytest.raises(InputError, match=r"pip install 'coral-serving\[clouds\]'"):
        pull_provider("gcp", NOW, folder)


@pytest.mark.parametrize(
    ("gpu", "memory", "instance", "name"),
    [
        ("A100", 40.0, "a2-highgpu-1g", "A100"),
        ("A100", 80.0, "a2-ultragpu-1g", "A100-80GB"),
        ("A100", 80.0, "NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("H100", 80.0, "gpu_1x_h100_sxm5", "H100"),
        ("H100", 80.0, "gpu_1x_h100_pcie", "H100-PCIe"),
        ("H100", 94.0, "Standard_NC40ads_H100_v5", "H100-NVL"),
        ("V100", 32.0, "Standard_ND40rs_v2", "V100-32GB"),
        ("L40S", 48.0, "x", "L40S"),
    ],
)
def test_cards_of_one_name_are_told_apart(
    gpu: str, memory: float, instance: str, name: str
) -> None:
    assert market_name(gpu, memory, instance) == name


def test_sources_on_the_command_line() -> None:
    market = with_sources(MarketSpec(), ["aws", "snapshot"], ["us-east-1"])
    assert market.sources == ("aws", "snapshot")
    assert market.aws_regions == ("us-east-1",)
    with pytest.raises(MarketSpecError, match=r"unknown source 'gcpp'; did you mean 'gcp'\?"):
        with_sources(MarketSpec(), ["gcpp"])


def hang(seconds: float) -> None:
    time.sleep(seconds)


def test_a_source_that_hangs_is_cut_off_and_the_others_land(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write(tmp_path, HEADER + LINES))
    known = sources.caller

    def caller(source, *more):
        return (lambda: hang(30)) if source == "gcp" else known(source, *more)

    monkeypatch.setattr("tasks.market.refresh.caller", caller)
    monkeypatch.setattr("tasks.market.refresh.SLACK_S", 0.5)
    catalog = Catalog(tmp_path)
    market = MarketSpec(sources=("gcp", path), deadline_s=1.5)
    started = time.monotonic()
    found = refresh(catalog, market, NOW)
    assert time.monotonic() - started < 6.0
    assert [one.feed for one in found.landed] == [path]
    assert str(found.failed["gcp"]) == "gcp: no answer within 1.5 s"
    with catalog.read() as connection:
        assert read_feeds(connection, [path])[0].offers == 2
        gaps = connection.execute(
            "SELECT feed, outcome, detail FROM market_watch WHERE outcome = 'failed'"
        ).fetchall()
    assert gaps == [("gcp", "failed", "gcp: no answer within 1.5 s")]


def test_a_failure_that_nobody_thought_of_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write(tmp_path, HEADER + LINES))
    known = sources.caller

    def fails() -> Pull:
        raise RuntimeError("a surprise")

    def caller(source, *more):
        return fails if source == "gcp" else known(source, *more)

    monkeypatch.setattr("tasks.market.refresh.caller", caller)
    found = refresh(Catalog(tmp_path), MarketSpec(sources=("gcp", path)), NOW)
    assert str(found.failed["gcp"]) == "gcp: RuntimeError: a surprise"
    assert len(found.landed) == 1
    with pytest.raises(CoralError, match="a surprise"):
        refresh(Catalog(tmp_path), MarketSpec(sources=("gcp",)), NOW)


def test_a_refresh_of_aws_lands_and_the_next_has_only_news(aws: AwsServer, tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    market = MarketSpec(sources=("aws",), aws_regions=("us-east-1",))
    first = refresh(catalog, market, NOW - timedelta(minutes=30)).landed[0]
    assert first.changed > 50
    assert first.rejected["spot not below on-demand"] > 0
    assert refresh(catalog, market, NOW - timedelta(minutes=20)).landed[0].changed == 0
    aws.move_spot("g6.xlarge", 1.05, NOW - timedelta(minutes=15))
    moved = {(p.zone_id) for p in aws.data.spot if p.instance_type == "g6.xlarge"
             and p.region == "us-east-1"}  # fmt: skip
    third = refresh(catalog, market, NOW - timedelta(minutes=10)).landed[0]
    assert third.changed == len(moved)
    aws.fail("*", "ExpiredToken")
    with pytest.raises(CredentialsError):
        refresh(catalog, market, NOW)
    with catalog.read() as connection:
        state = read_feeds(connection, ["aws"])[0]
        failed = connection.execute(
            "SELECT count(*), any_value(detail) FROM market_watch WHERE outcome = 'failed'"
        ).fetchall()[0]
    assert state.seen_at == NOW - timedelta(minutes=10)
    assert failed[0] == 6  # every part that was seen before
    assert "have expired" in failed[1]
