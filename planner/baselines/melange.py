"""Melange: one-GPU replicas per request-size bucket, and Coral under Melange's assumptions.

Requests fall into buckets by their lengths. Melange cuts every bucket into equal slices and gives
each slice to one GPU type; Coral shares a bucket among replicas as it likes. Neither knows
availability, start-up or latency (the SLO is inside the throughputs).
Source: github.com/tyler-griggs/melange-release, commit d46ab43; docs/formulation.md, section 8.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from scipy import sparse

from planner.allocation.plan import Plan
from planner.allocation.problem import AllocationInput, AllocationSettings
from planner.allocation.solve import plan_allocation
from planner.baselines.plain import plain_template, plain_workload
from planner.errors import InputError, MissingProfileError, NoTemplateError, SolverStoppedError
from planner.programs import Program, solve_program
from planner.types import Market, Offer

RELATIVE_GAP = 1e-9  # of a cost: both programs are small
DOMAIN = "melange"


@dataclass(frozen=True, slots=True)
class GpuType:
    """One GPU type and its throughput in every bucket."""

    price_usd_per_hour: float
    serves_rps: tuple[float, ...]  # by bucket, when all requests fall into it; 0: cannot serve it


@dataclass(frozen=True)
class MelangeCase:
    """An input of Melange, its buckets in one row."""

    buckets: tuple[str, ...]
    demand_rps: tuple[float, ...]  # by bucket
    gpus: Mapping[str, GpuType]
    slices: int  # of every bucket: Melange's slice factor

    @classmethod
    def of(
        cls,
        buckets: tuple[str, ...],
        demand_rps: tuple[float, ...],
        gpus: Mapping[str, GpuType],
        slices: int,
    ) -> MelangeCase:
        """Sort and check.

        Raises MissingProfileError: a GPU type without a throughput of every bucket.
        NoTemplateError: a bucket with demand that no GPU type serves. InputError: another number
        that cannot be.
        """
        if slices < 1:
            raise InputError(f"a bucket has at least one slice, got {slices}")
        if len(demand_rps) != len(buckets) or not all(0 <= d < math.inf for d in demand_rps):
            raise InputError("every bucket needs a demand of zero or more requests/s")
        if not any(demand_rps):
            raise InputError("no bucket has demand; there is nothing to plan")
        for name, gpu in gpus.items():
            if len(gpu.serves_rps) != len(buckets):
                raise MissingProfileError(
                    f"GPU {name} has {len(gpu.serves_rps)} throughputs for {len(buckets)} buckets; "
                    "give one of each (0 where it cannot serve it)"
                )
            if not 0 < gpu.price_usd_per_hour < math.inf:
                raise InputError(f"GPU {name}: a price must be positive and finite")
            if not all(0 <= rps < math.inf for rps in gpu.serves_rps):
                raise InputError(f"GPU {name}: a throughput that is negative or no number")
        for index, (bucket, demand) in enumerate(zip(buckets, demand_rps, strict=True)):
            if demand > 0 and not any(gpu.serves_rps[index] > 0 for gpu in gpus.values()):
                raise NoTemplateError(
                    f"bucket {bucket} has demand but no GPU type serves it; add one that does"
                )
        return cls(buckets, demand_rps, dict(sorted(gpus.items())), slices)


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """How many GPUs of each type, and what was proven."""

    counts: Mapping[str, int]
    cost_usd_per_hour: float
    proven: bool
    solve_s: float


def plan_melange(
    case: MelangeCase,
    *,
    time_limit_s: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> GpuPlan:
    """Melange's own program, to its optimum.

    Variables  n[b, g] slices of bucket b on GPU type g, y[g] GPUs; integer >= 0
    Minimise   sum price[g] y[g]                                         USD/hour
    Such that  sum over g of n[b, g] = slices                            (every bucket with demand)
               sum over b of demand[b] / slices / T[g, b] n[b, g] <= y[g]    (every GPU type)
    Source     Melange's x[slice, g], binary: the slices of one bucket are alike, so n counts them.
               A GPU type that does not serve a bucket (throughput 0) has no n there.
    Raises     SolverStoppedError: the time limit passed before any plan was found.
    """
    started = clock()
    names = list(case.gpus)
    demanded = [b for b, demand in enumerate(case.demand_rps) if demand > 0]
    entries: list[tuple[int, int, float]] = []  # row, column, value
    columns = len(names)
    for row, bucket in enumerate(demanded):
        slice_rps = case.demand_rps[bucket] / case.slices
        for g, name in enumerate(names):
            rps = case.gpus[name].serves_rps[bucket]
            if rps > 0:
                entries.append((row, columns, 1.0))
                entries.append((len(demanded) + g, columns, slice_rps / rps))
                columns += 1
    entries += [(len(demanded) + g, g, -1.0) for g in range(len(names))]
    rows, places, values = (np.array(part) for part in zip(*entries, strict=True))
    prices = [case.gpus[name].price_usd_per_hour for name in names]
    row_lower = np.full(len(demanded) + len(names), -np.inf)
    row_upper = np.zeros(len(demanded) + len(names))
    row_lower[: len(demanded)] = row_upper[: len(demanded)] = case.slices
    program = Program(
        matrix=sparse.csc_array((values, (rows, places)), shape=(len(row_lower), columns)),
        cost=np.array([*prices, *[0.0] * (columns - len(names))]),
        lower=np.zeros(columns),
        upper=np.array([np.inf] * len(names) + [float(case.slices)] * (columns - len(names))),
        row_lower=row_lower,
        row_upper=row_upper,
        integer=np.ones(columns, dtype=bool),
    )
    answer = solve_program(program, time_limit_s=time_limit_s, relative_gap=RELATIVE_GAP)
    if answer.values is None:
        raise SolverStoppedError("Melange's program: no plan within the time limit; raise it")
    counts = {name: round(answer.values[g]) for g, name in enumerate(names)}
    cost = sum(price * counts[name] for name, price in zip(names, prices, strict=True))
    return GpuPlan(counts, cost, answer.proven, clock() - started)


def plan_coral(case: MelangeCase, *, deadline_s: float = 60.0) -> GpuPlan:
    """Coral's allocation of the same: its only freedom is that buckets share replicas.

    Its program relaxes Melange's slices to any share, so its optimum is never dearer.
    """
    plan = plan_allocation(coral_input(case, deadline_s))
    counts = dict.fromkeys(case.gpus, 0)
    for nodes in plan.nodes:
        counts[nodes.offer.instance_type] += nodes.count
    return GpuPlan(counts, plan.cost_usd_per_hour, _serves_all(plan) and plan.proven, plan.solve_s)


def coral_input(case: MelangeCase, deadline_s: float = 60.0) -> AllocationInput:
    """One domain, on-demand GPUs without end, a workload per bucket, a template per GPU type."""
    demanded = [b for b, demand in enumerate(case.demand_rps) if demand > 0]
    workloads = [plain_workload(case.buckets[b], case.demand_rps[b]) for b in demanded]
    templates, offers = [], []
    for name, gpu in case.gpus.items():
        serves = {case.buckets[b]: gpu.serves_rps[b] for b in demanded if gpu.serves_rps[b] > 0}
        if serves:
            load = sum(w.demand_rps / serves[w.name] for w in workloads if w.name in serves)
            templates.append(plain_template(name, ((name, 1),), serves))
            offers.append(
                Offer(
                    DOMAIN, name, name, Market.ON_DEMAND, gpu.price_usd_per_hour,
                    math.ceil(load) + 1,  # more than it could ever use
                    "unlimited, as Melange assumes",
                )
            )  # fmt: skip
    settings = AllocationSettings(
        startup_minutes=0.0,
        drain_minutes=0.0,
        relative_gap=RELATIVE_GAP,
        deadline_s=deadline_s,
    )
    return AllocationInput.of(workloads, templates, offers, settings=settings)


def _serves_all(plan: Plan) -> bool:
    return all(service.short_rps <= 1e-6 * service.demand_rps for service in plan.services)
