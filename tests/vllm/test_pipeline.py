"""Pipelines over unequal nodes with real vLLM on CPUs: equal to one process, token for token."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from coral_vllm_pipeline.layout import Layout, Node, Stage

from executor.pipeline_plan import derived_keys

from .conftest import VENV

PACKAGE = Path(__file__).parents[2] / "executor" / "vllm_pipeline"
PYTHON = str(VENV / "bin" / "python")
CASE = Path(__file__).with_name("pipeline_case.py")
HANDOVER = Path(__file__).with_name("handover_case.py")
ENVIRONMENT = {
    **os.environ, "PYTHONPATH": str(PACKAGE), "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # Forked workers are not bound to cores: more threads than cores wait for each other. And what
    # an eager engine compiles still (log probabilities) takes every process ten seconds.
    "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1",
}  # fmt: skip
BLOCK = 32 * 2**10  # bytes of one block of one of the tiny model's layers, on one rank


def ports(count: int) -> list[int]:
    """Probably free ones, twenty apart."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        first = free.getsockname()[1] % 10000 + 20000  # not among outgoing ones
    return [first + 20 * number for number in range(count)]


def node(port: int, tp: int = 1, core: int = 0, **more: object) -> Node:
    cores = tuple(str((core + rank) % 2) for rank in range(tp))
    return Node("127.0.0.1", port, tp, cores=cores, **more)  # type: ignore[arg-type]


def uneven(tp: int = 1, **more: object) -> Layout:
    """3 layers on one node, 1 on another of its own width."""
    p = ports(3)
    stages = (Stage(3, (node(p[1]),)), Stage(1, (node(p[2], tp, core=1),)))
    return Layout("127.0.0.1", p[0], stages, **more)  # type: ignore[arg-type]


def shared() -> Layout:
    """TP1 -> {TP1, TP1}, of which the second takes three times as many requests."""
    p = ports(4)
    last = (node(p[2], core=1), node(p[3], weight=3.0))
    return Layout("127.0.0.1", p[0], (Stage(3, (node(p[1]),)), Stage(1, last)))


