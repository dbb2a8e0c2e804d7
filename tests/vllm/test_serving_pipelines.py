"""`engine: coral` in the whole product: agents start a pipeline's workers, the gateway answers."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from executor.gateway.app import REFRESH_S
from executor.routes import read_routes
from planner.types import Phase

from .site import LONG, MODEL, PROMPTS, Site, agents, replica, wait_for


@pytest.fixture
def pipe(site: Site, alone: list[str]) -> Site:
    """3 layers on one node and 1 on another, unless they serve already."""
    if site.routed() != {"coral"}:
        site.deploy(replica("coral", Phase.AGGREGATED, ("n6", 3), ("n7", 1), engine="coral"))
        site.wait("coral")
    return site


def streamed(site: Site, prompt: str) -> str:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 16, "temperature": 0.0,
            "ignore_eos": True, "stream": True}  # fmt: skip
    with site.client.stream("POST", "/v1/completions", json=body, timeout=120) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    return "".join(event["choices"][0]["text"] for event in events)


def test_an_unequal_replica_answers_as_one_process_does(pipe: Site, alone: list[str]) -> None:
    assert pipe.texts() == alone
    assert streamed(pipe, LONG) == alone[-1]
    (route,) = read_routes(pipe.files.routes).routes
    lines = httpx.get(f"{route.urls[0]}/metrics", trust_env=False).text.splitlines()
    hits = [float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith("vllm:prefix_cache_hits_tot")]
    assert sum(hits) >= 32  # of the long prompt, which came twice


def test_a_lost_node_fails_its_requests_at_once_and_the_replica_is_rebuilt(
    pipe: Site, alone: list[str]
) -> None:
    (agent,) = [agent for agent in agents(pipe.home) if "n7" in agent.cmdline()]
    body = {"model": MODEL, "prompt": "fish", "max_tokens": 480, "ignore_eos": True, "stream": True}
    with pipe.client.stream("POST", "/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        for process in agent.children(recursive=True):
            if process.is_running():
                os.kill(process.pid, signal.SIGKILL)
        lost = time.monotonic()
        rest = [line for line in lines if line]
    assert time.monotonic() - lost < 2.0
    assert '"code": "failed"' in rest[-1]
    assert wait_for(lambda: pipe.routed() == set(), 15)
    time.sleep(3 * REFRESH_S)
    assert pipe.complete("fish").status_code == 503
    pipe.wait("coral")
    assert pipe.texts() == alone


def test_what_runs_finishes_when_a_replica_is_to_go(pipe: Site) -> None:
    """Its nodes hear that they are to end when the head does, and wait for it."""
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(pipe.complete, "fish", max_tokens=480)
        time.sleep(0.3)
        pipe.deploy()
        answer = long.result(120)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 480
    assert wait_for(lambda: not agents(pipe.home), 90), pipe.logs()


def test_prefill_and_decode_are_cut_at_other_layers(site: Site, alone: list[str]) -> None:
    site.deploy(
        replica("gives", Phase.PREFILL, ("n8", 3), ("n9", 1), engine="coral"),
        replica("takes", Phase.DECODE, ("n10", 1), ("n11", 3), core=1, engine="coral"),
    )
    site.wait("gives", "takes")
    assert site.texts() == alone
    taken = site.prompt_tokens("takes")
    assert taken["local_compute"] == len(PROMPTS)  # the last token of each
    assert taken["external_kv_transfer"] == sum(taken.values()) - len(PROMPTS) > 0


def test_the_logs_name_nodes_and_head(site: Site) -> None:
    names = {path.name for path in Path(site.home / "agents").glob("*/coral-*.log")}
    assert names == {"coral-pipe0-head.log", "coral-pipe0-stage0-node0.log",
                     "coral-pipe0-stage1-node0.log"}  # fmt: skip
