"""What the dashboard asks of the snapshot; every answer is a table."""

from __future__ import annotations

from datetime import timedelta

import polars as pl

from catalog.store import Catalog

DAYS_SHOWN = 14
ROWS_SHOWN = 100
LATEST = (  # Coral's plan of a scenario that was made last
    "SELECT allocation_id FROM allocation WHERE planner = 'coral' AND scenario = ? "
    "ORDER BY rowid DESC LIMIT 1"
)


class Queries:
    """Questions about one home's snapshot, which is opened anew for each."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    @property
    def snapshot_at(self) -> float:
        """When it was published, in seconds since 1970."""
        return self._catalog.snapshot.stat().st_mtime

    def scenarios(self) -> list[str]:
        """Scenarios that were planned, the one planned last first."""
        found = self._catalog.frame(
            "SELECT scenario FROM allocation GROUP BY scenario ORDER BY max(created_at) DESC"
        )
        return found["scenario"].to_list()

    def plans(self, scenario: str) -> pl.DataFrame:
        """Plans of the last days, oldest first, by planner."""
        return self._catalog.frame(
            "SELECT created_at AT TIME ZONE 'UTC' AS created_at, planner, cost_usd_per_hour, "
            "served_share, gap, proven, solve_s, templates, applied, decision_id "
            "FROM allocation WHERE scenario = ? AND created_at > (SELECT max(created_at) FROM "
            f"allocation WHERE scenario = ?) - INTERVAL {DAYS_SHOWN} DAY ORDER BY created_at",
            [scenario, scenario],
        )

    def limits(self, scenario: str) -> pl.DataFrame:
        """What binds Coral's latest plan."""
        return self._catalog.frame(
            "SELECT text, used, amount, unit, worth, worth_unit FROM allocation_binding "
            f"WHERE allocation_id = ({LATEST}) ORDER BY worth DESC",
            [scenario],
        )

    def services(self, scenario: str) -> pl.DataFrame:
        """Demand, what is served and what it costs, by workload, in Coral's latest plan."""
        return self._catalog.frame(
            "SELECT workload, demand_rps, served_rps, cost_usd_per_hour FROM allocation_service "
            f"WHERE allocation_id = ({LATEST}) ORDER BY workload",
            [scenario],
        )

    def replicas(self, scenario: str) -> pl.DataFrame:
        """Where Coral's latest plan runs what."""
        return self._catalog.frame(
            "SELECT i.domain, t.phase, i.workload, t.placement, i.replicas, i.load_rps "
            "FROM allocation_item i JOIN template t USING (template_id) "
            f"WHERE allocation_id = ({LATEST}) ORDER BY ALL",
            [scenario],
        )

    def fleet(self, scenario: str) -> pl.DataFrame:
        """Nodes that are held."""
        return self._catalog.frame(
            "SELECT domain, node_class, market, state, nodes, usd_per_hour FROM fleet_now "
            "WHERE scenario = ?",
            [scenario],
        )

    def events(self, scenario: str) -> pl.DataFrame:
        """The last changes of nodes, the newest first."""
        return self._catalog.frame(
            "SELECT happened_at AT TIME ZONE 'UTC' AS happened_at, l.node_class, l.domain, "
            "e.state, e.reason FROM lease_event e JOIN lease l USING (lease_id) "
            f"WHERE l.scenario = ? ORDER BY e.number DESC LIMIT {ROWS_SHOWN}",
            [scenario],
        )

    def model_cost(self, scenario: str) -> pl.DataFrame:
        """USD/hour of plans by model, oldest first."""
        return self._catalog.frame(
            "SELECT created_at AT TIME ZONE 'UTC' AS created_at, model, sum(cost_usd_per_hour) "
            "AS usd_per_hour, sum(demand_rps) AS demand_rps, sum(served_rps) AS served_rps "
            "FROM model_cost WHERE scenario = ? AND cost_usd_per_hour IS NOT NULL "
            f"AND created_at > (SELECT max(created_at) FROM model_cost WHERE scenario = ?) "
            f"- INTERVAL {DAYS_SHOWN} DAY GROUP BY ALL ORDER BY ALL",
            [scenario, scenario],
        )

    def spend(self, scenario: str) -> pl.DataFrame:
        """USD by day and market, of instances."""
        return self._catalog.frame(
            "SELECT day, market, sum(usd) AS usd FROM spend_by_day WHERE scenario = ? "
            "GROUP BY ALL ORDER BY ALL",
            [scenario],
        )

    def templates(
        self, model: str | None, gpu: str | None, phase: str | None, nodes: int | None, sort: str
    ) -> pl.DataFrame:
        """The best templates of a filter; `sort` is a column of theirs."""
        order = sort if sort in SORTS else "tokens_per_usd"
        return self._catalog.frame(
            "SELECT model, workload, phase, nodes, placement, throughput_rps, usd_per_hour, "
            "tokens_per_usd, provenance, template_id FROM best_templates "
            "WHERE (? IS NULL OR model = ?) AND (? IS NULL OR phase = ?) "
            "AND (? IS NULL OR nodes = ?) AND (? IS NULL OR template_id IN (SELECT template_id "
            "FROM template_stage s JOIN instance_type i USING (node_class) WHERE i.gpu = ?)) "
            f"ORDER BY {order} {'ASC' if order == 'usd_per_hour' else 'DESC'}, template_id "
            "LIMIT 500",
            [model, model, phase, phase, nodes, nodes, gpu, gpu],
        )

    def template_choices(self) -> tuple[list[str], list[str], list[int]]:
        """Models, GPUs and numbers of nodes that templates have."""
        models = self._catalog.frame("SELECT DISTINCT model FROM template ORDER BY model")
        gpus = self._catalog.frame(
            "SELECT DISTINCT gpu FROM instance_type WHERE node_class IN "
            "(SELECT node_class FROM template_stage) ORDER BY gpu"
        )
        nodes = self._catalog.frame("SELECT DISTINCT nodes FROM template ORDER BY nodes")
        return models["model"].to_list(), gpus["gpu"].to_list(), nodes["nodes"].to_list()

    def prices(self, gpu: str, market: str, domains: int) -> pl.DataFrame:
        """The least USD/hour of one GPU over the last days, in the domains cheapest now.

        Prices are kept as changes: every type's stays until its next, or until it is withdrawn.
        """
        changes = self._catalog.frame(
            "SELECT o.observed_at AT TIME ZONE 'UTC' AS observed_at, o.domain, "
            "concat_ws(' ', o.feed, o.zone, o.instance_type) AS kind, "
            "CASE WHEN o.listed THEN o.price_usd_per_hour / i.gpu_count "
            "ELSE 'Infinity'::DOUBLE END AS usd_per_gpu_hour FROM offer o "
            "JOIN instance_type i ON i.cloud = o.cloud AND i.instance_type = o.instance_type "
            "WHERE o.rejected_because IS NULL AND i.gpu = ? AND o.market = ? AND o.domain IN ("
            "SELECT domain FROM price_now WHERE gpu = ? AND market = ? GROUP BY domain "
            "ORDER BY min(price_usd_per_hour / gpu_count), domain LIMIT ?) ORDER BY ALL",
            [gpu, market, gpu, market, domains],
        )
        parts = [_least(part) for _, part in changes.group_by("domain", maintain_order=True)]
        return pl.concat(parts) if parts else changes.drop("kind")

    def cheapest(self) -> pl.DataFrame:
        """The least price of every GPU type now, on demand and spot."""
        return self._catalog.frame(
            "SELECT gpu, market, min(price_usd_per_hour / gpu_count) AS usd_per_gpu_hour, "
            "arg_min(domain, price_usd_per_hour / gpu_count) AS domain, "
            "arg_min(instance_type, price_usd_per_hour / gpu_count) AS instance_type "
            "FROM price_now GROUP BY ALL ORDER BY gpu, market"
        )

    def gaps(self) -> pl.DataFrame:
        """Parts of the market of which nothing is known now."""
        return self._catalog.frame(
            "SELECT feed, domain, part, gap_from AT TIME ZONE 'UTC' AS gap_from, minutes, why "
            "FROM market_gap WHERE gap_to IS NULL ORDER BY minutes DESC"
        )

    def served(self, scenario: str) -> pl.DataFrame:
        """What replicas of the scenario's models did in the last days, by model and ten minutes."""
        return self._by_ten_minutes(
            "replica_by_minute",
            "sum(tpot_ms * timed_tokens) / nullif(sum(timed_tokens), 0) AS tpot_ms, "
            "sum(measured) / 600.0 AS requests_per_s",
            scenario,
        )

    def met(self, scenario: str) -> pl.DataFrame:
        """Streams within both objectives in the last days, in percent, by model and ten minutes."""
        return self._by_ten_minutes(
            "attainment_by_minute",
            "100 * sum(attainment * judged) / sum(judged) AS percent, sum(judged) AS judged",
            scenario,
        )

    def _by_ten_minutes(self, view: str, figures: str, scenario: str) -> pl.DataFrame:
        """Figures of a view by minute and model, for the scenario's models and the last days."""
        return self._catalog.frame(
            "SELECT time_bucket(INTERVAL 10 MINUTE, minute) AT TIME ZONE 'UTC' AS at, model, "
            f"{figures} FROM {view} WHERE model IN (SELECT model FROM workload WHERE scenario = ?) "
            f"AND minute > (SELECT max(minute) FROM {view}) - INTERVAL {DAYS_SHOWN} DAY "
            "GROUP BY ALL ORDER BY ALL",
            [scenario],
        )

    def corrections(self, scenario: str) -> pl.DataFrame:
        """Templates whose throughput serving corrects now."""
        return self._catalog.frame(
            "SELECT t.workload, t.phase, t.placement, c.factor, c.kind, c.observed, c.predicted, "
            "c.profile_row FROM correction_now c JOIN template t USING (template_id) "
            "WHERE c.scenario = ? AND c.factor <> 1 ORDER BY c.factor",
            [scenario],
        )

    def attainment(self, scenario: str) -> pl.DataFrame:
        """What simulations of plans said, the newest first."""
        return self._catalog.frame(
            "SELECT simulated_at AT TIME ZONE 'UTC' AS simulated_at, workload, trace, load, "
            "attainment, ttft_p95_ms, tpot_p95_ms, goodput_tokens_per_s FROM simulation "
            f"WHERE scenario = ? ORDER BY simulated_at DESC, workload LIMIT {ROWS_SHOWN}",
            [scenario],
        )


SORTS = {
    "tokens_per_usd": "tokens per dollar",
    "throughput_rps": "requests/s",
    "usd_per_hour": "USD per hour",
}


def _least(changes: pl.DataFrame) -> pl.DataFrame:
    """Of one domain: at every change the least of the prices in force, for the last days."""
    wide = changes.pivot(
        on="kind", index="observed_at", values="usd_per_gpu_hour", aggregate_function="last"
    ).sort("observed_at")
    least = wide.select(
        "observed_at",
        domain=pl.lit(changes["domain"][0]),
        usd_per_gpu_hour=pl.min_horizontal(pl.exclude("observed_at").forward_fill()),
    ).filter(pl.col("usd_per_gpu_hour").is_finite())
    since = pl.col("observed_at").max() - timedelta(days=DAYS_SHOWN)
    is_shown = pl.col("observed_at") >= since
    return pl.concat([least.filter(~is_shown).tail(1), least.filter(is_shown)])
