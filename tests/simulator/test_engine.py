"""The event loop against closed forms and laws that no run may break."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.types import Phase
from simulator.errors import SimulationError
from simulator.measures import tpot_ms, ttft_ms
from simulator.run import EventKind, FleetEvent, NewPlan, Result, Status, simulate
from tests.simulator.fleets import engine, lane, performance, trace


def random_trace(seed: int, requests: int, rate_rps: float, longest: int = 300):
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1.0 / rate_rps, requests))
    return trace(
        arrival, rng.integers(1, longest, requests), rng.integers(1, longest // 2, requests)
    )


def check_laws(result: Result) -> None:
    """Every request ends once, with all its tokens, in order, and gives its memory back."""
    done = result.status == Status.DONE
    assert (result.generated[done] == result.trace.output_tokens[done]).all()
    arrival = result.trace.arrival_s[done] * 1e3
    assert (result.start_ms[done] >= arrival - 1e-6).all()
    assert (result.first_ms[done] > result.start_ms[done]).all()
    assert (result.finish_ms[done] >= result.first_ms[done]).all()
    assert (result.lane_held_blocks == 0).all()
    blocks = [n.kv_blocks for e in result.engines for s in e.stages for n in s.lanes]
    assert (result.lane_peak_blocks <= blocks).all()
    assert not (result.status == Status.UNFINISHED).any()


def test_one_request_takes_its_steps() -> None:
    result = simulate([engine(token_budget=40)], trace(np.array([1.0]), 100, 11), performance(5.0))
    assert result.iterations == 3 + 10  # chunks of 40, 40 and 20, the last with the first token
    assert ttft_ms(result)[0] == pytest.approx(15.0, rel=1e-6)
    assert tpot_ms(result)[0] == pytest.approx(5.0, rel=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_conserved(seed: int) -> None:
    """Without preemption every prompt token, and every output token but the last, is fed once."""
    requests = random_trace(seed, 400, 30.0)
    fleet = [engine("a"), engine("b", layers=(2, 1), micro_batches=2, most_requests=16)]
    result = simulate(fleet, requests, performance(2.0, 0.01))
    check_laws(result)
    assert (result.status == Status.DONE).all()
    assert result.preemptions.sum() == 0
    fed = requests.input_tokens + requests.output_tokens - 1
    assert result.scheduled_tokens == fed.sum()


def test_the_same_run_twice() -> None:
    fleet = [engine("a"), engine("b", step_requests=4, most_requests=4, weight=0.5)]
    once, again = (
        simulate(fleet, random_trace(7, 500, 40.0), performance(2.0, 0.01)) for _ in range(2)
    )
    for name in ("first_ms", "finish_ms", "engine", "preemptions", "lane_busy_ms"):
        assert np.array_equal(getattr(once, name), getattr(again, name))


def test_waiting_of_m_d_1() -> None:
    """Single-step requests, one by one: mean wait = rho D / (2 (1 - rho)), Pollaczek-Khinchin."""
    rng = np.random.default_rng(1)
    step_ms, load = 10.0, 0.7
    arrival = np.cumsum(rng.exponential(step_ms / 1e3 / load, 200_000))
    single = engine(step_requests=1, most_requests=1)
    result = simulate([single], trace(arrival, 100, 1), performance(step_ms))
    expected = load * step_ms / (2.0 * (1.0 - load))
    waits = result.start_ms - arrival * 1e3
    assert waits.mean() == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(
    ("layers", "micro_batches"), [((1, 1), 1), ((1, 1), 2), ((3, 1), 2), ((2, 1, 1), 2)]
)
def test_pipeline_reaches_its_cycle(layers: tuple[int, ...], micro_batches: int) -> None:
    """Decode at full load: b M requests step once per max(sum + hops, M x slowest stage)."""
    step_ms, hop_ms, b, outputs = 4.0, 0.5, 8, 100
    pipeline = engine(
        layers=layers,
        micro_batches=micro_batches,
        step_requests=b,
        most_requests=b * micro_batches,
        token_budget=b * micro_batches,
        hop_latency_ms=hop_ms,
    )
    result = simulate(
        [pipeline], trace(np.zeros(60 * b * micro_batches), 1, outputs), performance(step_ms)
    )
    check_laws(result)
    total = step_ms * sum(layers) + hop_ms * (len(layers) - 1)
    cycle_ms = max(total, micro_batches * step_ms * max(layers))
    expected = b * micro_batches * 1e3 / cycle_ms  # tokens/s
    assert result.generated.sum() / result.end_s == pytest.approx(expected, rel=0.02)


def test_full_pools_preempt_and_all_finish() -> None:
    """Twelve blocks of 16 tokens for eight requests that need eight each in the end."""
    small = engine(lanes=(lane(kv_blocks=12),), token_budget=512)
    result = simulate([small], trace(np.zeros(50), 20, 100), performance(2.0, 0.01))
    check_laws(result)
    assert (result.status == Status.DONE).all()
    assert result.preemptions.sum() > 0
    assert result.lane_peak_blocks[0] == 12
    fed = 50 * (20 + 99)
    assert result.scheduled_tokens > fed  # what was given up is computed again


def test_the_youngest_is_preempted() -> None:
    """Two requests that both fit at first: the second makes way and ends last."""
    small = engine(lanes=(lane(kv_blocks=10),), most_requests=2)
    result = simulate([small], trace(np.array([0.0, 0.001]), 16, 120), performance(2.0))
    assert list(result.preemptions) == [0, 1]
    assert result.finish_ms[0] < result.finish_ms[1]
    assert tpot_ms(result)[0] == pytest.approx(2.0, rel=1e-6)  # the older one never waits


def test_lanes_keep_their_own_pools() -> None:
    pair = (lane(kv_blocks=9, weight=1.0), lane(kv_blocks=40, weight=3.0))
    wide = engine(layers=(1, 1), lanes=pair, micro_batches=2, most_requests=16)
    result = simulate([wide], random_trace(3, 300, 50.0, longest=90), performance(1.0, 0.01))
    check_laws(result)
    assert (result.status == Status.DONE).all()
    assert (result.lane_peak_blocks > 0).all()


def test_requests_that_no_pool_holds_are_refused_alone() -> None:
    sizes = np.array([20, 5000, 20])
    small = engine(lanes=(lane(kv_blocks=20),))
    result = simulate([small], trace(np.array([0.0, 0.1, 0.2]), sizes, 10), performance(2.0))
    assert list(result.status) == [Status.DONE, Status.TOO_LONG, Status.DONE]


def test_models_without_engines_lose_their_requests() -> None:
    other = replace(engine(), weights={"another": 1.0})
    result = simulate([other], trace(np.arange(3.0), 10, 10), performance(2.0))
    assert (result.status == Status.LOST).all()


def test_weights_share_the_load() -> None:
    """At full load everywhere requests in flight go by weight."""
    fleet = [engine("a", weight=3.0), engine("b", weight=1.0)]
    result = simulate(fleet, trace(np.zeros(400), 10, 10), performance(2.0))
    assert np.bincount(result.engine).tolist() == [300, 100]


def test_prompts_move_to_decode_engines() -> None:
    """TTFT = prefill step + transfer + first decode step; decode gives every token."""
    fleet = [
        engine("p", Phase.PREFILL, kv_ms_per_token=0.1),
        engine("d", Phase.DECODE, kv_ms_per_token=0.2),
    ]
    result = simulate(fleet, trace(np.array([0.0]), 100, 10), performance(5.0))
    check_laws(result)
    assert ttft_ms(result)[0] == pytest.approx(5.0 + 100 * 0.2 + 5.0, rel=1e-6)
    assert result.scheduled_tokens == 100 + 10
    busy = simulate(fleet, random_trace(5, 500, 20.0), performance(5.0, 0.01))
    check_laws(busy)
    assert (busy.status == Status.DONE).all()


def test_a_dead_engine_returns_what_had_no_token() -> None:
    fleet = [engine("a"), engine("b")]
    dies = FleetEvent(2.0, EventKind.DIED, "a")
    requests = random_trace(11, 400, 60.0)
    result = simulate(fleet, requests, performance(5.0, 0.01), [dies])
    check_laws(result)
    failed = result.status == Status.FAILED
    assert 0 < failed.sum() <= 8  # at most those that ran
    assert (result.generated[failed] > 0).all()
    assert np.allclose(result.finish_ms[failed], 2000.0)
    assert (result.engine[requests.arrival_s > 2.0] == 1).all()
    assert (result.status[~failed] == Status.DONE).all()


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_death_between_prefill_and_decode(phase: Phase) -> None:
    """Prompts on their way start anew elsewhere."""
    fleet = [
        engine(f"{kind.value}{k}", kind, kv_ms_per_token=0.5)
        for kind in (Phase.PREFILL, Phase.DECODE)
        for k in range(2)
    ]
    dies = FleetEvent(3.0, EventKind.DIED, f"{phase.value}0")
    result = simulate(fleet, random_trace(13, 300, 25.0), performance(3.0, 0.01), [dies])
    check_laws(result)
    assert set(np.unique(result.status)) <= {Status.DONE, Status.FAILED}


def test_engines_start_and_drain() -> None:
    fleet = [engine("a"), engine("b")]
    happens = [
        FleetEvent(1.0, EventKind.STARTED, "b"),
        FleetEvent(2.0, EventKind.DRAINED, "a"),
    ]
    requests = random_trace(17, 300, 60.0)
    result = simulate(fleet, requests, performance(5.0, 0.01), happens)
    check_laws(result)
    assert (result.status == Status.DONE).all()
    assert (result.engine[requests.arrival_s < 1.0] == 0).all()
    assert (result.engine[requests.arrival_s > 2.0] == 1).all()
    assert {0, 1} == set(result.engine[(requests.arrival_s > 1.0) & (requests.arrival_s < 2.0)])


def test_a_new_plan_routes_anew() -> None:
    """From its time on requests go by its weights; engines that it leaves out take nothing."""
    fleet = [engine("a", weight=3.0), engine("b", weight=1.0), engine("c", weight=0.0)]
    plan = NewPlan(2.0, {"b": {"chat": 1.0}, "c": {"chat": 1.0}})
    requests = random_trace(23, 400, 60.0)
    result = simulate(fleet, requests, performance(5.0, 0.01), plans=[plan])
    check_laws(result)
    early, late = requests.arrival_s < 2.0, requests.arrival_s > 2.0
    assert set(result.engine[early]) == {0, 1}
    assert set(result.engine[late]) == {1, 2}
    with pytest.raises(SimulationError, match="'nobody'"):
        simulate(fleet, requests, performance(5.0), plans=[NewPlan(1.0, {"nobody": {}})])


def test_a_prompt_is_done_before_its_first_token_elsewhere() -> None:
    fleet = [
        engine("p", Phase.PREFILL, kv_ms_per_token=0.1),
        engine("d", Phase.DECODE, kv_ms_per_token=0.1),
    ]
    result = simulate(fleet, random_trace(29, 100, 5.0), performance(5.0))
    assert (result.handed_ms > result.start_ms).all()
    assert (result.first_ms > result.handed_ms).all()
    alone = simulate([engine()], random_trace(29, 100, 5.0), performance(5.0))
    assert (alone.handed_ms < 0).all()
