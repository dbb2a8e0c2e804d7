"""What a user types and reads."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import coral.cli
from coral.cli import main
from coral.render import describe_template
from tests.builders import template

CORAL = str(Path(sys.executable).parent / "coral")


def run(*arguments: str, home: Path | None = None, **options) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    extra = ["--home", str(home)] if home else []
    return subprocess.run(
        [CORAL, *arguments, *extra], capture_output=True, text=True, timeout=240, **options
    )


def run_here(*arguments: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The same in this process, for commands that start no flow."""
    extra = ["--home", str(home)] if home else []
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr("sys.argv", ["coral", *arguments, *extra])
        patch.setattr("coral.interrupt.stop_on_signals", lambda: None)
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def tiny_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which the quickstart ran once, as a user runs it."""
    home = tmp_path_factory.mktemp("tiny-home")
    done = run("quickstart", "--scenario", "tiny", home=home)
    assert done.returncode == 0, done.stderr
    (home / "output.txt").write_text(done.stdout)
    return home


def test_quickstart_prints_library_plan_cost_and_database(tiny_home: Path) -> None:
    text = (tiny_home / "output.txt").read_text()
    assert "Template library of scenario tiny" in text
    assert re.search(
        r"aws:us-east-1 +│ on-demand +│ (decode|aggregated) Qwen3-14B: \[.* \| layers 0-", text
    )
    assert re.search(r"Cost: \$[\d.]+/h; Homo-joint on the same input: \$[\d.]+/h", text)
    assert "What binds (stock is assumed, level limited x 0.34)" in text
    assert "130 rejected" in text
    assert str(tiny_home / "coral.duckdb") in text
    assert re.search(r"In simulation \(3 minutes .*within both SLOs Qwen3-14B \d", text)
    assert "`coral calibrate-caps` finds" in text


def test_quickstart_json_has_the_promised_keys_and_reuses_the_library(tiny_home: Path) -> None:
    done = run("quickstart", "--scenario", "tiny", "--json", home=tiny_home)
    assert done.returncode == 0
    assert done.stderr == ""
    found = json.loads(done.stdout.splitlines()[-1])
    assert {
        "templates", "cost_usd_per_hour", "homo_joint_usd_per_hour", "served", "solve_s", "gap",
        "database", "simulated_attainment", "simulated_goodput_tokens_per_s",
    } <= found.keys()  # fmt: skip
    assert found["served"] == 1.0
    assert 0.0 < found["simulated_attainment"] <= 1.0
    assert found["cost_usd_per_hour"] <= found["homo_joint_usd_per_hour"]
    build = run("library", "build", "--scenario", "tiny", "--json", home=tiny_home)
    built = json.loads(build.stdout.splitlines()[-1])
    assert built["solved"] == 0
    assert built["reused"] == built["combinations"]
    assert built["templates"] == found["templates"]


def test_sensitivity_sweeps_nodes_and_memory_and_draws_a_plot(tiny_home: Path) -> None:
    caps = ("--max-nodes", "3", "--memory-ratio", "6")
    done = run("library", "sensitivity", "-s", "tiny", *caps, "--json", home=tiny_home)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {point["max_nodes"] for point in found["by_nodes"]} == {1, 2, 3}
    assert {point["memory_ratio"] for point in found["by_memory"]} == {2, 3, 4, 5, 6}
    assert 1 <= found["plateau_nodes"] <= 3
    assert Path(found["plot"]).exists()


def test_compare_plans_with_every_baseline_and_draws_a_plot(tiny_home: Path) -> None:
    done = run("compare", "-s", "tiny", "--deadline", "2", "--json", home=tiny_home)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {line["engine"] for line in found["lines"]} == {"any", "vllm"}
    any_ = [line for line in found["lines"] if line["engine"] == "any"]
    cost = {line["planner"]: line["usd_per_hour"] for line in any_}
    assert {"coral", "homo-joint", "homo", "cauchy", "single"} <= cost.keys()
    assert cost["coral"] <= cost["homo-joint"] + 1e-6
    assert all(line["goodput_tokens_per_s"] > 0 for line in any_ if line["served_share"] > 0)
    assert Path(found["plot"]).read_bytes().startswith(b"\x89PNG")
    assert Path(found["table"]).read_text().count("\n") == 1 + len(found["lines"])


def test_simulations_of_the_latest_plan(tiny_home: Path) -> None:
    events = tiny_home / "events.parquet"
    arguments = ("--trace", "own", "--minutes", "2", "--events", str(events), "--json")
    done = run("simulate", "-s", "tiny", *arguments, home=tiny_home)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["requests"] > 300 and found["trace"] == "own" and events.exists()
    assert Path(found["report"]).exists()
    capped = run("calibrate-caps", "-s", "tiny", "--rounds", "1", "--minutes", "1", "--json",
                 home=tiny_home)  # fmt: skip
    assert capped.returncode == 0, capped.stderr
    assert json.loads(capped.stdout.splitlines()[-1])["rounds"]
    days = run("evaluate", "-s", "tiny", "--hours", "0.5", "--deadline", "2", home=tiny_home)
    assert days.returncode == 0, days.stderr
    assert "cauchy" in days.stdout
    for arguments, said in (
        (("simulate", "--plan", "best"), "unknown plan 'best'"),
        (("simulate", "--trace", "azure2024"), "unknown trace 'azure2024'"),
        (("calibrate-caps", "--target", "2"), "Invalid value for '--target'"),
    ):
        refused = run_here(*arguments, "-s", "tiny", home=tiny_home)
        assert (refused.returncode, refused.stdout) == (2, ""), arguments
        assert said in refused.stderr and refused.stderr.count("\n") == 1


def test_sql_reads_the_snapshot(tiny_home: Path) -> None:
    done = run_here("sql", "SELECT count(*) AS n FROM template", "--json", home=tiny_home)
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["columns"] == ["n"]
    assert answer["rows"][0][0] > 0
    for query, message in (("", "the query is empty"), ("SELEC", "SQL: "), ("DROP TABLE gpu", "")):
        refused = run_here("sql", query, home=tiny_home)
        assert refused.returncode == 2
        assert message in refused.stderr
    nan = run_here("sql", "SELECT 'nan'::DOUBLE AS x", "--json", home=tiny_home)
    assert json.loads(nan.stdout)["rows"] == [[None]]
    shown = run_here("sql", "FROM best_templates LIMIT 2", home=tiny_home)
    assert "2 rows" in shown.stdout
    assert "tokens_per_usd" in shown.stdout


def test_library_show_filters_and_sorts(tiny_home: Path) -> None:
    done = run_here(
        "library", "show", "--gpu", "L40S", "--sort", "usd_per_hour", "--json", home=tiny_home
    )
    answer = json.loads(done.stdout)
    rows = [dict(zip(answer["columns"], row, strict=True)) for row in answer["rows"]]
    assert rows
    assert all("L40S x1" in row["placement"] for row in rows)
    costs = [row["usd_per_hour"] for row in rows]
    assert costs == sorted(costs)
    assert {row["stock_vllm"] for row in rows} >= {"yes", "prefill or decode in stages"}
    one = run_here(
        "library", "show", "--phase", "decode", "--nodes", "2", "--limit", "1", home=tiny_home
    )
    assert "1 rows" in one.stdout
    for option, value, message in (
        ("--workload", "Qwen3-15B", "unknown workload 'Qwen3-15B'; did you mean 'Qwen3-14B'?"),
        ("--gpu", "L40", "unknown GPU 'L40'; did you mean 'L40S'?"),
        ("--phase", "decod", "unknown phase 'decod'; did you mean 'decode'?"),
        ("--sort", "price", "unknown sort key 'price'"),
    ):
        refused = run_here("library", "show", option, value, home=tiny_home)
        assert refused.returncode == 2
        assert message in refused.stderr


def test_explain_says_what_binds_in_the_latest_plan(tiny_home: Path) -> None:
    done = run_here("explain", "--scenario", "tiny", home=tiny_home)
    assert "What binds:" in done.stdout
    assert "H100 x1 (p5.4xlarge) in aws:us-east-1: all 1 used" in done.stdout
    found = json.loads(run_here("explain", "-s", "tiny", "--json", home=tiny_home).stdout)
    assert found["binding"][0]["kind"] == "stock"
    assert found["services"][0]["workload"] == "Qwen3-14B"
    assert sum(found["cost_by_workload"].values()) == pytest.approx(found["cost_usd_per_hour"])
    assert {row["node_class"] for row in found["class_worth"]} >= {"H100 x1"}
    used = {row["node_class"] for row in found["cost_by_class"]}
    entering = {row["node_class"] for row in found["entry_prices"]}
    assert used.isdisjoint(entering)
    without = json.loads(
        run_here("explain", "-s", "tiny", "--without", "H100", "--json", home=tiny_home).stdout
    )["without"]
    assert without["cost_usd_per_hour"] != found["cost_usd_per_hour"]
    unknown = run_here("explain", "-s", "tiny", "--without", "H1000", home=tiny_home)
    assert unknown.returncode == 2
    assert "unknown GPU 'H1000' in the plan; did you mean 'H100'?" in unknown.stderr
    none = run_here("explain", "--scenario", "core", home=tiny_home)
    assert none.returncode == 2
    assert "nothing was planned yet for scenario 'core'; run `coral allocate`" in none.stderr


def test_simulate_serves_the_latest_plan(tiny_home: Path, tmp_path: Path) -> None:
    done = run("simulate", "-s", "tiny", "--minutes", "2", "--seed", "3", "--json", home=tiny_home)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    (both,) = found["workloads"].values()
    assert both["simulated"]["done"] == both["simulated"]["requests"] > 100
    assert both["simulated"]["attainment"] > 0.9
    trace = tmp_path / "trace.csv"
    trace.write_text("timestamp_s,model,input_tokens,output_tokens\n0,nobody,1,1\n")
    wrong = run("simulate", "-s", "tiny", "--trace", str(trace), home=tiny_home)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("coral: unknown model 'nobody' in the trace")
    other = run_here("simulate", "--plan", "first", home=tiny_home)
    assert other.returncode == 2


def test_what_if_shows_another_plan_and_records_nothing(tiny_home: Path, tmp_path: Path) -> None:
    prices, demand = tmp_path / "prices.csv", tmp_path / "demand.csv"
    prices.write_text("node_class,price_factor\n*,2\n")
    demand.write_text("demand_factor\n0\n")
    count = ("sql", "SELECT count(*) FROM allocation", "--json")
    before = run_here(*count, home=tiny_home).stdout
    done = run_here("allocate", "-s", "tiny", "--what-if", str(prices), "--json", home=tiny_home)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    now, then = found["now"]["cost_usd_per_hour"], found["what_if"]["cost_usd_per_hour"]
    assert then == pytest.approx(2.0 * now, rel=0.02)
    nothing = run_here("allocate", "-s", "tiny", "--what-if", str(demand), home=tiny_home)
    assert re.search(r"USD/hour +│ [\d.]+ +│ 0\.00", nothing.stdout)
    assert (
        run_here("sql", "SELECT count(*) FROM allocation", "--json", home=tiny_home).stdout
        == before
    )
    wrong = run_here("allocate", "-s", "tiny", "--what-if", "none.csv", home=tiny_home)
    assert wrong.returncode == 2
    assert "cannot read what-if file none.csv" in wrong.stderr


def test_operate_moves_a_fleet_that_can_be_listed_and_ended(tiny_home: Path) -> None:
    first = json.loads(run("operate", "-s", "tiny", "--json", home=tiny_home).stdout)
    assert first["launched"] == first["nodes"] > 0
    second = run("operate", "-s", "tiny", home=tiny_home)
    assert second.stdout.startswith("Nothing changed.")
    listed = json.loads(run_here("fleet", "list", "--json", home=tiny_home).stdout)
    assert len(listed["rows"]) == first["nodes"]
    assert {row[1] for row in listed["rows"]} == {"launching"}
    down = run_here("down", "--yes", "--json", home=tiny_home)
    assert json.loads(down.stdout) == {"terminated": first["nodes"]}
    assert json.loads(run_here("fleet", "list", "--json", home=tiny_home).stdout)["rows"] == []
    (tiny_home / "leases.sqlite").write_text("damaged" * 1000)
    broken = run_here("fleet", "list", home=tiny_home)
    assert broken.returncode == 2
    assert "leases.sqlite is damaged or locked" in broken.stderr


def test_down_asks_before_it_ends_anything(tmp_path: Path) -> None:
    assert run_here("down", home=tmp_path).stdout == "0 nodes terminated.\n"


TINY = Path("examples/tiny.yaml").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Qwen/Qwen3-14B", "Qwen/Qwen3-15B", "unknown model 'Qwen/Qwen3-15B'"),
        ("L40S x1", "L40Z x1", "unknown GPU 'L40Z'"),
        ("aws:us-east-1", "aws:us-east-9", "did you mean 'aws:us-east-"),
        ("max_nodes", "max_node", "unknown key 'placement.max_node'; did you mean 'max_nodes'?"),
        ("tpot_ms: 80", "tpot_ms: -80", "workloads.0.slo.tpot_ms"),
        ("slo:", "dtype: fp4\n    slo:", "Qwen/Qwen3-14B is known in bf16, not in 'fp4'"),
        ("scale: 1.2", "scale: .inf", "workloads.0.demand.scale: input should be a finite number"),
        ("[8, 32, 64]", "[]", "placement.decode_batch_sizes"),
        ("max_nodes: 2", "ttft_queue_share: 0.8", "leave no time for prefill"),
        ("markets: [on_demand]", "markets: [on_demand]\nmarkets: [spot]", "is there twice"),
        ("aws:us-east-1", "gcp:us-central1", "rents L40S x1; leave it out"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    tmp_path: Path, tiny_home: Path, old: str, new: str, message: str
) -> None:
    scenario = tmp_path / "s.yaml"
    scenario.write_text(TINY.replace(old, new))
    done = run_here("quickstart", "-s", str(scenario), "--workers", "0", home=tiny_home)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("coral: ")
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_an_impossible_slo_is_named_by_the_command(tmp_path: Path, tiny_home: Path) -> None:
    scenario = tmp_path / "s.yaml"
    scenario.write_text(TINY.replace("tpot_ms: 80", "tpot_ms: 2"))
    done = run("quickstart", "--scenario", str(scenario), "--workers", "0", home=tiny_home)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "no template meets its TPOT of 2 ms; the best achievable" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quickstart", "--scenario", "nowhere.yaml"], "no scenario file 'nowhere.yaml'"),
        (["sql", "SELEC"], "no database in"),
        (["quickstart", "-s", "tiny", "--workers", "-1"], "Invalid value for '--workers'"),
        (["quickstart", "--nonsense"], "No such option: --nonsense"),
        (["nonsense"], "No such command 'nonsense'"),
        (["quickstart", "--dask", "tcp://127.0.0.1:1", "-s", "tiny"], "no Dask scheduler answers"),
        (["compare", "--suite", "--sweep", "stock"], "--suite and --sweep are two things"),
        (["compare", "--sweep", "prices"], "unknown sweep 'prices': demand, stock or domains"),
        (["compare", "--engine", "sglang"], "unknown engine 'sglang': any, vllm or both"),
        (["library", "build", "-s", "extended"], "workers; pass --yes to start"),
    ],
)
def test_wrong_calls_say_what_is_wrong(tmp_path: Path, arguments: list[str], message: str) -> None:
    known = arguments[0] in {"quickstart", "sql", "library"}
    done = run_here(*arguments, home=tmp_path if known else None)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_database_is_named_and_kept(tmp_path: Path) -> None:
    (tmp_path / "coral.duckdb").write_text("not a database" * 1000)
    done = run("library", "build", "-s", "tiny", "--workers", "0", home=tmp_path)
    assert done.returncode == 2
    assert "move it away to start anew" in done.stderr
    assert (tmp_path / "coral.duckdb").read_text().startswith("not a database")


def test_help_explains_every_command() -> None:
    commands = (
        "quickstart,library,library build,library show,allocate,compare,explain,operate,fleet list,"
        "fleet show,fleet drain,fleet terminate,fleet sweep,fleet startups,fleet policy,"
        "serve-local,agent,controller,gateway,simulate,calibrate-caps,evaluate"
    )
    for name in ["", *commands.split(","), "down", "sql"]:
        arguments = name.split()
        done = run_here(*arguments, "--help")
        assert done.returncode == 0
        assert len(done.stdout) > 200
    assert run_here("--version").stdout.strip() == f"coral {coral.__version__}"


def test_every_command_is_documented(repository: Path) -> None:
    readme = (repository / "README.md").read_text() + (
        repository / "docs" / "operations.md"
    ).read_text()
    commands = (
        "quickstart,library build,library show,allocate,compare,explain,operate,fleet list,down,"
        "sql,serve-local,controller,gateway,agent,simulate,calibrate-caps,evaluate,profile run,"
        "profile import,profile show,profile calibrate,fleet startups,fleet policy"
    )
    for command in commands.split(","):
        assert f"coral {command}" in readme, command


def test_docs_are_finished(repository: Path) -> None:
    pages = [
        repository / "README.md",
        repository / "CHANGELOG.md",
        *repository.glob("docs/**/*.md"),
    ]
    for page in pages:
        assert not re.search(r"@[A-Z_]+@|TODO|FIXME", page.read_text()), page


def test_a_template_reads_as_one_line() -> None:
    from planner.types import Phase

    line = describe_template(template("x", Phase.DECODE, {"L40S x1": 1, "L4 x1": 2}, 1.0))
    assert line == "decode chat: [2x L4 x1 + L40S x1 | layers 0-3]"


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "num_attention_heads": 4,
    "intermediate_size": 1024, "vocab_size": 512, "num_hidden_layers": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "arguments", "said"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            (),
            "GPT2LMHeadModel are unknown; supported: Llama",
        ),
        ({}, ("--device", "tpu"), "unknown device 'tpu': auto, cuda, cpu"),
        ({}, ("--python", "nowhere"), "no interpreter at nowhere"),
        ({}, ("--minutes", "0"), "--minutes"),
        ({}, ("--device", "cpu", "--tp", "2"), "needs 2 core groups"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(
    tmp_path: Path, change: dict, arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **change}))
    done = run_here("profile", "run", str(tmp_path), *arguments, home=tmp_path / "home")
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "home").exists()


def test_profiles_are_listed_shown_and_calibrated_on(tmp_path: Path) -> None:
    home = tmp_path / "home"
    done = run_here("profile", "show", "--json", home=home)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["columns"][:4] == ["model", "dtype", "gpu", "tp"] and len(found["rows"]) > 100
    plot = tmp_path / "a.svg"
    table = ("--model", "Qwen/Qwen3-32B", "--gpu", "H100", "--tp", "2")
    done = run_here("profile", "show", *table, "--plot", str(plot), "--json", home=home)
    shown = json.loads(done.stdout.splitlines()[-1])
    assert shown["rows"] and shown["engine_overhead_ms"] > 0 and plot.exists()
    assert "within" not in run_here("profile", "show", *table, home=home).stderr
    done = run_here("profile", "calibrate", "A100-80GB", "--scope", "moe", "--json", home=home)
    fitted = json.loads(done.stdout.splitlines()[-1])
    assert 0 < fitted["leave_one_model_out_error_pct"] < 60
    for arguments, said in (
        (("show", "--model", "Qwen/Qwen3-32B"), "give both"),
        (("show", "--model", "Qwen/Qwen3-33B", "--gpu", "H100"), "did you mean"),
        (("import", str(tmp_path / "no.csv")), "no file"),
        (("calibrate", "H100", "--scope", "all"), "dense or moe"),
        (("calibrate", "H1000"), "unknown GPU 'H1000'"),
    ):
        done = run_here("profile", *arguments, home=home)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert said in done.stderr and done.stderr.count("\n") == 1