def crossing() -> Layout:
    """{TP1, TP2} -> {TP1, TP1}, with so little KV that requests are preempted."""
    p = ports(5)
    first = Stage(3, (node(p[1], kv_bytes=3 * BLOCK * 12),
                      node(p[2], tp=2, weight=2.0, kv_bytes=3 * BLOCK // 2 * 14)))  # fmt: skip
    second = Stage(1, (node(p[3], core=1, kv_bytes=BLOCK * 11), node(p[4], kv_bytes=BLOCK * 13)))
    return Layout("127.0.0.1", p[0], (first, second))


def three(**more: object) -> Layout:
    p = ports(4)
    stages = tuple(Stage(n, (node(p[k + 1], core=k),)) for k, n in enumerate((1, 2, 1)))
    return Layout("127.0.0.1", p[0], stages, **more)  # type: ignore[arg-type]


def side_by_side() -> Layout:
    p = ports(3)
    return Layout("127.0.0.1", p[0], (Stage(4, (node(p[1]), node(p[2], core=1))),))


def alone(tp: int = 1, layers: int = 4, **more: object) -> Layout:
    p = ports(2)
    return Layout("127.0.0.1", p[0], (Stage(layers, (node(p[1], tp),)),), **more)  # type: ignore[arg-type]


def reversed_wide(**more: object) -> Layout:
    """1 layer, and 3 on TP2 or TP1: stages of several nodes, cut elsewhere than `uneven`."""
    p = ports(4)
    second = Stage(3, (node(p[2], 2), node(p[3], core=1)))
    return Layout("127.0.0.1", p[0], (Stage(1, (node(p[1]),)), second), **more)  # type: ignore[arg-type]


KEYS = derived_keys("secret", "pipeline")
OWN = {"public_key": KEYS.public, "secret_key": KEYS.secret}
KV = {"kv_public_key": KEYS.public, "kv_secret_key": KEYS.secret}
CASES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen3": {"model": "qwen3"},
    "qwen3_moe": {"model": "qwen3_moe"},
    "gemma3_text": {"model": "gemma3_text"},
    "uneven": {"layout": uneven(**OWN), "prefix_caching": True},
    "wider": {"layout": uneven(2), "model": "qwen3"},
    "shared": {"layout": shared(), "model": "qwen3_moe"},
    "windows": {"layout": shared(), "model": "gemma3_text"},
    "crossing": {"layout": crossing()},
    "three over gloo": {"layout": three(transport="gloo")},
    "one stage of two nodes": {"layout": side_by_side()},
    "3+1 to 1+3": {"prefill": uneven(**KV), "decode": reversed_wide(**KV)},
    "TP1 to TP2": {"prefill": alone(**KV), "decode": alone(2, **KV), "lost": 1},
}  # fmt: skip
HANDED_OVER = [name for name, case in CASES.items() if "prefill" in case]


@pytest.fixture(scope="module")
def found(
    tiny_model: Path, tiny_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict:
    """What every case says, all by one process that imports vLLM once."""
    folder, cases = tmp_path_factory.mktemp("cases"), {}
    models = {"llama": tiny_model, **tiny_models}
    for number, (name, case) in enumerate(CASES.items()):
        cases[name] = {**case, "model": str(models[str(case.get("model", "llama"))])}
        for key, layout in case.items():
            if isinstance(layout, Layout):
                path = folder / f"{number}-{key}.json"
                layout.write(path)
                cases[name][key] = str(path)
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [PYTHON, str(CASE), str(folder / "cases.json"), str(folder / "out.json")]
    with (folder / "log").open("w") as log:
        done = subprocess.run(command, env=ENVIRONMENT, stdout=log, stderr=log, timeout=850)
    assert done.returncode == 0, (folder / "log").read_text()[-3000:]
    answers = json.loads((folder / "out.json").read_text())
    for name, answer in answers.items():
        if "error" in answer:
            print(name, answer["error"], (folder / "log").read_text()[-5000:], sep="\n")
    return answers


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.keys() - {"model"}])
def test_equal_to_one_process_token_for_token(found: dict, name: str) -> None:
    mine, model = found[name], str(CASES[name].get("model", "llama"))
    plain = found[model]
    assert "error" not in mine, mine["error"]
    assert len(plain["tokens"]) == 24 and {len(tokens) for tokens in plain["tokens"]} == {40}
    assert len({tuple(tokens) for tokens in plain["tokens"]}) > 12  # not the same all over
    assert mine["tokens"] == plain["tokens"]
    for ours, theirs in zip(mine["logprobs"], plain["logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)
    assert (mine["preemptions"] > 0) == (name == "crossing")
    assert plain["preemptions"] == 0


@pytest.mark.parametrize("name", HANDED_OVER)
def test_decode_computes_the_last_token_of_a_prompt_alone(found: dict, name: str) -> None:
    """And all of a prompt whose KV nobody has."""
    sources, lengths = found[name]["sources"], found[name]["prompts"]
    lost = int(str(CASES[name].get("lost", 0)))
    assert sources["local_compute"] == sum(lengths[:lost]) + 24 - lost
    assert sources["external_kv_transfer"] == sum(lengths[lost:]) - (24 - lost) > 0
    assert sum(sources.values()) == sum(lengths)


@pytest.mark.parametrize("name", HANDED_OVER)
def test_kv_that_nobody_takes_is_let_go(found: dict, name: str) -> None:
    """With the room, and with time; the replica computes prompts as before."""
    left, plain = found[name]["left"], found["llama"]["tokens"]
    assert "error" not in left, left["error"]
    lost = int(str(CASES[name].get("lost", 0)))  # nobody asked for them by their own names
    assert {count for count, _ in left["taken"]} == {lost}
    assert {count for count, _ in left["untaken"]} == {24 + lost}
    assert all(0 < count < 24 and share <= 1.0 for count, share in left["full"])
    assert {count for count, _ in left["old"]} == {0}
    assert left["tokens"] == [[tokens[0] for tokens in plain]] * 3


def test_known_blocks_are_not_computed_again(found: dict) -> None:
    """Whole ones of 32 tokens, never the last token."""
    wanted = [(length - 1) // 32 * 32 for length in found["uneven"]["prompts"]]
    assert found["uneven"]["cached"] == wanted and sum(wanted) > 0


def test_who_asks_for_kv_too_early_holds_up_nobody() -> None:
    done = subprocess.run(
        [PYTHON, HANDOVER], env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "right\n", done.stderr
