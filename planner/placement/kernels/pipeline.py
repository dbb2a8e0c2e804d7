"""The pipeline of least latency under a cap: dynamic program over node subsets and layers."""

from __future__ import annotations

import numpy as np

from planner.placement.kernels.compiled import compiled
from planner.placement.kernels.relax import (
    fill_most_layers,
    layers_suffice,
    pipeline_bound_ms,
)
from planner.placement.kernels.stage import stage_cost_ms
from planner.placement.kernels.types import (
    AGGREGATED,
    FIRST,
    LAST,
    LATENCY,
    LAYERS,
    MIDDLE,
    ONLY,
    PREFILL,
    Case,
    Ints,
    Load,
    Scratch,
)


@compiled
def best_pipeline(case: Case, classes: Ints, load: Load, cap_ms: float, budget_ms: float) -> int:
    """Pipeline of least latency under the cap and within the budget: how many stages it has.

    0 if there is none, -LAYERS or -LATENCY if a bound says so. Fills work.stages and work.layers,
    in pipeline order. `best[s, n]` is the least latency of a first and middle stages on subset s
    with n layers; only such n count as the other nodes can complete.
    """
    work, shape = case.work, case.shape
    total, whole = case.terms.layers, shape.sizes.shape[0] - 1
    if case.terms.kind == PREFILL:
        _forget(case)
    kept, least = 0, budget_ms
    only = stage_cost_ms(case, classes, load, whole, np.int64(ONLY), total, cap_ms)
    if only <= least:
        kept, least = 1, only
        work.stages[0], work.layers[0] = whole, total
    fill_most_layers(case, classes, load, cap_ms)
    if not layers_suffice(case.terms, shape, work):
        return kept if kept else -LAYERS
    if pipeline_bound_ms(case, load, least) > least:
        return kept if kept else -LATENCY
    end_subset = end_layers = end_group = -1
    for s in range(1, whole):
        low, high = max(1, total - work.rest[whole - s]), work.first[s]
        if low > high or work.rest[whole - s] == 0:
            continue
        _begin(case, classes, load, s, low, high, cap_ms, least)
        _extend(case, classes, load, s, low, high, cap_ms, least)
        for k in range(shape.starts[whole - s], shape.starts[whole - s + 1]):
            t = shape.parts[k]
            if t != whole - s and case.terms.kind != AGGREGATED:
                continue  # without least shares an idle node never helps
            for n in range(max(low, total - work.most_layers[LAST, t]), high + 1):
                if work.best[s, n] >= least:
                    continue
                latency = work.best[s, n] + stage_cost_ms(
                    case, classes, load, t, np.int64(LAST), total - n, cap_ms
                )
                if latency <= least:
                    least = latency
                    end_subset, end_layers, end_group = s, n, t
    if end_subset < 0:
        return kept
    return _trace(work, end_subset, end_layers, end_group, total)


@compiled
def measure(
    case: Case, classes: Ints, load: Load, cap_ms: float, count: int
) -> tuple[float, float]:
    """Summed latency and slowest step of work.stages; prefill: the cap they were found under."""
    if case.terms.kind == PREFILL:
        return 0.0, cap_ms
    slowest, latency = 0.0, load.hop_ms * (count - 1)
    for i in range(count):
        r = np.int64(MIDDLE)
        if count == 1:
            r = np.int64(ONLY)
        elif i == 0:
            r = np.int64(FIRST)
        elif i == count - 1:
            r = np.int64(LAST)
        cost = stage_cost_ms(
            case, classes, load, case.work.stages[i], r, case.work.layers[i], cap_ms
        )
        slowest = max(slowest, cost)
        latency += cost
    return latency, slowest


@compiled
def _forget(case: Case) -> None:
    """Prefill: stage times hold for one cap."""
    for r in range(LAST + 1):
        for s in range(case.shape.sizes.shape[0]):
            for n in range(case.terms.layers + 1):
                case.work.cost[r, s, n] = -1.0
        for i in range(case.shape.counts.shape[0]):
            for n in range(case.terms.layers + 1):
                case.work.slots[i, r, n, 0] = -1.0


@compiled
def _begin(
    case: Case, classes: Ints, load: Load, s: int, low: int, high: int, cap_ms: float,
    least: float,
) -> None:  # fmt: skip
    """best[s, low..high] of subset s as the first stage alone."""
    work = case.work
    for n in range(low, high + 1):
        work.best[s, n] = np.inf
    for n in range(low, min(high, work.most_layers[FIRST, s]) + 1):
        latency = load.hop_ms + stage_cost_ms(case, classes, load, s, np.int64(FIRST), n, cap_ms)
        if latency <= least:
            work.best[s, n] = latency
            work.from_subset[s, n] = 0


@compiled
def _extend(
    case: Case, classes: Ints, load: Load, s: int, low: int, high: int, cap_ms: float,
    least: float,
) -> None:  # fmt: skip
    """best[s, low..high] with some part t of s as the latest middle stage."""
    work, shape = case.work, case.shape
    total, whole = case.terms.layers, shape.sizes.shape[0] - 1
    for k in range(shape.starts[s], shape.starts[s + 1]):
        t = shape.parts[k]
        before = s - t
        if before == 0 or work.most_layers[MIDDLE, t] == 0 or work.rest[whole - before] == 0:
            continue
        low_before = max(1, total - work.rest[whole - before])
        high_before = work.first[before]
        for layers in range(max(1, low - high_before), work.most_layers[MIDDLE, t] + 1):
            cost = -1.0
            start, end = max(low, low_before + layers), min(high, high_before + layers)
            for n in range(start, end + 1):
                sofar = work.best[before, n - layers]
                if sofar == np.inf or sofar >= work.best[s, n]:
                    continue
                if cost < 0.0:
                    cost = work.cost[MIDDLE, t, layers]
                    if cost < 0.0 or cost > cap_ms:
                        cost = stage_cost_ms(
                            case, classes, load, t, np.int64(MIDDLE), layers, cap_ms
                        )
                    cost += load.hop_ms
                    if cost > least:
                        break
                if sofar + cost < work.best[s, n] and sofar + cost <= least:
                    work.best[s, n] = sofar + cost
                    work.from_subset[s, n] = t
                    work.from_layers[s, n] = layers


@compiled
def _trace(work: Scratch, s: int, n: int, group: int, total: int) -> int:
    """Follow the choices back from the last stage; in pipeline order."""
    stages, layers = work.stages, work.layers
    stages[0] = group
    layers[0] = total - n
    count = 1
    t = work.from_subset[s, n]
    while t != 0:
        taken = work.from_layers[s, n]
        stages[count] = t
        layers[count] = taken
        count += 1
        s -= t
        n -= taken
        t = work.from_subset[s, n]
    stages[count] = s
    layers[count] = n
    count += 1
    for i in range(count // 2):
        j = count - 1 - i
        stages[i], stages[j] = stages[j], stages[i]
        layers[i], layers[j] = layers[j], layers[i]
    return count
