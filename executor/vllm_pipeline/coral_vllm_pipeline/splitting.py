"""One step of the scheduler as the steps of the nodes, and their outputs as one again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .pools import Pools


def split_step(step: Any, pools: Pools, stage: int, nodes: int) -> list[Any]:
    """The `SchedulerOutput` of every node of a stage: its requests, with its own block numbers."""
    mine: list[set[str]] = [set() for _ in range(nodes)]
    for request in step.num_scheduled_tokens:
        mine[pools.node_of(request, stage)].add(request)
    return [_of_node(step, pools, stage, requests) for requests in mine]


def _of_node(step: Any, pools: Pools, stage: int, requests: set[str]) -> Any:
    def local(request: str, blocks: Any) -> Any:
        if blocks is None:
            return None
        return tuple(pools.last_blocks(request, stage, len(group)) for group in blocks)

    new = [
        replace(data, block_ids=local(data.req_id, data.block_ids))
        for data in step.scheduled_new_reqs
        if data.req_id in requests
    ]
    cached = step.scheduled_cached_reqs
    kept = [k for k, request in enumerate(cached.req_ids) if request in requests]

    def of(values: Sequence[Any]) -> list[Any]:
        return [values[k] for k in kept] if values else []

    names = of(cached.req_ids)
    blocks = [local(r, b) for r, b in zip(names, of(cached.new_block_ids), strict=True)]
    tokens = {r: n for r, n in step.num_scheduled_tokens.items() if r in requests}
    fresh = [b for data in new for group in data.block_ids for b in group]
    fresh += [b for groups in blocks if groups is not None for group in groups for b in group]
    handovers = getattr(step, "kv_connector_metadata", None)
    if handovers is not None:

        def held(request: str, count: int) -> list[int] | None:
            return pools.last_blocks(request, stage, count) if request in requests else None

        step = replace(step, kv_connector_metadata=handovers.of(held))
    return replace(
        step,
        scheduled_new_reqs=new,
        scheduled_cached_reqs=replace(
            cached,
            req_ids=names,
            resumed_req_ids={r for r in cached.resumed_req_ids if r in requests},
            new_token_ids=of(cached.new_token_ids),
            all_token_ids={r: t for r, t in cached.all_token_ids.items() if r in requests},
            new_block_ids=blocks,
            num_computed_tokens=of(cached.num_computed_tokens),
            num_output_tokens=of(cached.num_output_tokens),
        ),
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        new_block_ids_to_zero=None if step.new_block_ids_to_zero is None else fresh,
    )


def merge_outputs(outputs: Iterable[Any], order: Sequence[str]) -> Any:
    """One `ModelRunnerOutput` of those of the last stage's nodes, in the scheduler's order."""
    parts = [output for output in outputs if output is not None and output.req_ids]
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return None
    found: Mapping[str, list[int]] = {
        request: part.sampled_token_ids[k] if part.sampled_token_ids else []
        for part in parts
        for request, k in part.req_id_to_index.items()
    }
    names = [request for request in order if request in found]
    prompt: dict[str, Any] = {}
    for part in parts:
        prompt.update(part.prompt_logprobs_dict or {})
    return replace(
        parts[0],
        req_ids=names,
        req_id_to_index={request: k for k, request in enumerate(names)},
        sampled_token_ids=[found[request] for request in names],
        logprobs=_merge_logprobs(parts, names),
        prompt_logprobs_dict=prompt,
    )


def _merge_logprobs(parts: Sequence[Any], names: Sequence[str]) -> Any:
    """A row for every request, as wide as the widest; zeros where nobody asked for any."""
    rows = {r: (part.logprobs, k) for part in parts if part.logprobs is not None
            for r, k in part.req_id_to_index.items()}  # fmt: skip
    if not rows:
        return None
    kind = next(iter(rows.values()))[0]
    width = max(logprobs.logprob_token_ids.shape[1] for logprobs, _ in rows.values())
    ids = np.zeros((len(names), width), kind.logprob_token_ids.dtype)
    values = np.zeros((len(names), width), kind.logprobs.dtype)
    ranks = np.zeros(len(names), kind.sampled_token_ranks.dtype)
    for row, request in enumerate(names):
        if request in rows:
            logprobs, k = rows[request]
            mine = logprobs.logprob_token_ids.shape[1]
            ids[row, :mine] = logprobs.logprob_token_ids[k]
            values[row, :mine] = logprobs.logprobs[k]
            ranks[row] = logprobs.sampled_token_ranks[k]
    return type(kind)(ids, values, ranks)
