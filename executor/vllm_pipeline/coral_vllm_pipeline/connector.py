"""vLLM's side of handing KV over: what a prefill replica keeps, what a decode replica takes.

The decode side's head sees a prompt that another replica computed, and has its workers fetch their
parts before the request is scheduled; what they have is copied into the request's blocks in its
first step. When some part does not come the prompt is computed here. The last token always is.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from . import PipelineError
from .executor import pools_of
from .handover import KEPT_S, USABLE_S, Giver, Kv, Store, fetch, room_bytes
from .layout import HERE, PLACE, Layout, read_layout
from .parts import Part, Source, heads_of_rank, sources_from_json, sources_to_json
from .wire import Sockets

GIVEN = "coral_kv"  # among the parameters that pass through the gateway


@dataclass(frozen=True)
class Slots:
    """Where tokens of a request lie."""

    blocks: Sequence[int]
    start: int
    end: int

    def range(self, block_size: int) -> tuple[int, int]:
        """The first of the blocks with these tokens, and the one after the last."""
        return self.start // block_size, -(-self.end // block_size)


@dataclass
class Handovers(KVConnectorMetadata):  # type: ignore[misc]
    """Of one step."""

    keeps: dict[str, Slots] = field(default_factory=dict)
    loads: dict[str, Slots] = field(default_factory=dict)

    def of(self, blocks_of: Callable[[str, int], list[int] | None]) -> Handovers:
        """Of one node: the same with its own block numbers; None: not its request."""

        def own(slots: Mapping[str, Slots]) -> dict[str, Slots]:
            found = {r: (blocks_of(r, len(one.blocks)), one) for r, one in slots.items()}
            return {r: Slots(b, one.start, one.end) for r, (b, one) in found.items() if b}

        return Handovers(own(self.keeps), own(self.loads))


class PipelineConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Both roles, of replicas that prefill and of ones that decode."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.layout = read_layout(HERE)
        self.layout.require_kv_keys()
        self.block_size = vllm_config.cache_config.block_size
        total = vllm_config.model_config.get_total_num_kv_heads()
        if role is KVConnectorRole.SCHEDULER:
            self.head = _Head(self.layout, total)
        else:
            self.worker = _Worker(self.layout, total, self.block_size)

    # Scheduler.

    def on_new_request(self, request: Any) -> None:
        self.head.requests[request.request_id] = request

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self.head.blocks_of = lambda request: list(kv_cache_manager.get_block_ids(request)[0])

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        ready = self.head.ready(request)
        return ready if ready is None else max(0, ready - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.head.used.add(request.request_id)
        if num_external_tokens > 0:
            end = request.num_prompt_tokens - 1
            self.head.loads[request.request_id] = (end - num_external_tokens, end)

    def build_connector_meta(self, scheduler_output: Any) -> Handovers:
        return self.head.step(scheduler_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self.head.finish(request)

    # Worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.model_executor.models.utils import extract_layer_index

        self.worker.own({extract_layer_index(name): kv for name, kv in kv_caches.items()})

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request, slots in self._get_connector_metadata().loads.items():
            self.worker.load(request, slots)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return

    def wait_for_save(self) -> None:
        for request, slots in self._get_connector_metadata().keeps.items():
            self.worker.keep(request, slots)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, None]:
        self.worker.forget(finished_req_ids)
        return None, None

    def pull(self, request: str, there: str, sources: Sequence[Source]) -> None:
        """Fetch this worker's part of a prompt, named `there` where it was computed.

        In the caller's thread. Raises PipelineError: it does not come.
        """
        self.worker.pull(request, there, sources)


class _Head:
    """What the scheduler knows."""

    def __init__(self, layout: Layout, heads: int) -> None:
        self.layout, self.heads = layout, heads
        self.requests: dict[str, Any] = {}
        self.blocks_of: Callable[[str], list[int]] = lambda request: []
        self.pulls: dict[str, tuple[Future[Any], float]] = {}  # and when they were asked for
        self.used: set[str] = set()  # were scheduled: their KV was taken, or computed here
        self.loads: dict[str, tuple[int, int]] = {}

    def ready(self, request: Any) -> int | None:
        """Tokens of the prompt that the workers have from elsewhere; None: they are fetching."""
        name, given = request.request_id, _given(request)
        if not given or name in self.used or given.get("tokens") != request.num_prompt_tokens:
            return 0
        if name not in self.pulls:
            try:
                sources = sources_from_json(given.get("sources"))
            except PipelineError:
                return 0
            pull = self._pull(name, str(given.get("request")), sources)
            self.pulls[name] = pull, time.monotonic()
        pull, asked_at = self.pulls[name]
        if not pull.done():
            return None
        if time.monotonic() - asked_at > USABLE_S:  # it waited so long that workers may drop it
            return 0
        whole = pull.exception() is None and not any(pull.result().values())
        return request.num_prompt_tokens - 1 if whole else 0

    def _pull(self, request: str, there: str, sources: Sequence[Source]) -> Future[Any]:
        state = pools_of()
        if state.shared:
            state.pools.pin(request)
        nodes = [
            state.pools.node_of(request, s) if state.shared else 0
            for s in range(len(self.layout.stages))
        ]
        return state.executor.pull(nodes, (request, there, sources))

    def step(self, output: Any) -> Handovers:
        """Prompts whose last chunk is computed in this step, and those whose KV came."""
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        found = Handovers()
        for name, count in output.num_scheduled_tokens.items():
            request = self.requests.get(name)
            if request is None or not (request.kv_transfer_params or {}).get("do_remote_decode"):
                continue
            tokens = request.num_prompt_tokens
            if computed[name] < tokens <= computed[name] + count:
                found.keeps[name] = Slots(self.blocks_of(name), 0, tokens)
        for name, (start, end) in self.loads.items():
            found.loads[name] = Slots(self.blocks_of(name), start, end)
        self.loads.clear()
        return found

    def finish(self, request: Any) -> dict[str, Any] | None:
        """Where a prompt's KV is, for the decode replica."""
        name = request.request_id
        self.requests.pop(name, None)
        self.pulls.pop(name, None)
        self.loads.pop(name, None)
        self.used.discard(name)
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_decode") or not request.num_output_tokens:
            return None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            GIVEN: {
                "request": name,
                "tokens": request.num_prompt_tokens,
                "sources": sources_to_json(self._sources(name)),
            },
        }

    def _sources(self, request: str) -> list[Source]:
        state, found = pools_of(), []
        for s in range(len(self.layout.stages)):
            n = state.pools.node_of(request, s) if state.shared else 0
            node = self.layout.stages[s].nodes[n]
            found += [
                Source(node.kv(rank), part_of(self.layout, (s, n, rank), self.heads))
                for rank in range(node.tensor_parallel_size)
            ]
        return found


