"""One worker: a vLLM worker of a node's own world, whose pipeline neighbours are on other nodes.

To vLLM it is rank r of a node with one pipeline stage; only the place in the pipeline is put right
before the model is built, so that it has its layers, embedding or head. Hidden states come and go
request by request, since a node's batch is not its neighbour's.
"""

from __future__ import annotations

import copy
import os
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import zmq

from .layout import Layout
from .version import answer_for_vllm
from .wire import Rows, Sockets, identity, pack, pack_rows, unpack, unpack_rows

BEAT_S = 0.5


class Place:
    """The place in the pipeline, as vLLM's pipeline group tells it; the rest is that group's."""

    def __init__(self, group: Any, stage: int, stages: int) -> None:
        self._group = group
        self.rank_in_group, self.world_size = stage, stages
        self.is_first_rank, self.is_last_rank = stage == 0, stage == stages - 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


class PipelineWorker:
    """Does what the head says, until it is gone."""

    def __init__(self, layout: Layout, place: tuple[int, int, int], world: str) -> None:
        stage, node, rank = place
        self.layout, self.stage, self.rank, self.world = layout, stage, rank, world
        self.name = identity(stage, node, rank)
        self.mine = layout.stages[stage].nodes[node]
        self.is_last = stage == len(layout.stages) - 1
        self.sockets = Sockets(layout)
        self.commands = self.sockets.connect(zmq.DEALER, layout.commands, self.name)
        self.replies = self.sockets.connect(zmq.PUSH, layout.replies)
        self.hidden = self.sockets.bind(zmq.PULL, self.mine.hidden(rank)) if stage else None
        self.next: dict[int, list[zmq.Socket[bytes]]] = {}
        self.waiting: dict[int, Rows] = defaultdict(dict)  # rows that came, by step
        self.worker: Any = None

    def run(self) -> None:
        """Commands in their order."""
        threading.Thread(target=self._beat, daemon=True).start()
        self._reply("hello", None, answer_for_vllm())
        while True:
            kind, ticket, value = unpack(self.commands.recv())
            if kind == "shutdown":
                return
            try:
                answer = getattr(self, f"do_{kind}")(*value)
            except Exception:
                self._reply("error", ticket, traceback.format_exc())
                continue
            if ticket is not None:
                self._reply("answer", ticket, answer)

    # Commands.

    def do_start(self, config: Any) -> None:
        """Build the vLLM worker and load its layers."""
        os.environ["VLLM_PP_LAYER_PARTITION"] = self.layout.partition
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        self._take_place()
        mine = self._config(config)
        worker = WorkerWrapperBase(rpc_rank=0)
        worker.init_worker(
            all_kwargs=[
                {
                    "vllm_config": mine,
                    "local_rank": self.rank,
                    "rank": self.rank,
                    "distributed_init_method": self.world,
                    "is_driver_worker": self.rank == 0,
                    "shared_worker_lock": threading.Lock(),
                }
            ]
        )
        worker.init_device()
        worker.load_model()
        from vllm.platforms import current_platform

        current_platform.update_block_size_for_backend(mine)
        self.worker = worker
        self.runner = worker.worker.model_runner
        if self.stage:
            self.runner.sync_and_gather_intermediate_tensors = self._gather

    def do_call(self, method: str | Callable[..., Any], arguments: tuple[Any, ...],
                named: dict[str, Any]) -> Any:  # fmt: skip
        """Any method of the vLLM worker."""
        from vllm.v1.serial_utils import run_method

        return run_method(self.worker, method, arguments, named)

    def do_step(self, number: int, step: Any, targets: dict[str, int]) -> Any:
        """Compute one step; `targets` are the next stage's nodes by request.

        The last stage answers when it has sampled (do_sample).
        """
        self.number, self.step = number, step
        output = self.runner.execute_model(step, None if self.stage == 0 else self)
        if not step.total_num_scheduled_tokens:
            return
        if not self.is_last:
            self._send(output.tensors, targets)
            self.runner.sample_tokens(None)

    def do_sample(self, grammar: Any) -> Any:
        """The tokens of the step that was computed last."""
        if not self.step.total_num_scheduled_tokens:
            return None
        output = self.runner.sample_tokens(grammar)
        if hasattr(output, "get_output"):
            output = output.get_output()
        return output if self.rank == 0 else None

    # Hidden states.

    def items(self) -> Any:
        """Stands for the intermediate tensors, which are gathered when the batch is known."""
        return ()

    def _gather(self, tokens: int, given: Any, sync: bool) -> Any:
        """In the order of this worker's own batch."""
        from vllm.sequence import IntermediateTensors

        runner = self.runner
        if (
            runner.intermediate_tensors is None
        ):  # eager and with a given KV size: no warm-up made it
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
            )
        buffers = runner.intermediate_tensors
        if given is self:
            names = list(self.runner.input_batch.req_ids)
            rows, at = self._rows(set(names)), 0
            for request in names:
                for name, tensor in rows[request].items():
                    buffers[name][at : at + tensor.shape[0]].copy_(tensor)
                at += next(iter(rows[request].values())).shape[0]
        return IntermediateTensors({k: v[:tokens] for k, v in buffers.items()})

    def _rows(self, requests: set[str]) -> Rows:
        """Of this step, waited for."""
        mine = self.waiting[self.number]
        while not requests <= mine.keys():
            assert self.hidden is not None
            number, rows = unpack_rows(self.hidden.recv_multipart())
            self.waiting[number].update(rows)
        return self.waiting.pop(self.number)

    def _send(self, tensors: dict[str, Any], targets: dict[str, int]) -> None:
        if self.rank:  # every rank has the same
            return
        parts: dict[int, Rows] = defaultdict(dict)
        at = 0
        for request in self.runner.input_batch.req_ids:
            count = self.step.num_scheduled_tokens[request]
            parts[targets[request]][request] = {
                name: tensor[at : at + count] for name, tensor in tensors.items()
            }
            at += count
        for node, rows in parts.items():
            message = pack_rows(self.number, rows)
            for socket in self._to(node):
                socket.send_multipart(message)

    def _to(self, node: int) -> list[zmq.Socket[bytes]]:
        """Every worker of a node of the next stage."""
        if node not in self.next:
            there = self.layout.stages[self.stage + 1].nodes[node]
            self.next[node] = [
                self.sockets.connect(zmq.PUSH, there.hidden(rank))
                for rank in range(there.tensor_parallel_size)
            ]
        return self.next[node]

    # vLLM.

    def _config(self, config: Any) -> Any:
        """The engine's configuration as this node has it: one stage, its own parallel size."""
        mine = copy.deepcopy(config)
        parallel = mine.parallel_config
        parallel.pipeline_parallel_size = 1
        parallel.tensor_parallel_size = self.mine.tensor_parallel_size
        parallel.world_size = self.mine.tensor_parallel_size
        parallel.rank = self.rank
        parallel.distributed_executor_backend = "mp"
        if self.mine.kv_bytes:
            mine.cache_config.kv_cache_memory_bytes = self.mine.kv_bytes
        return mine

    def _take_place(self) -> None:
        """Put the place in the pipeline right as soon as the node's own world is made."""
        from vllm.distributed import parallel_state
        from vllm.v1.worker import cpu_worker, gpu_worker

        made = gpu_worker.init_worker_distributed_environment

        def make(*arguments: Any, **named: Any) -> None:
            made(*arguments, **named)
            parallel_state._PP = Place(parallel_state._PP, self.stage, len(self.layout.stages))

        gpu_worker.init_worker_distributed_environment = make
        cpu_worker.init_worker_distributed_environment = make

    def _reply(self, kind: str, ticket: int | None, value: Any) -> None:
        self.replies.send(pack((self.name, kind, ticket, value)))

    def _beat(self) -> None:
        """That this process lives, from a socket of this thread."""
        socket = self.sockets.connect(zmq.PUSH, self.layout.replies)
        while True:
            socket.send(pack((self.name, "beat", None, None)))
            time.sleep(BEAT_S)
