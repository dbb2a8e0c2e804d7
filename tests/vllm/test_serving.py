"""Plans served by vLLM: agents, controller and gateway as processes, requests over HTTP."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from executor.deployment import EngineSpec
from executor.gateway.app import REFRESH_S
from executor.stage_plan import Connector
from planner.types import Phase

from .site import MODEL, PROMPTS, Site, agents, replica, site_at, wait_for


def test_one_node_serves_and_streams(site: Site, alone: list[str]) -> None:
    assert all(len(text) > 0 for text in alone)
    assert alone == site.texts()  # greedy: the same again
    with site.client.stream(
        "POST", "/v1/chat/completions", timeout=120,
        json={"model": MODEL, "stream": True, "max_tokens": 8,
              "messages": [{"role": "user", "content": "fish"}]},
    ) as response:  # fmt: skip
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 2
    assert site.complete("x", model="other").status_code == 404


def test_openais_own_client_works_unchanged(site: Site, alone: list[str]) -> None:
    asked = [{"role": "user", "content": "fish"}]
    base = str(site.client.base_url).rstrip("/")
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        whole = client.chat.completions.create(
            model=MODEL, messages=asked, max_tokens=8, temperature=0.0
        )
        stream = client.chat.completions.create(
            model=MODEL, messages=asked, max_tokens=8, temperature=0.0, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        *chunks, last = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content
        assert last.usage == whole.usage and last.usage.completion_tokens == 8
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="x")


def test_an_uneven_pipeline_over_two_nodes_answers_token_for_token(
    site: Site, alone: list[str]
) -> None:
    site.deploy(replica("pipe", Phase.AGGREGATED, ("n1", 3), ("n2", 1)))
    site.wait("pipe")
    assert site.texts() == alone


def test_a_killed_stage_fails_fast_and_the_replica_serves_again_by_itself(
    site: Site, alone: list[str]
) -> None:
    """After the pipeline's test; the second node's engine is killed while a request runs."""
    assert site.routed() == {"pipe"}
    victims = [
        process
        for agent in agents(site.home)
        if "n2" in agent.cmdline()
        for process in agent.children()
    ]
    assert victims
    body = {"model": MODEL, "prompt": "fish", "max_tokens": 400, "ignore_eos": True, "stream": True}
    started = 0.0
    with site.client.stream("POST", "/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        for victim in victims:
            os.kill(victim.pid, signal.SIGKILL)
        started = time.monotonic()
        rest = [line for line in lines if line]
    assert time.monotonic() - started < 10.0
    assert rest[-1] != "data: [DONE]"
    assert '"code": "failed"' in rest[-1]
    assert wait_for(lambda: site.routed() == set(), 15)
    time.sleep(3 * REFRESH_S)
    assert site.complete("fish").status_code == 503
    down = time.monotonic()
    site.wait("pipe")
    assert time.monotonic() - down < 180.0
    assert site.texts() == alone


def test_a_change_to_another_replica_under_load_loses_no_request(
    site: Site, alone: list[str]
) -> None:
    """After the killed stage's test: the pipeline gives way to a replica on one node."""
    (pipe,) = site.replicas
    assert site.routed() == {"pipe"}
    newcomer = replica("next", Phase.AGGREGATED, ("n3", 4), engine="nixl")
    site.deploy(pipe, newcomer)
    site.wait("pipe", "next")
    leaving, stop = agents(site.home), threading.Event()
    with ThreadPoolExecutor(5) as pool:
        load = [pool.submit(complete_until, site, stop) for _ in range(4)]
        try:
            long = pool.submit(site.complete, "fish", max_tokens=480)
            time.sleep(2.0)
            site.deploy(newcomer)
            site.wait("next")
            answer = long.result(120)
            assert wait_for(lambda: len(agents(site.home)) == 1, 120), site.logs()
        finally:
            stop.set()
        answers = [one for worker in load for one in worker.result(120)]
    assert len(leaving) == 3
    assert len(answers) > 20
    assert {(one.status_code, tokens(one)) for one in answers} == {(200, 16)}
    assert (answer.status_code, tokens(answer)) == (200, 480)
    assert site.texts() == alone


def complete_until(site: Site, stop: threading.Event) -> list[httpx.Response]:
    answers = []
    while not stop.is_set():
        answers.append(site.complete(PROMPTS[len(answers) % len(PROMPTS)]))
    return answers


def tokens(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["completion_tokens"]) if answer.status_code == 200 else 0


@pytest.mark.parametrize("connector", [Connector.NIXL, Connector.FOLDER])
def test_prefill_and_decode_on_two_nodes(
    site: Site, alone: list[str], connector: Connector
) -> None:
    """What the decode side takes from outside it does not compute."""
    prefill = replica(f"prefill-{connector}", Phase.PREFILL, ("n4", 4), engine=connector)
    decode = replica(f"decode-{connector}", Phase.DECODE, ("n5", 4), core=1, engine=connector)
    site.deploy(prefill, decode)
    site.wait(prefill.id, decode.id)
    assert site.texts() == alone
    made, taken = site.prompt_tokens(prefill.id), site.prompt_tokens(decode.id)
    assert made["local_compute"] == sum(made.values()) == sum(taken.values())
    if connector is Connector.NIXL:
        assert taken["local_compute"] == 0
        assert taken["external_kv_transfer"] == sum(taken.values())
    else:  # whole blocks of 32 tokens, and never the last one
        assert taken["external_kv_transfer"] >= 96
        assert taken["local_compute"] < made["local_compute"]


def test_everything_ends_with_a_killed_controller(
    engines: dict[str, EngineSpec], tmp_path: Path
) -> None:
    """Agents and what they run end by themselves once their lease is over."""
    fake = (sys.executable, str(Path(__file__).parents[1] / "executor" / "fake_engine.py"))
    faked = {MODEL: engines[MODEL].model_copy(update={"command": fake})}
    with site_at(tmp_path, faked) as site:
        site.deploy(replica("r", Phase.AGGREGATED, ("n0", 4)))
        assert wait_for(lambda: site.routed() == {"r"}, 60), site.logs()
        running = [p for a in agents(site.home) for p in (a, *a.children(recursive=True))]
        assert len(running) >= 2
        site.controller.kill()
        gone, alive = psutil.wait_procs(running, timeout=90)
        assert not alive
        assert len(gone) == len(running)
