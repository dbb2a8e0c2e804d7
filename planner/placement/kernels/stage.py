"""Times of one stage: how a group of nodes splits a micro-batch (P3)."""

from __future__ import annotations

import numpy as np

from planner.perf.grids import Floats
from planner.placement.kernels.compiled import compiled
from planner.placement.kernels.types import LAST, ONLY, PREFILL, Case, Ints, Load, Nodes, Shape

COST_PRECISION = 1e-5  # relative, of a stage's time


@compiled
def stage_cost_ms(
    case: Case, classes: Ints, load: Load, s: int, r: int | np.int64, n: int, cap_ms: float
) -> float:
    """What a stage adds to the latency, infinite if its step is over the cap; remembered."""
    work, shape = case.work, case.shape
    known = work.cost[r, s, n]
    if case.terms.kind == PREFILL:  # remembered for one cap
        if known >= 0.0:
            return known
        for i in range(shape.counts.shape[0]):
            if shape.digits[s, i] and work.slots[i, r, n, 0] < 0.0:
                slots = work.slots[i, r, n]
                _fill_prompt_slots(case.nodes, classes[i], load, r, n, cap_ms, slots)
                slots[0] = 0.0
        found = _prompt_split_ms(shape, work.slots, s, r, n, load.batch, work.split.space[0])
        work.cost[r, s, n] = found
        return found
    if known >= 0.0:
        return known if known <= cap_ms else np.inf
    group = -1
    if shape.sizes[s] <= 2 and r != ONLY:
        group = _small_group(shape, classes, s)
        found = case.shared[load.p, group, r - 1, n]
        if found > 0.0:
            work.cost[r, s, n] = found
            return found if found <= cap_ms else np.inf
    found = _step_ms(case, classes, load, s, r, n, cap_ms)
    if found == np.inf:
        return found  # under this cap; a looser one may ask again
    work.cost[r, s, n] = found
    if group >= 0:
        case.shared[load.p, group, r - 1, n] = found
    return found


