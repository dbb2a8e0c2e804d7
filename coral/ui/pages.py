"""The dashboard's pages, each from tables of the snapshot."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import polars as pl
from dash import dcc, html

from coral.ui.figures import COLOURS, bars, over_time, points, stacked_steps
from coral.ui.queries import ROWS_SHOWN, SORTS, Queries

OVERVIEW, FLEET, COST, TEMPLATES, PLANS, MARKET, SERVICE = (
    "overview", "fleet", "cost", "templates", "plans", "market", "service",
)  # fmt: skip
NAMES = {
    OVERVIEW: "Overview", FLEET: "Fleet", COST: "Cost", TEMPLATES: "Templates",
    PLANS: "Plans", MARKET: "Market", SERVICE: "Service levels",
}  # fmt: skip
MARKETS = ("on_demand", "spot")
PHASES = ("prefill", "decode", "aggregated")
Children = list[Any]


def overview(queries: Queries, scenario: str) -> Children:
    """Where things stand."""
    plans, fleet = queries.plans(scenario), queries.fleet(scenario)
    latest = plans.filter(pl.col("planner") == "coral").row(-1, named=True)
    services, gaps = queries.services(scenario), queries.gaps()
    nodes = fleet["nodes"].sum() if fleet.height else 0
    spent = fleet["usd_per_hour"].sum() if fleet.height else 0.0
    short = services.filter(pl.col("served_rps") < 0.9999 * pl.col("demand_rps"))
    notes = [
        f"{row['workload']}: {row['served_rps']:.3g} of {row['demand_rps']:.3g} requests/s are "
        "served."
        for row in short.iter_rows(named=True)
    ]
    notes += [
        f"Nothing seen of {row['part'].replace('_', ' ')} prices in {row['domain']} "
        f"({row['feed']}) for {span_text(60.0 * row['minutes'])}: {row['why']}."
        for row in gaps.head(5).iter_rows(named=True)
    ]
    return [
        cards(
            {
                "planned, per hour": f"${latest['cost_usd_per_hour']:.2f}",
                "of the demand served": f"{latest['served_share']:.1%}",
                "proven gap": f"{latest['gap']:.2%}",
                "nodes held": f"{nodes}, ${spent:.2f}/h",
                "planned at (UTC)": f"{latest['created_at']:%d %b %H:%M}",
            }
        ),
        *(html.P(note, className="bad") for note in notes),
        section(
            "Cost of plans",
            graph(over_time(plans, "created_at", "cost_usd_per_hour", "planner", "USD per hour")),
        ),
        section(
            "Models",
            table(
                services,
                {
                    "workload": "workload", "demand_rps": "demand, requests/s",
                    "served_rps": "served, requests/s", "cost_usd_per_hour": "USD per hour",
                },
            ),
        ),
    ]  # fmt: skip


def fleet(queries: Queries, scenario: str) -> Children:
    """Nodes by domain, what runs there, and what happened."""
    held, events = queries.fleet(scenario), queries.events(scenario)
    found: Children = []
    if held.height:
        found.append(
            section(
                "Nodes by domain",
                graph(bars(held, "domain", "nodes", "node_class", "nodes")),
                table(
                    held,
                    {
                        "domain": "domain", "node_class": "class", "market": "market",
                        "state": "state", "nodes": "nodes", "usd_per_hour": "USD per hour",
                    },
                ),
            )
        )  # fmt: skip
    else:
        found.append(html.P("No nodes are held. `coral operate` launches what is planned."))
    found.append(
        section(
            "The latest plan's replicas",
            table(
                queries.replicas(scenario),
                {
                    "domain": "domain", "phase": "phase", "workload": "workload",
                    "placement": "placement", "replicas": "replicas", "load_rps": "requests/s",
                },
            ),
        )
    )  # fmt: skip
    if events.height:
        names = {
            "happened_at": "at (UTC)", "node_class": "class", "domain": "domain",
            "state": "state", "reason": "why",
        }  # fmt: skip
        found.append(section("What happened", table(events, names)))
    return found


def cost(queries: Queries, scenario: str) -> Children:
    """By model over time, and what instances cost."""
    models, spend = queries.model_cost(scenario), queries.spend(scenario)
    found: Children = []
    if models.height:
        plot = stacked_steps(models, "created_at", "usd_per_hour", "model", "USD per hour")
        served = over_time(models, "created_at", "served_rps", "model", "requests/s")
        found += [section("By model", graph(plot)), section("Planned to be served", graph(served))]
    if spend.height:
        found.append(
            section("What instances cost", graph(bars(spend, "day", "usd", "market", "USD")))
        )
    return found or [html.P("No plan with costs by model yet. `coral operate` makes one.")]


def templates(
    queries: Queries,
    model: str | None,
    gpu: str | None,
    phase: str | None,
    nodes: int | None,
    sort: str,
) -> Children:
    """The template explorer, below its filters."""
    found = queries.templates(model, gpu, phase, nodes, sort)
    if not found.height:
        return [html.P("No template is like that.")]
    units = ("requests/s", "tokens per dollar")
    names = {
        "model": "model", "workload": "workload", "phase": "phase", "nodes": "nodes",
        "placement": "placement", "throughput_rps": "requests/s", "usd_per_hour": "USD per hour",
        "tokens_per_usd": "tokens per dollar", "provenance": "numbers",
    }  # fmt: skip
    return [
        graph(points(found, "throughput_rps", "tokens_per_usd", "placement", "phase", units)),
        html.P(f"{found.height} templates, the first {min(ROWS_SHOWN, found.height)} below."),
        table(found.head(ROWS_SHOWN), names),
    ]


def plans(queries: Queries, scenario: str) -> Children:
    """Allocation history: gap and solve time, and what binds."""
    history, limits = queries.plans(scenario), queries.limits(scenario)
    mine = history.filter(pl.col("planner") == "coral").with_columns(
        gap_percent=100.0 * pl.col("gap"), name=pl.lit("gap"), solve=pl.lit("solve")
    )
    names = {
        "created_at": "at (UTC)", "planner": "planner", "cost_usd_per_hour": "USD per hour",
        "served_share": "served", "gap": "gap", "solve_s": "solve s", "applied": "applied",
    }  # fmt: skip
    found: Children = [
        section("Proven gap", graph(over_time(mine, "created_at", "gap_percent", "name", "%"))),
        section("Solve time", graph(over_time(mine, "created_at", "solve_s", "solve", "s"))),
    ]
    if limits.height:
        bound = {
            "text": "limit", "used": "used", "amount": "of", "unit": "unit",
            "worth": "one more is worth", "worth_unit": "",
        }  # fmt: skip
        found.append(section("What binds the latest plan", table(limits, bound)))
    newest = history.reverse().head(ROWS_SHOWN)
    found.append(section("History", table(newest, names, shares={"served_share", "gap"})))
    return found


def market(queries: Queries, gpu: str, kind: str) -> Children:
    """Prices of a GPU over time, and the least of every GPU now."""
    few, now = queries.prices(gpu, kind, len(COLOURS)), queries.cheapest()
    names = {
        "gpu": "GPU", "market": "market", "usd_per_gpu_hour": "USD per GPU hour",
        "domain": "domain", "instance_type": "instance type",
    }  # fmt: skip
    found: Children = []
    if few.height:
        unit = "USD per GPU hour"
        found.append(
            section(
                f"{gpu}, {kind.replace('_', ' ')}, in the domains that are cheapest now",
                graph(over_time(few, "observed_at", "usd_per_gpu_hour", "domain", unit)),
            )
        )
    else:
        found.append(html.P(f"No {kind.replace('_', ' ')} price of {gpu} is known."))
    found.append(section("The least price of every GPU now", table(now, names)))
    return found


def service(queries: Queries, scenario: str) -> Children:
    """How many requests were in time, what replicas did and what that corrects; simulations."""
    met = queries.met(scenario)
    served, corrected = queries.served(scenario), queries.corrections(scenario)
    found = queries.attainment(scenario)
    shown: Children = []
    if met.height:
        title = "Streams that met both objectives"
        shown.append(section(title, graph(over_time(met, "at", "percent", "model", "%"))))
    if served.height:
        timed = served.drop_nulls("tpot_ms")
        shown += [
            section(
                "Time per output token", graph(over_time(timed, "at", "tpot_ms", "model", "ms"))
            ),
            section(
                "Requests answered",
                graph(over_time(served, "at", "requests_per_s", "model", "requests/s")),
            ),
        ]
    else:
        shown.append(html.P("No gateway has written what replicas do; a simulated fleet has none."))
    if corrected.height:
        names = {
            "workload": "workload", "phase": "phase", "placement": "placement", "factor": "factor",
            "observed": "observed", "predicted": "predicted", "kind": "of", "profile_row": "row",
        }  # fmt: skip
        shown.append(section("Throughput corrected by serving", table(corrected, names)))
    if found.height:
        percent = found.with_columns(percent=100.0 * pl.col("attainment")).reverse()
        names = {
            "simulated_at": "at (UTC)", "workload": "workload", "trace": "requests",
            "load": "load", "attainment": "in time", "ttft_p95_ms": "TTFT p95 ms",
            "tpot_p95_ms": "TPOT p95 ms", "goodput_tokens_per_s": "goodput, tokens/s",
        }  # fmt: skip
        shown.append(
            section(
                "Requests that met both objectives, in simulation",
                graph(over_time(percent, "simulated_at", "percent", "workload", "%")),
                table(found, names, shares={"attainment"}),
            )
        )
    else:
        shown.append(html.P("No plan was simulated yet. `coral simulate` does."))
    return shown


def choice(name: str, label: str, values: Sequence[Any], value: Any, **more: Any) -> html.Label:
    """A labelled list to choose from."""
    options = values if isinstance(values, list) else list(values)
    return html.Label(
        [label, dcc.Dropdown(options, value, id=name, searchable=False, **more)], className="choice"
    )


def sort_choice() -> html.Label:
    """What templates are sorted by."""
    options = [{"label": label, "value": name} for name, label in SORTS.items()]
    return choice("template-sort", "Best by", options, "tokens_per_usd", clearable=False)


def cards(values: Mapping[str, str]) -> html.Div:
    """A few numbers in front."""
    return html.Div(
        [html.Div([html.B(value), name], className="card") for name, value in values.items()],
        className="cards",
    )


def section(title: str, *children: Any) -> html.Section:
    return html.Section([html.H2(title), *children])


def graph(figure: Any) -> dcc.Graph:
    return dcc.Graph(figure=figure, config={"displayModeBar": False, "responsive": True})


def table(
    frame: pl.DataFrame, names: Mapping[str, str], shares: frozenset[str] | set[str] = frozenset()
) -> html.Div:
    """Rows as they are; numbers to the right, on a phone a block for each row."""
    numeric = {name for name in names if frame.schema[name].is_numeric()}

    def cell(name: str, value: object) -> html.Td:
        text = _text(value, share=name in shares)
        of_phone: dict[str, Any] = {"data-name": names[name]}
        return html.Td(text, className="n" if name in numeric else "", **of_phone)

    head = [html.Th(label, className="n" if n in numeric else "") for n, label in names.items()]
    rows = [
        html.Tr([cell(name, row[name]) for name in names]) for row in frame.iter_rows(named=True)
    ]
    return html.Div(
        html.Table([html.Thead(html.Tr(head)), html.Tbody(rows)], className="stack"),
        className="wide",
    )


def age_text(published_at: float) -> str:
    """How old the snapshot is."""
    return f"{span_text(max(0.0, time.time() - published_at))} old"


def span_text(seconds: float) -> str:
    """In the unit that people would use."""
    for limit, unit_s, name in ((90, 1, "s"), (5400, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit_s:.0f} {name}"
    return f"{seconds / 86400:.0f} days"


def _text(value: object, *, share: bool) -> str:
    if value is None:
        return ""
    if share and isinstance(value, float):
        return f"{value:.2%}"
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    return "on demand" if value == "on_demand" else str(value)
