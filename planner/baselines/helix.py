"""Helix: one model on one fixed cluster, machines with a throughput per number of layers.

Coral's side of the comparison: its placement over Helix's throughput tables and layer caps, as one
replica of at most the whole cluster or as several whole replicas chosen by the allocation.
Source: Helix (ASPLOS'25), github.com/Thesys-lab/Helix-ASPLOS25, commit 148b733;
docs/formulation.md, sections 8 and 9.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.allocation.problem import AllocationInput, AllocationSettings
from planner.allocation.solve import plan_allocation
from planner.baselines.plain import plain_template, plain_workload
from planner.placement.rate_library import rate_library
from planner.placement.rate_pipeline import best_pipeline
from planner.placement.rates import RatePipeline, RateTable
from planner.types import Combination, Market, Offer, describe_combination

TOKENS_PER_REQUEST = 990.0  # Helix's 750 prompt and 240 generated tokens
DOMAIN = "helix"


@dataclass(frozen=True)
class Replicas:
    """Whole replicas on disjoint machines, each a pipeline of its own."""

    pipelines: tuple[RatePipeline, ...]
    bound_tokens_per_s: float  # of plans with these templates

    @property
    def tokens_per_s(self) -> float:
        """Of all together."""
        return sum(pipeline.tokens_per_s for pipeline in self.pipelines)


def plan_pipeline(table: RateTable, cluster: Combination) -> RatePipeline:
    """Coral's placement with N_max as large as the cluster: one replica.

    Raises MissingProfileError: no table of a machine. NoTemplateError: the cluster cannot hold the
    model under Helix's layer caps.
    """
    return best_pipeline(table, cluster)


def plan_replicas(
    table: RateTable,
    cluster: Combination,
    max_machines: int,
    whole: RatePipeline | None = None,
    deadline_s: float = 60.0,
) -> Replicas:
    """Several replicas of at most `max_machines` machines each, chosen by Coral's allocation.

    `whole` is one more template, on the whole cluster. The machines are owned stock, and demand is
    more than they can serve, so that the least shortfall is the most throughput.
    Raises MissingProfileError, NoTemplateError: as `plan_pipeline`. InputError: too many
    combinations.
    """
    demand = table.work_bound(cluster)
    rates = dict(rate_library(table, cluster, max_machines).kept())
    if whole is not None:
        rates[cluster] = max(rates.get(cluster, 0.0), whole.tokens_per_s)
    if not rates:
        return Replicas((), 0.0)
    templates = [
        plain_template(
            describe_combination(combination), combination, {table.model: rate / TOKENS_PER_REQUEST}
        )
        for combination, rate in rates.items()
    ]
    offers = [
        Offer(DOMAIN, name, name, Market.OWNED, 0.0, count, "Helix's cluster")
        for name, count in cluster
    ]
    data = AllocationInput.of(
        [plain_workload(table.model, demand / TOKENS_PER_REQUEST)],
        templates,
        offers,
        settings=AllocationSettings(relative_gap=1e-6, deadline_s=deadline_s),
    )
    plan = plan_allocation(data)
    served = demand - plan.weighted_shortfall * TOKENS_PER_REQUEST
    pipelines = []
    for planned in plan.replicas:
        found = best_pipeline(table, planned.template.combination)
        pipelines += [found] * planned.count
    return Replicas(tuple(pipelines), served + plan.shortfall_gap * demand)
