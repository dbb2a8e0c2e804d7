"""Runs in vLLM's environment: the same prompts through plain vLLM and through pipelines.

    python pipeline_case.py CASES.json OUT.json

Greedy, float32, batches of 24 prompts of different lengths, prompts in chunks. vLLM is imported
once: workers and heads of every case are forked from a process that has done nothing else yet.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2] / "executor" / "vllm_pipeline"
FORK = multiprocessing.get_context("fork")
KV_BYTES = 64 * 2**20
ENGINES: list[Any] = []  # one that is forgotten ends its workers
HANDED_OVER = {"do_remote_decode": True, "do_remote_prefill": False}


def main() -> None:
    """Every case; what went wrong stands in place of its result."""
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    from coral_vllm_pipeline.version import answer_for_vllm

    answer_for_vllm()
    import coral_vllm_pipeline.connector
    import coral_vllm_pipeline.scheduler
    import coral_vllm_pipeline.transport
    import coral_vllm_pipeline.worker  # noqa: F401
    import vllm.entrypoints.llm
    import vllm.model_executor.models.llama
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401

    found = {}
    for name, case in cases.items():
        print(f"== {name}", flush=True)
        found[name] = run(case)
    out.write_text(json.dumps(found))


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Of a pair of replicas: what the second says of prompts that the first computed."""
    if "prefill" not in case:
        return served(case, case.get("layout"), None)
    there, here = FORK.Pipe()
    prefill = FORK.Process(target=give, args=(case, there))
    prefill.start()
    try:
        given = here.recv()
        if "error" in given:
            return dict(given)
        found = served(case, case["decode"], lost(given["params"], case.get("lost", 0)))
        here.send("taken")
        return {**found, "left": here.recv()}
    finally:
        here.send("done")
        prefill.join()


def lost(params: list[Any], count: int) -> list[Any]:
    """The first ones name prompts that nobody has."""
    gone = [{**one, "coral_kv": {**one["coral_kv"], "request": "gone"}} for one in params[:count]]
    return gone + params[count:]


def give(case: dict[str, Any], pipe: Connection) -> None:
    """A prefill replica, which stays until its KV was taken, and is then left with some."""
    nodes = start_nodes(case["prefill"])
    try:
        with_errors(pipe, generate, case, case["prefill"], None)
        if pipe.recv() == "taken":
            with_errors(pipe, leave, ENGINES[-1])
            pipe.recv()
    finally:
        end(nodes)


def leave(engine: Any) -> dict[str, Any]:
    """Of every worker, how many prompts it keeps, and shares of its room that they take.

    When all were taken; of 24 that nobody takes; of 24 more with less room; and after their time.
    """
    found: dict[str, Any] = {"taken": engine.collective_rpc(kept), "tokens": [again(engine)]}
    found["untaken"] = engine.collective_rpc(kept)
    engine.collective_rpc(halve_room)
    found["tokens"].append(again(engine))
    found["full"] = engine.collective_rpc(kept)
    engine.collective_rpc(let_go_after, args=(0.5,))
    ends = time.monotonic() + 10.0
    while any(count for count, _ in engine.collective_rpc(kept)) and time.monotonic() < ends:
        time.sleep(0.1)
    found["old"] = engine.collective_rpc(kept)
    found["tokens"].append(again(engine))
    return found


def kept(worker: Any) -> tuple[int, float]:
    store = store_of_worker()
    return len(store.kept), bytes_kept(store) / store.room_bytes


def halve_room(worker: Any) -> None:
    """To a half of what it keeps."""
    store = store_of_worker()
    store.room_bytes = bytes_kept(store) // 2


def let_go_after(worker: Any, seconds: float) -> None:
    from coral_vllm_pipeline import handover

    handover.KEPT_S = seconds


def store_of_worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker.store


def bytes_kept(store: Any) -> int:
    return sum(one.bytes for one in store.kept.values())


def again(engine: Any) -> list[int]:
    """The first token of every prompt, computed for a decode replica that never comes."""
    from vllm import SamplingParams

    asked = SamplingParams(
        temperature=0.0, max_tokens=1, extra_args={"kv_transfer_params": HANDED_OVER}
    )
    return [one.outputs[0].token_ids[0] for one in engine.generate(prompts(), asked)]


