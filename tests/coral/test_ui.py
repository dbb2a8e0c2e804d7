"""The dashboard: who gets in, what its pages say, and that a browser draws them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
from werkzeug.serving import make_server

from catalog.store import Catalog
from coral.ui import pages
from coral.ui.app import OF_SCENARIO, make_app
from coral.ui.queries import Queries

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SAID = {
    "": ("planned, per hour", "Qwen3-14B", "main-svg"),
    "fleet": ("No nodes are held", "terminated", "layers 0-39"),
    "cost": ("USD per hour", "What instances cost", "main-svg"),
    "templates": ("tokens per dollar", "[H100 x1 | layers 0-39]", "main-svg"),
    "plans": ("Proven gap", "homo-joint"),
    "market": ("USD per GPU hour", "L40S", "main-svg"),
    "service": ("coral simulate",),
}


@pytest.fixture(scope="module")
def address(planned: Catalog) -> Iterator[str]:
    server = make_server("127.0.0.1", 0, make_app(planned).server, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def browse(address: str, folder: Path, *more: str) -> str:
    """The page as a browser has it once its scripts ran."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
            "--no-first-run", "--disable-background-networking", "--disable-component-update",
            "--disable-sync", f"--user-data-dir={folder}", "--virtual-time-budget=20000", *more,
            "--dump-dom", address,
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium (.ci/run installs it)")
@pytest.mark.parametrize("page", SAID)
def test_a_browser_draws_every_page(address: str, page: str, tmp_path: Path) -> None:
    found = browse(f"{address}/{page}", tmp_path)
    assert [said for said in SAID[page] if said not in found] == []
    assert 'class="bad"' not in found.replace("Nothing seen of", "") or page == ""


