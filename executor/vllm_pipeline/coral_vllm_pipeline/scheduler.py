"""vLLM's scheduler, which asks the nodes' pools before it gives blocks."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from . import PipelineError
from .executor import pools_of
from .pools import Pools


class PipelineScheduler(Scheduler):  # type: ignore[misc]
    """A request without room on its nodes waits or is preempted, as vLLM does with its pool.

    With one node in every stage blocks have the same numbers everywhere, and vLLM's own pool is
    all there is.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.pools = pools_of().pools if pools_of().shared else None
        if self.pools is None:
            return
        if self.cache_config.enable_prefix_caching:
            raise PipelineError(
                "prefix caching needs one node in every stage; add --no-enable-prefix-caching"
            )
        self._ask_first(self.pools)

    def _ask_first(self, pools: Pools) -> None:
        """The nodes' pools, before vLLM's gives blocks."""
        manager = self.kv_cache_manager
        allocate = manager.allocate_slots

        def in_pools(request: Any, new_tokens: int, *rest: Any, **more: Any) -> Any:
            cached = more.get("num_new_computed_tokens", rest[0] if rest else 0)
            cached += more.get("num_external_computed_tokens", 0)
            tokens = request.num_computed_tokens + cached + new_tokens
            tokens += more.get("num_lookahead_tokens", 0)
            total = -(-tokens // self.block_size)
            if not pools.fits(request.request_id, total):
                return None
            blocks = allocate(request, new_tokens, *rest, **more)
            if blocks is not None:
                pools.reserve(request.request_id, total)
            return blocks

        manager.allocate_slots = in_pools

    def _free_request_blocks(self, request: Any) -> None:
        super()._free_request_blocks(request)
        if self.pools is not None:
            self.pools.release(request.request_id)
