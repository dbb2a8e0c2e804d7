"""One worker: a vLLM worker of a node's own world, whose pipeline neighbours are on other nodes.

To vLLM it is rank r of a node with one pipeline stage; only the place in the pipeline is put right
before the model is built, so that it has its layers, embedding or head. Hidden states come and go
request by request, since a node's batch is not its neighbour's (transport.py).
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zmq

from . import PipelineError
from .layout import Layout
from .version import answer_for_vllm
from .wire import Sockets, identity, pack, unpack

BEAT_S = 0.5
HEAD_GONE = 3  # exit code
PULLS = 4  # at a time

log = logging.getLogger(__name__)

Nodes = Mapping[str, int] | None  # of a neighbouring stage by request; None: it has one


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

    def __init__(
        self,
        layout: Layout,
        place: tuple[int, int, int],
        world: str,
        model: str = "",
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        self.layout, self.place, self.world, self.model = layout, place, world, model
        self.stage, node, self.rank = place
        self.name, self.begun = identity(*place), begun
        self.mine = layout.stages[self.stage].nodes[node]
        self.is_last = self.stage == len(layout.stages) - 1
        self.sockets = Sockets(layout.public_key, layout.secret_key)
        self.commands = self.sockets.connect(zmq.DEALER, layout.commands, self.name)
        self.watch = self.commands.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.replies = self.sockets.connect(zmq.PUSH, layout.replies)
        self.worker: Any = None
        self.pulls = ThreadPoolExecutor(PULLS)
        self.own = threading.local()  # of each of its threads: a socket

    def run(self) -> None:
        """Commands in their order."""
        threading.Thread(target=self._beat, daemon=True).start()
        threading.Thread(target=self._end_with_head, daemon=True).start()
        version = answer_for_vllm()
        from .transport import make_transport

        # Before the head knows of this worker: neighbours find it when the first step comes.
        self.transport = make_transport(self.layout, self.place)
        self._reply("hello", None, version)
        while True:
            kind, ticket, value = unpack(self.commands.recv())
            if kind == "shutdown":
                return
            if kind == "pull":
                self.pulls.submit(self._pull, ticket, *value)
                continue
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
        self.begun()
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

    def do_step(self, number: int, step: Any, sources: Nodes, targets: Nodes) -> None:
        """Compute one step; the neighbouring stages' nodes by request.

        The last stage answers when it has sampled (do_sample).
        """
        self.number, self.step, self.sources = number, step, sources
        output = self.runner.execute_model(step, None if self.stage == 0 else self)
        if not step.total_num_scheduled_tokens:
            return
        if not self.is_last:
            if self.rank == 0:  # every rank has the same
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

    def _pull(self, ticket: int, *asked: Any) -> None:
        """KV of a prompt that another replica computed; answered from this thread."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        why = ""
        try:
            get_kv_transfer_group().pull(*asked)
        except Exception as error:  # whatever it is: the prompt is computed here
            why = str(error) or repr(error)
            log.warning("KV of request %s does not come: %s", asked[0], why)
        if not hasattr(self.own, "replies"):
            self.own.replies = self.sockets.connect(zmq.PUSH, self.layout.replies)
        self.own.replies.send(pack((self.name, "answer", ticket, why)))

    # Hidden states.

    def items(self) -> Any:
        """Stands for the intermediate tensors, which are gathered when the batch is known."""
        return ()

    def _gather(self, tokens: int, given: Any, sync: bool) -> Any:
        """In the order of this worker's own batch."""
        from vllm.sequence import IntermediateTensors

        runner = self.runner
        if runner.intermediate_tensors is None:  # eager, with a given KV size: no warm-up made it
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
            )
        buffers = runner.intermediate_tensors
        if given is self:
            self._receive({name: buffers[name] for name in sorted(buffers.tensors)})
        return IntermediateTensors({k: v[:tokens] for k, v in buffers.items()})

    def _receive(self, buffers: Mapping[str, Any]) -> None:
        """From every node of the stage before that has some of this step's requests."""
        import torch

        first = next(iter(buffers.values()))
        if len({(one.shape, one.dtype) for one in buffers.values()}) > 1:
            raise PipelineError("this model's stages pass tensors of several shapes; not known yet")
        for node, requests in self._by_node(self.sources).items():
            count = sum(self.step.num_scheduled_tokens[request] for request in requests)
            empty = torch.empty(
                (len(buffers), count, *first.shape[1:]), dtype=first.dtype, device=first.device
            )
            rows = self.transport.receive(self.number, node, empty)
            places = self._places(requests)
            for tensor, came in zip(buffers.values(), rows, strict=True):
                if places is None:
                    tensor[:count].copy_(came)
                else:
                    tensor[places] = came.to(tensor.device)

    def _send(self, tensors: Mapping[str, Any], targets: Nodes) -> None:
        import torch

        total = self.step.total_num_scheduled_tokens
        every = [tensors[name] for name in sorted(tensors)]
        for node, requests in self._by_node(targets).items():
            places = self._places(requests)
            rows = [one[:total] if places is None else one[places] for one in every]
            self.transport.send(self.number, node, torch.stack(rows))

    def _by_node(self, nodes: Nodes) -> Mapping[int, Sequence[str]]:
        """This step's requests by node of a neighbouring stage, in the scheduler's order."""
        if nodes is None:
            return {0: list(self.step.num_scheduled_tokens)}
        found: dict[int, list[str]] = defaultdict(list)
        for request in self.step.num_scheduled_tokens:
            found[nodes[request]].append(request)
        return dict(sorted(found.items()))

    def _places(self, requests: Sequence[str]) -> Any:
        """Where their rows are in this worker's batch; None: it has these alone, in this order."""
        import torch

        batch, counts = self.runner.input_batch.req_ids, self.step.num_scheduled_tokens
        if list(batch) == list(requests):
            return None
        starts, at = {}, 0
        for request in batch:
            starts[request] = at
            at += counts[request]
        rows = [starts[r] + k for r in requests for k in range(counts[r])]
        return torch.tensor(rows, device=self.runner.device)

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
        if self.model:
            mine.model_config.model = self.model
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

    def _end_with_head(self) -> None:
        """When its connection closes, whatever this process does then."""
        self.watch.recv_multipart()
        os._exit(HEAD_GONE)
