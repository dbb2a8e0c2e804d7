"""The executor: splits a step over the nodes of every stage, and puts their outputs together.

Runs in the engine's process. Commands go to the workers in one order, so each computes the steps as
they were scheduled; as many are under way as the pipeline has stages. A worker that is gone fails
what is under way at once and ends the engine: whoever started the pipeline starts it anew.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any

import zmq
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from . import PipelineError
from .layout import HERE, Layout, read_layout
from .pools import Pools
from .splitting import merge_outputs, split_step
from .version import require_vllm
from .wire import Sockets, identity, pack, unpack

START_S = 600.0  # for all workers to say hello, on a busy machine
SILENT_S = 20.0  # of a worker, before it counts as lost; a closed connection is seen at once
POLL_MS = 200
CONNECT_S = 10.0


@dataclass
class Shared:
    """What executor and scheduler of one engine's process share."""

    executor: PipelineExecutor
    pools: Pools
    shared: bool  # some stage has several nodes


_shared: list[Shared] = []


def pools_of() -> Shared:
    """Of this process's engine."""
    if not _shared:
        raise PipelineError("no pipeline was started in this process")
    return _shared[-1]


class PipelineExecutor(Executor):  # type: ignore[misc]
    """Workers on nodes, by the layout in the environment."""

    supports_pp = True

    def _init_executor(self) -> None:
        require_vllm()
        if self.vllm_config.speculative_config is not None:
            raise PipelineError("pipelines over unequal nodes run no speculative decoding")
        self.layout: Layout = read_layout(HERE)
        self.names = [identity(*place) for place in self.layout.places]
        self.sockets = Sockets(self.layout.public_key, self.layout.secret_key)
        self.commands = self.sockets.bind(zmq.ROUTER, self.layout.commands)
        self.commands.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.failed: str = ""
        self.ended = False
        self.on_failure: Callable[[], None] | None = None
        self.pending: dict[int, tuple[Future[Any], dict[str, Any], set[str]]] = {}
        self.lock = threading.Lock()
        self.tickets, self.numbers = itertools.count(), itertools.count()
        self.seen: dict[str, float] = {}
        self.up = threading.Event()
        self.step: Any = None
        threading.Thread(target=self._listen, daemon=True).start()
        if not self.up.wait(START_S):
            missing = ", ".join(sorted(set(self.names) - self.seen.keys()))
            raise PipelineError(f"no word of {missing} after {START_S:.0f} s")
        self._ask("start", (self.vllm_config,)).result()

    # Set-up: one worker for every stage, as vLLM expects of a pipeline.

    def get_kv_cache_specs(self) -> list[Any]:
        """Of every stage its layers, all of one kind: the engine counts blocks, nodes have bytes.

        Tensor parallel sizes give nodes different heads; what each really has is put right in
        `initialize_from_config`. Layers that attend to a window alone keep all their KV here.
        Raises PipelineError: layers of several other kinds.
        """
        from vllm.v1.core.kv_cache_utils import unify_hybrid_kv_cache_specs

        self.specs = self._call("get_kv_cache_spec")
        every = {type(one).__name__: one for own in self.specs.values() for one in own.values()}
        for name, own in self.specs.items():
            joint = {**every, **own}  # a stage may have one kind alone
            unify_hybrid_kv_cache_specs(joint)
            self.specs[name] = {layer: joint[layer] for layer in own}
        kinds = {(type(x), x.block_size) for own in self.specs.values() for x in own.values()}
        if len(kinds) != 1:
            raise PipelineError("models whose layers have several kinds of KV are not split yet")
        shown = next(iter(self.specs[identity(0, 0, 0)].values()))
        self.shown = [
            dict.fromkeys(self.specs[identity(s, 0, 0)], shown)
            for s in range(len(self.layout.stages))
        ]
        return self.shown

    def get_supported_kv_cache_layouts(self) -> list[Any]:
        """Of every worker."""
        return list(self._call("get_supported_kv_cache_layouts").values())

    def determine_available_memory(self) -> list[int]:
        """Bytes of every stage that hold as many blocks as all its nodes together."""
        room = self._call("determine_available_memory")
        counts = []
        for s, stage in enumerate(self.layout.stages):
            counts.append(
                [
                    (
                        min(
                            self._blocks(identity(s, n, r), room)
                            for r in range(node.tensor_parallel_size)
                        ),
                        node.weight,
                    )
                    for n, node in enumerate(stage.nodes)
                ]
            )
        pools = Pools(counts)
        block = self.vllm_config.cache_config.block_size
        longest = pools.longest * block
        if self.model_config.max_model_len > longest:
            raise PipelineError(
                f"the smallest node holds {longest} tokens of KV and --max-model-len is "
                f"{self.model_config.max_model_len}; lower it, or give the node more memory"
            )
        _shared.append(Shared(self, pools, self.layout.is_shared))
        return [
            pools.common * sum(spec.page_size_bytes for spec in stage.values())
            for stage in self.shown
        ]

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        """Every node its own pool: the stage's configuration, scaled to its blocks and heads."""
        configs = {}
        for s, n, r in self.layout.places:
            blocks = pools_of().pools.stages[s][n].blocks
            tp = self.layout.stages[s].nodes[n].tensor_parallel_size
            own = self.specs[identity(s, n, r)]
            configs[identity(s, n, r)] = _of_node(
                self.vllm_config, kv_cache_configs[s], own, blocks, tp
            )
        self._ask_each(
            "call",
            {name: ("initialize_from_config", ([one],), {}) for name, one in configs.items()},
        ).result()

    def _block_bytes(self, name: str) -> int:
        return sum(spec.page_size_bytes for spec in self.specs[name].values())

    def _blocks(self, name: str, room: dict[str, int]) -> int:
        return int(room[name] // self._block_bytes(name))

    # Steps.

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Send a step to every node; what it gives comes with `sample_tokens`.

        One with nothing to do is not sent: while KV is fetched a thousand of them come a second.
        """
        self._raise_failure()
        if _has_work(scheduler_output):
            self._send_step(next(self.numbers), scheduler_output, pools_of())
        self.step = scheduler_output
        found: Future[Any] = Future()
        empty = not scheduler_output.total_num_scheduled_tokens
        found.set_result(EMPTY_MODEL_RUNNER_OUTPUT if empty else None)
        return found if non_block else found.result()

    def _send_step(self, number: int, step: Any, state: Shared) -> None:
        if state.shared:
            self._send_split(number, step, state.pools)
            return
        message = pack(("step", None, (number, step, None, None)))
        for name in self.names:  # block numbers are the scheduler's on every node
            self._send_packed(name, message)

    def _send_split(self, number: int, step: Any, pools: Pools) -> None:
        """Every node its requests, with its own block numbers, and its neighbours by request."""
        stages = self.layout.stages

        def nodes_of(there: int, requests: Iterable[str]) -> dict[str, int] | None:
            if not 0 <= there < len(stages) or len(stages[there].nodes) == 1:
                return None
            return {request: pools.node_of(request, there) for request in requests}

        for s, stage in enumerate(stages):
            for n, mine in enumerate(split_step(step, pools, s, len(stage.nodes))):
                requests = mine.num_scheduled_tokens
                sources, targets = nodes_of(s - 1, requests), nodes_of(s + 1, requests)
                message = pack(("step", None, (number, mine, sources, targets)))
                for r in range(stage.nodes[n].tensor_parallel_size):
                    self._send_packed(identity(s, n, r), message)
        for request in step.finished_req_ids:
            pools.forget(request)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """The tokens of the step that was sent last."""
        last = len(self.layout.stages) - 1
        order = list(self.step.num_scheduled_tokens)
        names = {identity(*place): (grammar_output,) for place in self.layout.places
                 if place[0] == last}  # fmt: skip
        found = _then(
            self._ask_each("sample", names),
            lambda outputs: merge_outputs([outputs[name] for name in sorted(outputs)], order),
        )
        return found if non_block else found.result()

    def pull(self, nodes: Sequence[int], asked: tuple[Any, ...]) -> Future[Any]:
        """Have a request's node of every stage fetch KV; by worker what went wrong, '' if nothing.

        Answers come while steps go on.
        """
        names = [identity(s, n, r) for s, n, r in self.layout.places if nodes[s] == n]
        return self._ask_each("pull", dict.fromkeys(names, asked))

    # Everything else.

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        **_: Any,
    ) -> Any:
        """Any method on every worker."""
        found = _then(
            self._ask("call", (method, args, kwargs or {})),
            lambda answers: [answers[name] for name in self.names],
        )
        return found if non_block else found.result(timeout)

    def check_health(self) -> None:
        """Raises PipelineError: a worker is lost."""
        self._raise_failure()

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        """For the engine, when a worker is lost."""
        if self.failed:
            callback()
        else:
            self.on_failure = callback

    def shutdown(self) -> None:
        """Tell the workers to end."""
        if self.ended:
            return
        self.ended = True
        for name in self.names:
            try:
                self._send(name, "shutdown", None, ())
            except (zmq.ZMQError, PipelineError):
                continue

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return False

    # Talking.

    def _call(self, method: str) -> dict[str, Any]:
        return dict(self._ask("call", (method, (), {})).result())

    def _ask(self, kind: str, value: tuple[Any, ...]) -> Future[Any]:
        return self._ask_each(kind, dict.fromkeys(self.names, value))

    def _ask_each(self, kind: str, values: dict[str, tuple[Any, ...]]) -> Future[Any]:
        """A future of all answers by worker."""
        found: Future[Any] = Future()
        ticket = next(self.tickets)
        with self.lock:
            if self.failed:
                found.set_exception(PipelineError(self.failed))
                return found
            self.pending[ticket] = (found, {}, set(values))
        for name, value in values.items():
            self._send(name, kind, ticket, value)
        return found

    def _send(self, name: str, kind: str, ticket: int | None, value: tuple[Any, ...]) -> None:
        self._send_packed(name, pack((kind, ticket, value)), CONNECT_S if kind == "start" else 0.0)

    def _send_packed(self, name: str, message: bytes, wait_s: float = 0.0) -> None:
        ends = time.monotonic() + wait_s
        while True:
            try:
                self.commands.send_multipart([name.encode(), message])
                return
            except zmq.ZMQError as error:  # said hello on one socket before it had the other
                if time.monotonic() >= ends:
                    self._fail(f"worker {name} is lost ({error})")
                    return
                time.sleep(0.05)

    def _listen(self) -> None:
        """Replies, in a thread of their own with a socket of its own."""
        replies = self.sockets.bind(zmq.PULL, self.layout.replies)
        watch = replies.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        poller = zmq.Poller()
        poller.register(replies, zmq.POLLIN)
        poller.register(watch, zmq.POLLIN)
        while not self.failed and not self.ended:
            try:
                ready = dict(poller.poll(POLL_MS))
            except zmq.ZMQError:
                return
            if replies in ready:
                self._take(*unpack(replies.recv()))
            if watch in ready:
                watch.recv_multipart()
                if not self.ended:
                    self._fail("a worker's connection is closed")
            late = [n for n, at in self.seen.items() if time.monotonic() - at > SILENT_S]
            if self.up.is_set() and late:
                self._fail(f"no word of worker {late[0]} for {SILENT_S:.0f} s")

    def _take(self, name: str, kind: str, ticket: int | None, value: Any) -> None:
        self.seen[name] = time.monotonic()
        if kind == "error":
            self._fail(f"worker {name}: {value}")
        if kind == "hello" or kind == "beat":
            if self.seen.keys() >= set(self.names):
                self.up.set()
            return
        with self.lock:
            if ticket not in self.pending:
                return
            future, answers, missing = self.pending[ticket]
            answers[name] = value
            missing.discard(name)
            if missing:
                return
            del self.pending[ticket]
        future.set_result(answers)

    def _fail(self, why: str) -> None:
        with self.lock:
            if self.failed:
                return
            self.failed = why
            waiting = [future for future, _, _ in self.pending.values()]
            self.pending.clear()
        for future in waiting:
            try:
                future.set_exception(PipelineError(why))
            except InvalidStateError:
                continue
        if self.on_failure is not None:
            self.on_failure()

    def _raise_failure(self) -> None:
        if self.failed:
            raise PipelineError(self.failed)


def _has_work(step: Any) -> bool:
    """For a worker: tokens, or something to forget."""
    return bool(
        step.total_num_scheduled_tokens or step.finished_req_ids or step.free_encoder_mm_hashes
    )


def _then(future: Future[Any], work: Callable[[Any], Any]) -> Future[Any]:
    """The future of what is made of another's result."""
    found: Future[Any] = Future()

    def done(of: Future[Any]) -> None:
        error = of.exception()
        try:
            if error is not None:
                found.set_exception(error)
            else:
                found.set_result(work(of.result()))
        except InvalidStateError:
            return
        except Exception as other:
            found.set_exception(other)

    future.add_done_callback(done)
    return found


def _of_node(config: Any, stage: Any, own: dict[str, Any], blocks: int, tp: int) -> Any:
    """A node's KV configuration: the stage's, with the node's own specs and number of blocks."""
    from vllm.v1.core import kv_cache_utils as utils

    groups = [
        dataclasses.replace(
            group,
            kv_cache_spec=type(own[group.layer_names[0]]).merge(
                [own[n] for n in group.layer_names]
            ),
        )
        for group in stage.kv_cache_groups
    ]
    room = blocks * utils._pool_bytes_per_block(config, groups)
    found = utils.get_kv_cache_config_from_groups(config, groups, room)
    found.kv_tp_replicas = utils.kv_cache_groups_tp_replicas(groups, tp, 1)
    for name in ("kv_cache_layout", "hash_block_size", "cache_hit_alignment_tokens"):
        setattr(found, name, getattr(stage, name))
    return found