def served(case: dict[str, Any], layout: str | None, params: list[Any] | None) -> dict[str, Any]:
    """By a head in a process of its own, and its workers."""
    nodes = start_nodes(layout) if layout else []
    there, here = FORK.Pipe()
    head = FORK.Process(target=with_errors, args=(there, generate, case, layout, params))
    head.start()
    there.close()
    try:
        return dict(here.recv())
    except EOFError:
        return {"error": f"the head ended: {head.exitcode}"}
    finally:
        head.join(10)
        head.kill()
        end(nodes)


def start_nodes(path: str) -> list[Any]:
    """As `coral_vllm_pipeline.node` does, forked."""
    from coral_vllm_pipeline.layout import ENVIRONMENT, read_layout
    from coral_vllm_pipeline.node import work

    layout, worlds, workers = read_layout(path), dict[tuple[int, int], str](), []
    os.environ[ENVIRONMENT] = layout.to_json()
    for s, n, rank in layout.places:
        world = worlds.setdefault((s, n), f"file:///tmp/coral-world-{uuid.uuid4().hex}")
        arguments = (layout, (s, n, rank), world, "", FORK.Event())
        workers.append(FORK.Process(target=work, args=arguments))
        workers[-1].start()
    return workers


def end(processes: list[Any]) -> None:
    for process in processes:
        process.kill()
        process.join()


def with_errors(pipe: Connection, work: Callable[..., dict[str, Any]], *given: Any) -> None:
    try:
        pipe.send(work(*given))
    except Exception:
        pipe.send({"error": traceback.format_exc()})


def generate(case: dict[str, Any], layout: str | None, params: list[Any] | None) -> dict[str, Any]:
    """Tokens of every prompt, how many of its own were known, and how often one was preempted."""
    from vllm import LLM, SamplingParams

    more: dict[str, Any] = {}
    if layout is not None:
        from coral_vllm_pipeline.layout import ENVIRONMENT, read_layout
        from coral_vllm_pipeline.serve import engine_options

        made = read_layout(layout)
        os.environ[ENVIRONMENT] = made.to_json()
        more = engine_options(len(made.stages))
    if "prefill" in case:
        more["kv_transfer_config"] = {
            "kv_connector": "PipelineConnector", "kv_role": "kv_both",
            "kv_connector_module_path": "coral_vllm_pipeline.connector",
        }  # fmt: skip
    engine = LLM(
        model=case["model"], dtype="float32", enforce_eager=True, max_model_len=128,
        kv_cache_memory_bytes=KV_BYTES, max_num_seqs=32, max_num_batched_tokens=64, block_size=32,
        enable_prefix_caching=case.get("prefix_caching", False), disable_log_stats=False, seed=0,
        **more,
    )  # fmt: skip
    ENGINES.append(engine)
    prefills = "prefill" in case and params is None
    tokens = 1 if prefills else case.get("max_tokens", 40)
    extra = [None] * 24 if params is None else [{"kv_transfer_params": one} for one in params]
    if prefills:
        extra = [{"kv_transfer_params": HANDED_OVER}] * 24
    settings = [
        SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, extra_args=one, logprobs=1
        )
        for one in extra
    ]
    answers = engine.generate(prompts(), settings)
    if "prefix_caching" in case:  # once more: now the prompts' blocks are known
        again = engine.generate(prompts(), settings)
        if [a.outputs[0].token_ids for a in again] != [a.outputs[0].token_ids for a in answers]:
            raise ValueError("other tokens from known blocks")
        answers = again
    counts = {(one.name, one.labels.get("source")): one.value for one in engine.get_metrics()
              if isinstance(getattr(one, "value", None), int)}  # fmt: skip
    return {
        "tokens": [list(one.outputs[0].token_ids) for one in answers],
        "logprobs": [
            [step[token].logprob for step, token in zip(x.logprobs, x.token_ids, strict=True)]
            for x in (one.outputs[0] for one in answers)
        ],
        "prompts": [len(one.prompt_token_ids) for one in answers],
        "cached": [one.num_cached_tokens for one in answers],
        "params": [one.kv_transfer_params for one in answers],
        "preemptions": counts["vllm:num_preemptions", None],
        "sources": {
            source: value
            for (name, source), value in counts.items()
            if source is not None and name == "vllm:prompt_tokens_by_source"
        },
    }


def prompts() -> list[Any]:
    return [
        {"prompt_token_ids": [(7 * k + 13 * n + n * n) % 500 + 1 for n in range(8 + 5 * k % 60)]}
        for k in range(24)
    ]


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine is in the head's process
    sys.path.insert(0, str(PACKAGE))
    main()
