"""Best placement of every combination of one shape: relaxations first, then searches on the cap."""

from __future__ import annotations

import numpy as np

from planner.perf.grids import Floats
from planner.placement.kernels.compiled import compiled, entry
from planner.placement.kernels.pipeline import best_pipeline, measure
from planner.placement.kernels.relax import enough_work, fill_heads, fill_slopes, verdict
from planner.placement.kernels.types import (
    GAINED,
    PREFILL,
    SEARCHED,
    WORK,
    Case,
    Ints,
    Load,
    Results,
)

WIDER = 8.0  # how much further below the last find each next trial is


@entry
def solve(case: Case, members: Ints, floors: Floats, out: Results) -> None:
    """Fill one row of `out` for every combination, a row of distinct classes in `members`.

    Only a placement that beats its floor (requests/s) by least_gain counts.
    """
    work = case.work
    for row in range(members.shape[0]):
        classes = members[row]
        fill_heads(case, classes)
        network, once_ms = _common(case, classes)
        target = floors[row] * (1.0 + case.terms.least_gain)
        count, code = _promising_pairs(case, classes, network, once_ms, target)
        _order_pairs(case, classes, network, once_ms, target, count)
        searches = 0
        for j in range(count):
            p = work.alive[j]
            if case.pairs.rps_ms[p] <= target * work.shortest[j]:
                break  # nor can the pairs after it
            load = _load(case, network, once_ms, p)
            fill_slopes(case.bounds, case.shape, classes, load.batch, work.slope)
            ended, tried = _search(case, classes, load, target, work.shortest[j], out, row)
            searches += tried
            code = max(code, ended)
            if ended == GAINED:
                target = out.rps[row] * (1.0 + case.terms.tolerance)
        out.code[row], out.searches[row] = code, searches


@compiled
def _common(case: Case, classes: Ints) -> tuple[float, float]:
    """Slowest network, in Gbit/s, and least overhead of a step among a combination's nodes."""
    slowest, once_ms = np.inf, np.inf
    for i in range(classes.shape[0]):
        c = classes[i]
        slowest = min(slowest, case.nodes.peak_gbit_per_s[c])
        for o in range(case.nodes.options[c]):
            once_ms = min(once_ms, case.nodes.overhead_ms[c, o])
    return slowest, once_ms


@compiled
def _load(case: Case, network: float, once_ms: float, p: int) -> Load:
    """Pair p on a combination with this `_common`."""
    batch, m = case.pairs.batch[p], case.pairs.micro_batches[p]
    bits = batch * case.terms.hop_bits + case.terms.hop_bits_extra
    own_ms = case.terms.hop_latency_ms + bits * case.terms.hop_ms_per_bit
    hop_ms = own_ms + bits / (network * 1e6)
    stretch = 1 if case.terms.kind == PREFILL else m
    return Load(p, m, stretch, batch, case.pairs.least_share[p], hop_ms, once_ms)


@compiled
def _longest_ms(case: Case, p: int, target: float) -> float:
    """The longest cycle that beats the target and meets P5."""
    limit = case.pairs.limit_ms[p]
    return min(limit, case.pairs.rps_ms[p] / target) if target > 0.0 else limit


@compiled
def _budget_ms(case: Case, cycle_ms: float) -> float:
    """What the summed latency may be: the cycle, or prefill's own budget."""
    return case.terms.budget_ms if case.terms.kind == PREFILL else cycle_ms


@compiled
def _promising_pairs(
    case: Case, classes: Ints, network: float, once_ms: float, target: float
) -> tuple[int, int]:
    """work.alive: pairs that relaxations leave a chance to beat the target; and what refused."""
    work, grid = case.work, case.bounds.grid
    code, count, sloped = WORK, 0, 0
    for p in range(case.pairs.batch.shape[0]):
        load = _load(case, network, once_ms, p)
        longest = _longest_ms(case, p, target)
        k = _grid_index(grid, longest / load.stretch)
        if not enough_work(case, classes, load, k):
            continue
        if sloped != load.batch:
            fill_slopes(case.bounds, case.shape, classes, load.batch, work.slope)
            sloped = load.batch
        found = verdict(case, classes, load, k, _budget_ms(case, longest))
        if found == SEARCHED:
            work.alive[count] = p
            count += 1
        else:
            code = max(code, found)
    return count, code