def test_pages_without_rows_say_how_to_get_some(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    app = make_app(catalog)
    assert "run `coral quickstart` first" in str(app.layout())
    with catalog.write():
        pass
    catalog.publish(force=True)
    assert "Scenario" in str(app.layout())
    assert Queries(catalog).scenarios() == []


def test_every_page_is_reached_after_the_clock_has_ticked(planned: Catalog) -> None:
    client = make_app(planned).server.test_client()
    asked = client.get("/_dash-dependencies").get_json()
    (shows,) = [one for one in asked if "page.children" in one["output"]]
    names = [(one["id"], one["property"]) for one in shows["inputs"]]
    outputs = [
        dict(zip(("id", "property"), part.rsplit(".", 1), strict=True))
        for part in shows["output"].strip(".").split("...")
    ]

    def ask(path: str, changed: str) -> str:
        values = {"where": path, "scenario": "tiny", "clock": 3}
        answer = client.post(
            "/_dash-update-component",
            json={
                "output": shows["output"], "outputs": outputs, "changedPropIds": [changed],
                "inputs": [{"id": i, "property": p, "value": values[i]} for i, p in names],
            },
        )  # fmt: skip
        assert answer.status_code == 200, answer.get_data(as_text=True)
        return str(answer.get_json()["response"].get("page", ""))

    for name in pages.NAMES:
        assert ask(f"/{name}", "where.pathname"), name
    assert ask("/templates", "clock.n_intervals") == ""  # its filters stay as they are
    assert "planned, per hour" in ask("/", "clock.n_intervals")


def test_prices_stay_until_they_change_or_are_withdrawn(tmp_path: Path, planned: Catalog) -> None:
    catalog = Catalog(tmp_path)
    shutil.copy(planned.database, catalog.database)
    with catalog.write() as connection:
        connection.execute(
            "INSERT INTO offer BY NAME SELECT * REPLACE (TIMESTAMPTZ '2026-12-01 00:00:00Z' AS "
            "observed_at, price_usd_per_hour * 3 AS price_usd_per_hour) FROM offer "
            "WHERE domain = 'aws:us-east-1' AND instance_type = 'p5.48xlarge' LIMIT 1"
        )
    catalog.publish(force=True)
    before, after = (
        Queries(one).prices("H100", "on_demand", 50).filter(pl.col("domain") == "aws:us-east-1")
        for one in (planned, catalog)
    )
    # Another type of the domain is still as cheap as before: the dearer one is not the least.
    assert after["usd_per_gpu_hour"].max() == before["usd_per_gpu_hour"].max()
    assert Queries(planned).prices("H100", "on_demand", 3)["domain"].n_unique() == 3
    assert Queries(planned).prices("none", "spot", 3).height == 0


def test_filters(planned: Catalog) -> None:
    queries = Queries(planned)
    models, gpus, nodes = queries.template_choices()
    assert (models, nodes) == (["Qwen/Qwen3-14B"], [1, 2])
    assert {"H100", "L40S"} <= set(gpus)
    every = queries.templates(None, None, None, None, "tokens_per_usd")
    assert every["tokens_per_usd"].is_sorted(descending=True)
    few = queries.templates(models[0], "L40S", "decode", 2, "usd_per_hour")
    assert 0 < few.height < every.height
    assert few["placement"].str.contains("L40S").all()
    assert few["usd_per_hour"].is_sorted()
    assert "No template is like that" in str(
        pages.templates(queries, "other", None, None, None, "")
    )


def test_what_replicas_did_is_shown(planned: Catalog, tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    shutil.copy(planned.database, catalog.database)
    with catalog.write() as connection:
        (template, model) = connection.execute(
            "SELECT template_id, model FROM template LIMIT 1"
        ).fetchall()[0]
        columns = [row[0] for row in connection.execute("DESCRIBE observed_replica").fetchall()]
        values = {
            "minute": "TIMESTAMPTZ '2026-03-01 12:00:00Z'", "replica": "'r'",
            "template": f"'{template}'", "model": f"'{model}'", "phase": "'decode'",
            "gateway": "'g'", "source": "'test'", "decode_s": "30", "decode_tokens": "1000",
            "measured": "60",
        }  # fmt: skip
        connection.execute(
            f"INSERT INTO observed_replica ({', '.join(columns)}) "
            f"SELECT {', '.join(values.get(name, '0') for name in columns)}"
        )
        connection.execute(
            "INSERT INTO observed_demand SELECT TIMESTAMPTZ '2026-03-01 12:00:00Z', ?, 'g', "
            "90, 0, 60, 0, 0, NULL, NULL, 'test', judged, met, met, met "
            "FROM (VALUES (60, 60), (20, 12)) AS gateways(judged, met)",
            [model],
        )
    catalog.publish(force=True)
    (seen,) = Queries(catalog).met("tiny").iter_rows(named=True)
    assert (seen["model"], seen["percent"], seen["judged"]) == (model, 90.0, 80)
    assert "Streams that met both" in str(pages.service(Queries(catalog), "tiny"))
    (row,) = Queries(catalog).served("tiny").iter_rows(named=True)
    assert (row["model"], row["tpot_ms"], row["requests_per_s"]) == (model, 30.0, 0.1)
    assert "Time per output token" in str(pages.service(Queries(catalog), "tiny"))


def test_every_page_of_a_scenario(planned: Catalog) -> None:
    for show in OF_SCENARIO.values():
        assert show(Queries(planned), "tiny")


def test_a_token_opens_the_page_once_and_a_cookie_after_that(planned: Catalog) -> None:
    client = make_app(planned, "let me in").server.test_client()
    for address in ("/", "/_dash-layout", "/?token=wrong", "/?token="):
        assert client.get(address).status_code == 401
    assert client.post("/_dash-update-component", json={}).status_code == 401
    opened = client.get("/?token=let%20me%20in")
    assert opened.status_code == 302
    assert "HttpOnly" in opened.headers["Set-Cookie"]
    assert client.get("/").status_code == 200
    fresh = make_app(planned, "let me in").server.test_client()
    assert fresh.get("/", headers={"Authorization": "Bearer let me in"}).status_code == 200


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "0.0.0.0"], "give it a --token"),
        (["--host", "no.such.host.invalid"], "unknown --host"),
    ],
)
def test_refused(options: list[str], said: str) -> None:
    coral = Path(sys.executable).with_name("coral")
    done = subprocess.run([coral, "ui", *options], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
