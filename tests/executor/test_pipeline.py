"""Pipelines over unequal nodes, the parts that need no vLLM: layouts, pools, splitting."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from coral_vllm_pipeline import PipelineError
from coral_vllm_pipeline.layout import Layout, Node, Stage, read_layout
from coral_vllm_pipeline.pools import Pools
from coral_vllm_pipeline.splitting import merge_outputs, split_step
from hypothesis import given, settings
from hypothesis import strategies as st


def node(port: int = 7000, tp: int = 1, **more: object) -> Node:
    return Node("127.0.0.1", port, tp, **more)  # type: ignore[arg-type]


def test_a_layout_comes_back_from_its_file(tmp_path: Path) -> None:
    made = Layout(
        "127.0.0.1", 6000,
        (Stage(3, (node(cores=("0",)), node(7100, 2, weight=2.0))), Stage(1, (node(7200),))),
    )  # fmt: skip
    (tmp_path / "layout.json").touch(mode=0o644)
    made.write(tmp_path / "layout.json")
    assert (tmp_path / "layout.json").stat().st_mode & 0o777 == 0o600
    assert read_layout(tmp_path / "layout.json") == made
    assert made.partition == "3,1"
    assert made.places == [(0, 0, 0), (0, 1, 0), (0, 1, 1), (1, 0, 0)]
    assert len({made.stages[0].nodes[1].hidden(r) for r in range(2)}) == 2


@pytest.mark.parametrize(
    ("control", "stages", "message"),
    [
        ("127.0.0.1", (), "one stage at least"),
        ("127.0.0.1", (Stage(4, (node(),)), Stage(0, (node(),))), "stage 1 has no layers"),
        ("127.0.0.1", (Stage(4, (node(),)), Stage(1, ())), "or no nodes"),
        ("127.0.0.1", (Stage(4, (node(tp=0),)), Stage(1, (node(),))), "parallel size 0"),
        ("127.0.0.1", (Stage(4, (node(weight=0.0),)), Stage(1, (node(),))), "weight 0"),
        ("10.0.0.1", (Stage(4, (node(),)), Stage(1, (node(),))), "needs keys"),
        ("127.0.0.1", (Stage(4, (Node("10.0.0.2", 7000, 1),)),), "needs keys"),
    ],
)
def test_layouts_that_cannot_be_are_refused(
    control: str, stages: tuple[Stage, ...], message: str
) -> None:
    with pytest.raises(PipelineError, match=message):
        Layout(control, 6000, stages)


def test_kv_leaves_a_machine_with_keys_alone() -> None:
    apart = Layout("10.0.0.1", 6000, (Stage(4, (Node("10.0.0.2", 7000, 1),)),), "key", "secret")
    with pytest.raises(PipelineError, match="need kv_public_key and kv_secret_key"):
        apart.require_kv_keys()
    replace(apart, kv_public_key="key", kv_secret_key="secret").require_kv_keys()
    Layout("127.0.0.1", 6000, (Stage(4, (node(),)),)).require_kv_keys()


def test_a_file_that_is_no_layout_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"control": 1}')
    with pytest.raises(PipelineError, match=r"a.json is no layout"):
        read_layout(tmp_path / "a.json")


def test_requests_go_where_the_share_is_least_used_and_stay() -> None:
    pools = Pools([[(100, 1.0)], [(100, 1.0), (100, 3.0)]])
    for number in range(8):
        assert pools.fits(f"r{number}", 2)
        pools.reserve(f"r{number}", 2)
    nodes = [pools.node_of(f"r{number}", 1) for number in range(8)]
    assert (nodes.count(0), nodes.count(1)) == (2, 6)
    pools.release("r0")
    pools.reserve("r0", 5)
    assert pools.node_of("r0", 1) == nodes[0]
    for number in range(8):
        pools.forget(f"r{number}")
    assert all(len(pool.free) == 99 for stage in pools.stages for pool in stage)
    assert not pools.pins


def test_the_scheduler_may_count_on_the_smallest_stage() -> None:
    pools = Pools([[(50, 1.0)], [(30, 1.0), (25, 1.0)]])
    assert pools.common == 50
    assert pools.longest == 24
    assert Pools([[(50, 1.0)], [(20, 1.0), (10, 1.0)]]).common == 29


@settings(max_examples=60)
@given(st.integers(0, 10_000))
def test_blocks_are_never_shared_and_never_lost(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [[(rng.randint(6, 20), rng.random() + 0.1) for _ in range(rng.randint(1, 3))]
             for _ in range(rng.randint(2, 3))]  # fmt: skip
    pools, totals = Pools(sizes), dict[str, int]()
    for _ in range(80):
        name = f"r{rng.randrange(8)}"
        match rng.choice(["grow", "grow", "release", "forget"]):
            case "grow":
                total = totals.get(name, 0) + rng.randint(1, 3)
                if pools.fits(name, total):
                    pools.reserve(name, total)
                    totals[name] = total
            case "release":
                pools.release(name)
                totals.pop(name, None)
            case _:
                pools.forget(name)
                totals.pop(name, None)
        for stage, counts in zip(pools.stages, sizes, strict=True):
            for pool, (count, _) in zip(stage, counts, strict=True):
                used = [b for blocks in pool.held.values() for b in blocks]
                assert sorted(used + pool.free) == list(range(1, count))
        for request, total in totals.items():
            for stage in range(len(sizes)):
                assert len(pools.last_blocks(request, stage, total)) == total


@dataclass
class New:
    """As vLLM's NewRequestData, the fields that matter."""

    req_id: str
    block_ids: tuple[list[int], ...]