@compiled
def _order_pairs(
    case: Case, classes: Ints, network: float, once_ms: float, target: float, count: int
) -> None:
    """work.shortest: the shortest cycle that relaxations leave each pair; best pair first."""
    work, grid, pairs = case.work, case.bounds.grid, case.pairs
    for j in range(count):
        load = _load(case, network, once_ms, work.alive[j])
        fill_slopes(case.bounds, case.shape, classes, load.batch, work.slope)
        low = 0
        high = _grid_index(grid, _longest_ms(case, load.p, target) / load.stretch)
        while low < high:
            k = (low + high) // 2
            budget = _budget_ms(case, load.stretch * grid[k])
            enough = enough_work(case, classes, load, k)
            if enough and verdict(case, classes, load, k, budget) == SEARCHED:
                high = k
            else:
                low = k + 1
        work.shortest[j] = load.stretch * (grid[low - 1] if low > 0 else 0.0)
    for j in range(1, count):
        p, shortest = work.alive[j], work.shortest[j]
        i = j - 1
        while i >= 0 and pairs.rps_ms[work.alive[i]] * shortest < (
            pairs.rps_ms[p] * work.shortest[i]
        ):
            work.alive[i + 1], work.shortest[i + 1] = work.alive[i], work.shortest[i]
            i -= 1
        work.alive[i + 1], work.shortest[i + 1] = p, shortest


@compiled
def _search(
    case: Case, classes: Ints, load: Load, target: float, low: float, out: Results, row: int
) -> tuple[int, int]:
    """Shortest cycle of a pair that beats the target: how it ended, and its dynamic programs.

    S(v), the least latency under the cap v, never rises with v, so the cycle max(S(v), M v) is
    least where the two cross. `low`: no cycle is shorter.
    """
    work, tolerance = case.work, case.terms.tolerance
    prefill = case.terms.kind == PREFILL
    for r in range(work.cost.shape[0]):
        for s in range(case.shape.sizes.shape[0]):
            for n in range(case.terms.layers + 1):
                work.cost[r, s, n] = -1.0
    high = _longest_ms(case, load.p, target)
    step = 1.0 if prefill else tolerance  # prefill finds caps, not the steps below: halve at once
    code, tried, width, trial = WORK, 0, step, high
    while True:
        cap_ms = trial / load.stretch
        number = best_pipeline(case, classes, load, cap_ms, _budget_ms(case, trial))
        if number >= 0:
            tried += 1
        if number > 0:
            latency, slowest = measure(case, classes, load, cap_ms, number)
            high = slowest if prefill else max(latency, load.stretch * slowest)
            _keep(case, load, high, number, out, row)
            code = GAINED
            if not prefill and latency >= load.stretch * slowest:
                break  # a lower cap only lengthens the sum
        elif code != GAINED:
            code = SEARCHED if number == 0 else -number
            break  # nothing beats the target with this pair
        else:
            low, width = trial, step
        if high * (1.0 - tolerance) <= low:
            break
        # Just below what was found: most often nothing is there, and that ends it.
        trial = max(high * (1.0 - width), 0.5 * (low + high))
        width *= WIDER
    return code, tried


@compiled
def _keep(case: Case, load: Load, cycle_ms: float, number: int, out: Results, row: int) -> None:
    out.rps[row] = case.pairs.rps_ms[load.p] / cycle_ms
    out.pair[row] = load.p
    out.cycle_ms[row] = cycle_ms
    out.stages[row] = number
    for i in range(number):
        out.subsets[row, i] = case.work.stages[i]
        out.stage_layers[row, i] = case.work.layers[i]


@compiled
def _grid_index(grid: Floats, value: float) -> int:
    """Smallest k with grid[k] >= value (the last one if there is none)."""
    low, high = 0, grid.shape[0] - 1
    while low < high:
        k = (low + high) // 2
        if grid[k] >= value:
            high = k
        else:
            low = k + 1
    return low
