"""What a user types and reads of the market."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from catalog.store import Catalog
from planner.market import MarketSpec
from tasks.market.refresh import refresh
from tests.coral.test_cli import run_here
from tests.support.aws_server import AwsServer

CORAL = str(Path(sys.executable).parent / "coral")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with an hour of AWS prices."""
    catalog = Catalog(tmp_path_factory.mktemp("home"))
    now = datetime.now(UTC)
    with AwsServer(enabled={"us-east-1"}) as server, server.environment():
        for minutes, factor in ((60, 1.0), (40, 1.1), (20, 1.25), (0, 0.9)):
            at = now - timedelta(minutes=minutes)
            server.move_spot("g6.xlarge", factor, at - timedelta(minutes=5))
            refresh(catalog, MarketSpec(sources=("aws",)), at)
    catalog.publish(force=True)
    return catalog.home


def answer(*arguments: str, home: Path) -> dict:
    done = run_here(*arguments, "--json", home=home)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_refresh_as_a_user_runs_it(aws: AwsServer, tmp_path: Path) -> None:
    file = tmp_path / "offers.csv"
    file.write_text(
        "domain,instance_type,market,price_usd_per_hour\naws:us-east-1,g6.xlarge,spot,0.2\n"
    )
    aws.fail("GetSpotPlacementScores", "UnauthorizedOperation")
    command = [CORAL, "market", "refresh", "--source", "aws", "--source", str(file),
               "--region", "us-east-1", "--home", str(tmp_path / "home")]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **aws.variables()}, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "spot not below on-demand" in done.stdout
    assert "aws: no scores of aws:us-east-1, the last ones stay: AWS denies" in " ".join(
        done.stdout.split()
    )
    assert "new types" in done.stdout
    found = answer("market", "show", "--limit", "1000", home=tmp_path / "home")
    sources = {row[found["columns"].index("source")] for row in found["rows"]}
    assert sources <= {"aws", "snapshot", str(file)}
    assert len(sources & {"aws", str(file)}) >= 1


def test_a_source_that_failed_is_an_exit_code(
    aws: AwsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "offers.csv"
    file.write_text(
        "domain,instance_type,market,price_usd_per_hour\naws:us-east-1,g6.xlarge,spot,0.2\n"
    )
    aws.fail("*", "ExpiredToken")
    monkeypatch.setattr("flows.refresh_market.refresh_market", _without_prefect)
    both = ("market", "refresh", "--source", "aws", "--source", str(file))
    done = run_here(*both, home=tmp_path)
    assert done.returncode == 1
    assert "aws failed, its last prices stay: the AWS credentials have expired" in " ".join(
        done.stdout.split()
    )
    found = json.loads(run_here(*both, "--json", home=tmp_path).stdout.splitlines()[-1])
    assert found["failed"].keys() == {"aws"}
    assert found["sources"][str(file)]["prices"] == 1


def test_a_refresh_without_credentials_is_one_sentence(
    aws: AwsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setattr("flows.refresh_market.refresh_market", _without_prefect)
    done = run_here("market", "refresh", "--source", "aws", home=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("coral: no AWS credentials: run `aws configure`")
    assert done.stdout == ""


def _without_prefect(scenario, home, sources, regions):
    from tasks.market.sources import with_sources

    return refresh(Catalog(Path(home)), with_sources(MarketSpec(), sources, regions), _now())


def _now() -> datetime:
    return datetime.now(UTC)


def test_show_has_price_age_and_what_can_be_had(home: Path) -> None:
    found = answer("market", "show", "--gpu", "L4", "--source", "aws", home=home)
    rows = [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]
    assert rows
    assert all(row["node class"].startswith("L4 ") for row in rows)
    prices = [row["$/GPU/h"] for row in rows]
    assert prices == sorted(prices)
    assert any("placement score 7 of 10" in row["because"] for row in rows)
    assert found["sources"]["aws"]["stale"] is False
    assert found["sources"]["aws"]["rejected"]["spot not below on-demand"] > 0
    few = run_here("market", "show", "--gpu", "L4", "--limit", "2", home=home)
    assert "2 rows" in few.stdout
    assert "match: --limit shows more" in few.stdout
    assert "aws: " in few.stdout


def test_show_filters(home: Path) -> None:
    found = answer(
        "market", "show", "--domain", "aws:us-east-*", "--type", "g6*", "--market", "spot",
        "--source", "aws", home=home,
    )  # fmt: skip
    index = found["columns"].index
    assert {row[index("domain")] for row in found["rows"]} == {"aws:us-east-1"}
    assert {row[index("market")] for row in found["rows"]} == {"spot"}
    assert all(row[index("instance type")].startswith("g6") for row in found["rows"])


def test_show_says_what_was_refused(home: Path) -> None:
    found = answer("market", "show", "--rejected", "--source", "aws", home=home)
    why = {row[found["columns"].index("why")] for row in found["rows"]}
    assert "spot not below on-demand" in why


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "L44"), "unknown GPU 'L44'; did you mean 'L4'?"),
        (("--market", "spots"), "unknown market 'spots'; did you mean 'spot'?"),
        (("--source", "awss"), "unknown source 'awss'; did you mean 'aws'?"),
        (("--scenario", "cor"), "no scenario file 'cor'; did you mean 'core'?"),
    ],
)
def test_show_names_what_it_does_not_know(home: Path, arguments: tuple, message: str) -> None:
    done = run_here("market", "show", *arguments, home=home)
    assert done.returncode == 2
    assert message in done.stderr


def test_show_of_a_fresh_home_has_the_shipped_prices(tmp_path: Path) -> None:
    found = answer("market", "show", "--gpu", "H100", home=tmp_path)
    assert found["found"] > 20
    assert {row[found["columns"].index("source")] for row in found["rows"]} == {"snapshot"}


def test_history_has_changes_gaps_and_a_plot(home: Path, tmp_path: Path) -> None:
    plot = tmp_path / "history.svg"
    found = answer("market", "history", "--gpu", "L4", "--plot", str(plot), home=home)
    index = found["columns"].index
    assert {row[index("instance type")] for row in found["rows"]} == {"g6.xlarge"}
    assert {row[index("change")] for row in found["rows"]} == {"+10.0%", "+25.0%", "-10.0%"}
    times = [row[index("at (UTC)")] for row in found["rows"]]
    assert times == sorted(times, reverse=True)
    assert plot.read_text().startswith("<?xml")
    few = run_here("market", "history", "--gpu", "L4", "--limit", "1", home=home)
    assert "changes: --limit shows more" in few.stdout


def test_history_says_what_cannot_be_drawn(home: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (("--gpu", "B200", "--domain", "x:y"), "no price of such offers"),
        (
            (
                "--gpu",
                "L4",
            ),
            "cannot draw into",
        ),
    ):
        target = tmp_path / ("no.svg" if "x:y" in arguments else "no.xyz")
        done = run_here("market", "history", *arguments, "--plot", str(target), home=home)
        assert done.returncode == 2
        assert message in done.stderr
        assert not target.exists()