@dataclass
class Cached:
    req_ids: list[str]
    resumed_req_ids: set[str]
    new_token_ids: list[list[int]]
    all_token_ids: dict[str, list[int]]
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]
    num_output_tokens: list[int]


@dataclass
class Step:
    scheduled_new_reqs: list[New]
    scheduled_cached_reqs: Cached
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    new_block_ids_to_zero: list[int] | None = None
    finished_req_ids: set[str] = field(default_factory=set)


def test_a_step_is_split_by_pins_with_each_nodes_own_blocks() -> None:
    pools = Pools([[(50, 1.0)], [(50, 1.0), (50, 1.0)]])
    for name, total in (("a", 2), ("b", 1), ("c", 3)):
        pools.reserve(name, total)
    pools.reserve("a", 3)
    step = Step(
        [New("b", ([7],)), New("c", ([8, 9, 10],))],
        Cached(["a"], set(), [[5]], {}, [([11],)], [32], [1]),
        {"a": 1, "b": 16, "c": 40},
        57,
        [7, 8, 9, 10, 11],
    )
    (whole,) = split_step(step, pools, 0, 1)
    assert whole.total_num_scheduled_tokens == 57
    first, second = split_step(step, pools, 1, 2)
    parts = {name: part for part in (first, second) for name in part.num_scheduled_tokens}
    assert set(parts) == {"a", "b", "c"}
    assert first.total_num_scheduled_tokens + second.total_num_scheduled_tokens == 57
    of_a = parts["a"].scheduled_cached_reqs
    assert of_a.new_block_ids[of_a.req_ids.index("a")] == (pools.last_blocks("a", 1, 1),)
    assert of_a.new_token_ids == [[5]]
    other = second if parts["a"] is first else first
    assert other.scheduled_cached_reqs.req_ids == []
    (of_c,) = [new for new in parts["c"].scheduled_new_reqs if new.req_id == "c"]
    assert of_c.block_ids == (pools.last_blocks("c", 1, 3),)
    for part in (first, second):
        mine = [b for new in part.scheduled_new_reqs for b in new.block_ids[0]]
        mine += [b for ids in part.scheduled_cached_reqs.new_block_ids for b in ids[0]]
        assert part.new_block_ids_to_zero == mine
    assert replace(step).num_scheduled_tokens == {"a": 1, "b": 16, "c": 40}  # untouched


@dataclass
class Output:
    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]]
    logprobs: object = None
    prompt_logprobs_dict: dict[str, object] = field(default_factory=dict)


def output(**tokens: int) -> Output:
    names = list(tokens)
    return Output(names, {n: k for k, n in enumerate(names)}, [[tokens[n]] for n in names])


class Logprobs(NamedTuple):
    """As vLLM's LogprobsLists."""

    logprob_token_ids: np.ndarray
    logprobs: np.ndarray
    sampled_token_ranks: np.ndarray
    cu_num_generated_tokens: list[int] | None = None


def test_log_probabilities_stay_with_their_requests() -> None:
    first, second, third = output(c=3, a=1), output(b=2), output(d=4)
    first.logprobs = Logprobs(np.array([[3], [1]]), np.array([[-0.3], [-0.1]]), np.array([7, 5]))
    second.logprobs = Logprobs(np.array([[2, 9]]), np.array([[-0.2, -0.9]]), np.array([6]))
    found = merge_outputs([first, second, third], ["a", "b", "c", "d"]).logprobs
    assert found.logprob_token_ids.tolist() == [[1, 0], [2, 9], [3, 0], [0, 0]]
    assert found.logprobs[:, 0].tolist() == [-0.1, -0.2, -0.3, 0.0]
    assert found.sampled_token_ranks.tolist() == [5, 6, 7, 0]


def test_outputs_come_together_in_the_schedulers_order() -> None:
    merged = merge_outputs([output(c=3, a=1), None, output(b=2)], ["a", "b", "c"])
    assert merged.req_ids == ["a", "b", "c"]
    assert merged.sampled_token_ids == [[1], [2], [3]]
    assert merged.req_id_to_index == {"a": 0, "b": 1, "c": 2}
    assert merged.logprobs is None
    assert merge_outputs([None, output()], ["a"]) is None
    one = output(a=1)
    assert merge_outputs([one, output()], ["a"]) is one