@compiled
def node_requests(nodes: Nodes, c: int, r: int, n: int, load: Load, cap_ms: float) -> int:
    """Most requests that a node takes within the cap, in its best option."""
    most = 0
    moved = nodes.network_ms[c, r, n]
    for o in range(nodes.options[c]):
        dp = nodes.dp[c, o]
        if load.share * dp > load.batch:
            continue
        high = min((load.batch + dp - 1) // dp, nodes.room[c, o, r, n] // load.micro_batches)
        g = _group_requests(nodes, c, o, r, n, 0, high, cap_ms)
        x = min(g * dp, nodes.most[c, n], load.batch)
        if moved * x > cap_ms:
            x = int(cap_ms / moved)
        if x >= load.share * dp:
            most = max(most, x)
    return most


@compiled
def _group_requests(
    nodes: Nodes, c: int, o: int, r: int | np.int64, n: int, low: int, high: int, cap_ms: float
) -> int:
    """Most requests of one group, from `low` to `high`, whose step stays within the cap."""
    head = 1.0 if r in (ONLY, LAST) else 0.0
    once = nodes.overhead_ms[c, o]
    while low < high:
        g = (low + high + 1) >> 1
        step = n * nodes.layer_ms[c, o, g] + head * nodes.head_ms[c, o, g] + once
        if step <= cap_ms:
            low = g
        else:
            high = g - 1
    return low


@compiled
def _step_ms(
    case: Case, classes: Ints, load: Load, s: int, r: int | np.int64, n: int, cap_ms: float
) -> float:
    """Least step of a stage in cycles, if it is within the cap; infinite otherwise.

    Bisects on time; the groups of every option stay between what they take within the lower and
    the upper end.
    """
    nodes, split, digits = case.nodes, case.work.split, case.shape.digits[s]
    batch, share = load.batch, load.share
    low, high, trial = case.work.slope[s] * n, cap_ms, cap_ms
    first = True
    while True:
        total = 0
        for i in range(digits.shape[0]):
            if digits[i] == 0:
                continue
            c = classes[i]
            moved = nodes.network_ms[c, r, n]
            best = 0
            for o in range(nodes.options[c]):
                dp = nodes.dp[c, o]
                if first:
                    g = 0
                    h = min((batch + dp - 1) // dp, nodes.room[c, o, r, n] // load.micro_batches)
                    if share * dp > batch:
                        h = 0
                    split.low[i, o] = 0
                else:
                    g, h = split.low[i, o], split.high[i, o]
                g = _group_requests(nodes, c, o, r, n, g, h, trial)
                split.middle[i, o] = g
                x = min(g * dp, nodes.most[c, n], batch)
                if moved * x > trial:
                    x = int(trial / moved)
                split.room[i, o] = x
                if x > best and x >= share * dp:
                    best = x
            total += digits[i] * best
        fits = total >= batch
        if fits and share > 0:
            fits = _shares_fit(nodes, classes, digits, share, batch, split.room, split.space)
        if not fits and first:
            return np.inf
        for i in range(digits.shape[0]):
            if digits[i]:
                for o in range(nodes.options[classes[i]]):
                    if fits:
                        split.high[i, o] = split.middle[i, o]
                    else:
                        split.low[i, o] = split.middle[i, o]
        if fits:
            high = trial
        else:
            low = trial
        first = False
        if high - low <= COST_PRECISION * high:
            return high
        trial = 0.5 * (low + high)


@compiled
def _shares_fit(
    nodes: Nodes, classes: Ints, digits: Ints, share: int, batch: int, room: Ints, space: Ints
) -> bool:
    """Whether nodes can split a batch with `share` requests for every group at work.

    `room[i, o]`: most requests of a node of the i-th class in option o. Depth first over the
    nodes, each in one option or idle; [low, high] is what those so far can take.
    """
    low, high, rest, chosen, which = space[0], space[1], space[2], space[3], space[4]
    depth = 0
    for i in range(digits.shape[0]):
        for _ in range(digits[i]):
            which[depth] = i
            depth += 1
    rest[depth] = 0
    for j in range(depth - 1, -1, -1):
        c, most = classes[which[j]], 0
        for o in range(nodes.options[c]):
            if room[which[j], o] >= share * nodes.dp[c, o]:
                most = max(most, room[which[j], o])
        rest[j] = rest[j + 1] + most
    j = 0
    low[0] = high[0] = 0
    chosen[0] = -2  # the next is -1: idle
    while j >= 0:
        chosen[j] += 1
        i = which[j]
        c = classes[i]
        if chosen[j] >= nodes.options[c]:
            j -= 1
            continue
        low[j + 1], high[j + 1] = low[j], high[j]
        if chosen[j] >= 0:
            least = share * nodes.dp[c, chosen[j]]
            if room[i, chosen[j]] < least:
                continue
            low[j + 1] += least
            high[j + 1] += room[i, chosen[j]]
        if low[j + 1] > batch or high[j + 1] + rest[j + 1] < batch:
            continue
        if high[j + 1] >= batch:
            return True
        if j + 1 < depth:
            j += 1
            chosen[j] = -2
    return False


@compiled
def _fill_prompt_slots(
    nodes: Nodes, c: int, load: Load, r: int | np.int64, n: int, cap_ms: float, out: Floats
) -> None:
    """out[x]: least latency of a node with x prompts whose step stays within the cap."""
    for x in range(1, load.batch + 1):
        out[x] = np.inf
    head = 1.0 if r in (ONLY, LAST) else 0.0
    moved = nodes.network_ms[c, r, n]
    for o in range(nodes.options[c]):
        dp = nodes.dp[c, o]
        once = nodes.overhead_ms[c, o]
        for x in range(1, min(load.batch, nodes.most[c, n]) + 1):
            g = (x + dp - 1) // dp
            step = n * nodes.layer_ms[c, o, g] + head * nodes.head_ms[c, o, g] + once
            if g * load.micro_batches > nodes.room[c, o, r, n] or max(step, moved * x) > cap_ms:
                break
            latency = n * nodes.latency_ms[c, o, g] + head * nodes.head_ms[c, o, g] + once
            out[x] = min(out[x], latency)


@compiled
def _prompt_split_ms(
    shape: Shape, slots: Floats, s: int, r: int | np.int64, n: int, batch: int, taken: Ints
) -> float:
    """Least latency of a stage that splits `batch` prompts: always the cheapest slot next."""
    taken[:] = 0
    worst = 0.0
    for _ in range(batch):
        best, which = np.inf, -1
        for i in range(shape.counts.shape[0]):
            count = shape.digits[s, i]
            if count and taken[i] < count * batch:
                # Equal nodes take turns: each has taken t // count, or one more.
                slot = slots[i, r, n, taken[i] // count + 1]
                if slot < best:
                    best, which = slot, i
        if which < 0:
            return np.inf
        worst = max(worst, best)
        taken[which] += 1
    return worst


@compiled
def _small_group(shape: Shape, classes: Ints, s: int) -> int:
    """Number of a group of one or two nodes among all such groups."""
    a = b = -1
    for i in range(shape.counts.shape[0]):
        for _ in range(shape.digits[s, i]):
            a, b = b, classes[i]
    return b * (b + 3) // 2 + a + 1
