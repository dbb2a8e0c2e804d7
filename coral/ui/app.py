"""The dashboard's server: pages of the snapshot, read-only, behind a token where others see it."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from dash import Dash, Input, Output, ctx, dcc, html, no_update
from flask import Response, redirect, request

from catalog.errors import QueryError
from catalog.store import Catalog
from coral.ui import pages
from coral.ui.queries import Queries
from planner.errors import CoralError

REFRESH_MS = 30_000
COOKIE = "coral_ui_token"
Pages = dict[str, Callable[[Queries, str], list[Any]]]
OF_SCENARIO: Pages = {
    pages.OVERVIEW: pages.overview,
    pages.FLEET: pages.fleet,
    pages.COST: pages.cost,
    pages.PLANS: pages.plans,
    pages.SERVICE: pages.service,
}


def make_app(catalog: Catalog, token: str | None = None) -> Dash:
    """The dashboard of one home; with a token, only for those who bring it."""
    assets = Path(str(resources.files("coral.ui") / "assets"))
    app = Dash(
        "coral", title="Coral", update_title="", assets_folder=str(assets),
        suppress_callback_exceptions=True,
        meta_tags=[{"name": "viewport", "content": "width=device-width, initial-scale=1"}],
    )  # fmt: skip
    if token:
        _ask_for(token, app)
    queries = Queries(catalog)
    app.layout = lambda: _layout(queries)
    _answer(app, queries)
    return app


def serve(app: Dash, host: str, port: int) -> None:
    """Until interrupted."""
    from waitress import serve as serve_wsgi

    serve_wsgi(app.server, host=host, port=port, threads=4, ident="coral")


def _layout(queries: Queries) -> html.Div:
    try:
        scenarios, said = queries.scenarios(), ""
    except CoralError as error:
        scenarios, said = [], str(error)
    links = [
        dcc.Link(label, href=f"/{name}" if name != pages.OVERVIEW else "/", id=f"to-{name}")
        for name, label in pages.NAMES.items()
    ]
    first = scenarios[0] if scenarios else None
    return html.Div(
        [
            dcc.Location(id="where"),
            dcc.Interval(id="clock", interval=REFRESH_MS),
            html.Header(
                [
                    html.H1("Coral"),
                    pages.choice("scenario", "Scenario", scenarios, first, clearable=False),
                    html.Span(id="age", className="soft"),
                ]
            ),
            html.Nav(links),
            html.Main([html.P(said, className="bad")] if said else [], id="page"),
        ]
    )


def _answer(app: Dash, queries: Queries) -> None:
    """Register what changes when."""

    @app.callback(
        Output("page", "children"),
        Output("age", "children"),
        *(Output(f"to-{name}", "className") for name in pages.NAMES),
        Input("where", "pathname"),
        Input("scenario", "value"),
        Input("clock", "n_intervals"),
    )
    def show(path: str | None, scenario: str | None, _: int | None) -> tuple[Any, ...]:
        name = (path or "/").strip("/") or pages.OVERVIEW
        marks = ["here" if one == name else "" for one in pages.NAMES]
        ticked = ctx.triggered_id == "clock"
        return (*_page(queries, name, scenario, ticked=ticked), *marks)

    @app.callback(
        Output("templates-found", "children"),
        Input("template-model", "value"),
        Input("template-gpu", "value"),
        Input("template-phase", "value"),
        Input("template-nodes", "value"),
        Input("template-sort", "value"),
    )
    def explore(
        model: str | None, gpu: str | None, phase: str | None, nodes: int | None, sort: str
    ) -> Any:
        return _said(lambda: pages.templates(queries, model, gpu, phase, nodes, sort))

    @app.callback(
        Output("market-found", "children"),
        Input("market-gpu", "value"),
        Input("market-kind", "value"),
    )
    def priced(gpu: str, kind: str) -> Any:
        return _said(lambda: pages.market(queries, gpu, kind))


def _page(queries: Queries, name: str, scenario: str | None, *, ticked: bool) -> tuple[Any, Any]:
    """A page's children and the age of what it shows; pages with filters keep them on a tick."""
    try:
        age = f"snapshot {pages.age_text(queries.snapshot_at)}"
    except OSError:
        age = ""
    if name in {pages.TEMPLATES, pages.MARKET}:
        if ticked:
            return no_update, age
        return _said(lambda: _filters(queries, name)), age
    if name not in OF_SCENARIO:
        return [html.P("There is no such page.")], age
    if scenario is None:
        return _said(lambda: _nothing(queries)), age
    return _said(lambda: OF_SCENARIO[name](queries, scenario)), age


def _nothing(queries: Queries) -> list[Any]:
    queries.scenarios()  # says why, where there is no snapshot
    return [html.P("Nothing was planned yet. `coral quickstart` does.")]


def _filters(queries: Queries, name: str) -> list[Any]:
    models, gpus, nodes = queries.template_choices()
    if name == pages.TEMPLATES:
        row = [
            pages.choice("template-model", "Model", models, None, placeholder="all"),
            pages.choice("template-gpu", "GPU", gpus, None, placeholder="all"),
            pages.choice("template-phase", "Phase", pages.PHASES, None, placeholder="all"),
            pages.choice("template-nodes", "Nodes", nodes, None, placeholder="any"),
            pages.sort_choice(),
        ]
        return [html.Div(row, className="choices"), html.Div(id="templates-found")]
    priced = queries.cheapest()["gpu"].unique().sort().to_list()
    first = "H100" if "H100" in priced else next(iter(priced), None)
    kinds = [{"label": kind.replace("_", " "), "value": kind} for kind in pages.MARKETS]
    row = [
        pages.choice("market-gpu", "GPU", priced, first, clearable=False),
        pages.choice("market-kind", "Market", kinds, "on_demand", clearable=False),
    ]
    return [html.Div(row, className="choices"), html.Div(id="market-found")]


def _said(show: Callable[[], list[Any]]) -> list[Any]:
    """The page, or in words why there is none."""
    try:
        return show()
    except CoralError as error:
        return [html.P(f"{error}{_older(error)}", className="bad")]


def _older(error: CoralError) -> str:
    """A snapshot of before an upgrade lacks views: the next command that writes makes it anew."""
    return (
        " (after an upgrade: `coral operate` or any plan renews it)"
        if isinstance(error, QueryError)
        else ""
    )


def _ask_for(token: str, app: Dash) -> None:
    """Let in who has the token: once in the address, then in a cookie, or as a bearer."""

    def is_right(given: str | None) -> bool:
        return given is not None and hmac.compare_digest(given.encode(), token.encode())

    @app.server.before_request
    def check() -> Any:
        given = request.args.get("token")
        if is_right(given):
            response = redirect(request.path)
            secure = request.is_secure
            response.set_cookie(COOKIE, token, httponly=True, samesite="Lax", secure=secure)
            return response
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if is_right(request.cookies.get(COOKIE)) or is_right(bearer):
            return None
        return Response("open this page with ?token=... of `coral ui`\n", 401)