class _Worker:
    """What one worker has and takes."""

    def __init__(self, layout: Layout, heads: int, block_size: int) -> None:
        stage, node, rank = (int(word) for word in os.environ[PLACE].split(","))
        mine = layout.stages[stage].nodes[node]
        tp = mine.tensor_parallel_size
        self.part = part_of(layout, (stage, node, rank), heads)
        self.replicas = max(1, tp // heads)
        self.block_size = block_size
        self.caches: dict[int, torch.Tensor] = {}
        self.sockets = Sockets(layout.kv_public_key, layout.kv_secret_key)
        self.came: dict[str, tuple[Kv, float]] = {}  # and when, for those that nobody loads
        self.lock = threading.Lock()
        self.store = Store(self.part, room_bytes(layout.workers_beside(mine)))
        self.giver = Giver(self.sockets, mine.kv(rank), self.store, self.tidy)

    def own(self, caches: dict[int, torch.Tensor]) -> None:
        """Every layer's blocks: (blocks, heads, tokens, content).

        Raises PipelineError: other layers or heads than the layout says.
        """
        heads = {cache.shape[1] for cache in caches.values()}
        if tuple(sorted(caches)) != self.part.layers or heads != {self.part.heads}:
            raise PipelineError(
                f"this worker has KV of layers {sorted(caches)} with {sorted(heads)} heads, not of "
                f"{list(self.part.layers)} with {self.part.heads}; such models are not split yet"
            )
        self.caches = caches

    def keep(self, request: str, slots: Slots) -> None:
        kv = {}
        for layer, cache in self.caches.items():
            rows = cache[self._places(slots, cache)]  # (blocks, heads, tokens, content)
            kv[layer] = rows.permute(1, 0, 2, 3).contiguous().cpu()
        self.store.keep(request, kv)

    def _places(self, slots: Slots, cache: torch.Tensor) -> torch.Tensor:
        """Its blocks as the cache has them: the attention's may be smaller than the scheduler's."""
        first, end = slots.range(self.block_size)
        ratio = self.block_size // cache.shape[2]
        numbers = [block * ratio + k for block in slots.blocks[first:end] for k in range(ratio)]
        return torch.tensor(numbers, device=cache.device)

    def pull(self, request: str, there: str, sources: Sequence[Source]) -> None:
        kv = fetch(self.sockets, there, self.part, self.replicas, sources)
        for layer, cache in self.caches.items():
            if kv[layer].shape[2:] != cache.shape[2:] or kv[layer].dtype != cache.dtype:
                raise PipelineError("the other side has blocks of another size or type")
        with self.lock:
            self.came[request] = kv, time.monotonic()

    def tidy(self) -> None:
        """Drop what came and nobody loads."""
        now = time.monotonic()
        with self.lock:
            self.came = {r: one for r, one in self.came.items() if now - one[1] < KEPT_S}

    def load(self, request: str, slots: Slots) -> None:
        with self.lock:
            kv, _ = self.came.pop(request)
        first, end = slots.range(self.block_size)
        for layer, cache in self.caches.items():
            ratio = self.block_size // cache.shape[2]
            rows = kv[layer][:, first * ratio : end * ratio].permute(1, 0, 2, 3)
            cache[self._places(slots, cache)] = rows.to(cache.device)

    def forget(self, requests: set[str]) -> None:
        with self.lock:
            for request in requests:
                self.came.pop(request, None)


def part_of(layout: Layout, place: tuple[int, int, int], heads: int) -> Part:
    """Layers and heads of a worker."""
    stage, node, rank = place
    first = sum(one.layers for one in layout.stages[:stage])
    tp = layout.stages[stage].nodes[node].tensor_parallel_size
    layers = tuple(range(first, first + layout.stages[stage].layers))
    return Part(layers, *heads_of_rank(heads, tp, rank))


def _given(request: Any) -> Mapping[str, Any]:
    found = (request.kv_transfer_params or {}).get(GIVEN)
    return found if isinstance(found, dict) else {}
