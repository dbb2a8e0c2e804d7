"""Attainment of prefill and decode apart: each against its share of the objectives.

Source: docs/formulation.md, section 10, Calibration of the caps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from planner.types import Phase, Slo
from simulator.measures import tpot_ms, ttft_ms
from simulator.run import Result, Status


@dataclass(frozen=True, slots=True)
class PhaseShare:
    """How many requests of a workload a phase served, and which share of them in time."""

    requests: int
    attainment: float


def phase_attainment(
    result: Result, slos: Mapping[str, Slo], kv_handover_share: float, window_s: tuple[float, float]
) -> dict[tuple[str, Phase], PhaseShare]:
    """By (workload, phase) over the requests that arrive in the window.

    Aggregated: both objectives. Prefill: the prompt is done within the TTFT objective less the
    hand-over's share and one TPOT. Decode: the first token follows within those, and TPOT holds.
    Requests that no replica took are in neither.
    """
    trace = result.trace
    phases = np.array([list(Phase).index(engine.phase) for engine in result.engines])
    taken = result.engine >= 0
    phase = np.where(taken, phases[np.maximum(result.engine, 0)], -1)
    done = result.status == Status.DONE
    inside = taken & (trace.arrival_s >= window_s[0]) & (trace.arrival_s < window_s[1])
    ttft, tpot = ttft_ms(result), tpot_ms(result)
    prompt = result.handed_ms - trace.arrival_s * 1e3
    found = {}
    for number, name in enumerate(trace.workloads):
        slo, mine = slos[name], inside & (trace.workload == number)
        mixed = mine & (phase == list(Phase).index(Phase.AGGREGATED))
        apart, spared = mine & ~mixed, kv_handover_share * slo.ttft_ms + slo.tpot_ms
        handed = apart & (result.handed_ms >= 0)
        steady = done & (tpot <= slo.tpot_ms)
        good = {
            Phase.PREFILL: (apart, handed & (prompt <= slo.ttft_ms - spared)),
            Phase.DECODE: (handed, handed & steady & (ttft - prompt <= spared)),
            Phase.AGGREGATED: (mixed, mixed & steady & (ttft <= slo.ttft_ms)),
        }
        for key, (which, met) in good.items():
            if which.any():
                count = int(which.sum())
                found[name, key] = PhaseShare(count, float(met.sum()) / count)
    return found
