"""What is measured in which order, and how the time is shared out."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .grid import Found, Grid, Time, TooLargeError
from .machine import free_bytes
from .points import Measurements, Point

if TYPE_CHECKING:
    from .engine_process import EngineProcess

# Largest batch, context and prefill tokens measured where nothing else is asked for.
LIMITS = {"cuda": (256, 8192, 8192), "cpu": (16, 512, 512)}
# Shares of the time, after the start, when each part has to end.
ENDS = {"decode": 0.5, "prefill": 0.8, "mixed": 0.85, "again": 0.93}
LEAST_BATCH, LEAST_CONTEXT = 4, 64
SPARE_TOKENS = 128  # of a sequence, beyond its context
DOUBTFUL = 0.08  # of a layer's time
SERVING = ((1, 64, 32), (4, 64, 32), (8, 128, 32))  # requests in flight, prompt, output
SERVING_CUDA = ((1, 1024, 128), (16, 1024, 128), (64, 1024, 128))


class Backend(Protocol):
    """What answers points: vLLM's steps, or torch's own layer."""

    name: str

    @property
    def kernels(self) -> str: ...
    @property
    def deep(self) -> EngineProcess | None: ...  # an engine that can serve
    def wait_ready(self) -> None: ...
    def measure(self, kind: str, batch: int, tokens: int, context: int) -> dict[str, Any]: ...
    def layer(self, point: Point) -> Time: ...
    def end(self) -> None: ...


class Run:
    """One measurement."""

    def __init__(
        self, measured: Measurements, options: argparse.Namespace, device: str, started: float
    ) -> None:
        self.measured, self.options, self.device = measured, options, device
        self.started, self.seconds = started, 60.0 * options.minutes
        batch, context, tokens = LIMITS[device]
        self.batch = options.max_batch or batch
        self.context = options.max_context or context
        self.tokens = options.max_tokens or tokens
        self.sizes = options.tp or _sizes(measured.data["machine"]["count"])
        self.tp = 1

    def everything(self) -> None:
        """All tensor parallel sizes, links between processes, and the whole engine."""
        from .links import measure_links

        if "links" not in self.measured.data:
            self.measured.data["links"] = measure_links(self.device, self.sizes, self.say)
            self.measured.save()
        data = self.measured.data
        if data["backend"] == "vllm":
            self._fit_memory()
        with tempfile.TemporaryDirectory() as folder, self._log() as log:
            for number, tp in enumerate(self.sizes):
                if tp not in data.setdefault("complete_tp", []):
                    share = (number + 1) / len(self.sizes)
                    self._one_size(tp, Path(folder) / f"tp{tp}", share, log)

    def serve_only(self, points: list[tuple[int, ...]]) -> None:
        """The whole engine with all layers, at points of (in flight, prompt, output)."""
        from .serving import measure_serving
        from .vllm_backend import VllmBackend

        config, options = self.measured.data["config"], self._engine_options()
        kept = self.measured.data.setdefault("serving", [])
        known = [(one["concurrency"], one["prompt"], one["output"]) for one in kept]
        left = [(b, p, o) for b, p, o in points if (b, p, o) not in known]
        if not left:
            return
        with tempfile.TemporaryDirectory() as folder, self._log() as log:
            layers = (config["num_hidden_layers"],)
            backend = VllmBackend(config, Path(folder), layers, self.sizes[0], options, log)
            try:
                self.say("starting the engine as it serves")
                backend.wait_ready()
                for point in left:
                    kept += measure_serving(backend.engines[0], backend.tp, [point], self.say)
                    self.measured.save()
            finally:
                backend.end()

    def say(self, what: str) -> None:
        """One line of progress."""
        spent = time.monotonic() - self.started
        line = {"what": what, "done": round(spent), "total": round(self.seconds)}
        print(json.dumps(line), flush=True)

    def _fit_memory(self) -> None:
        """Shrink the grid until the KV of all engines takes half of the free memory, and say so."""
        from .vllm_backend import kv_bytes_per_token

        data, free = self.measured.data, free_bytes(self.device)
        per_token = sum(self.options.depths) * kv_bytes_per_token(data["config"], data["dtype"])
        before = (self.batch, self.context)
        self.batch, self.context = fitting(self.batch, self.context, free / 2.0 / per_token)
        if (self.batch, self.context) != before:
            note = (
                f"the grid shrinks to batch {self.batch} and context {self.context} instead of "
                f"{before[0]} and {before[1]}: {free / 2**30:.1f} GiB are free"
            )
            self.say(note)
            data["notes"] = [note]

    def _one_size(self, tp: int, folder: Path, share: float, log: Any) -> None:
        self.tp = tp
        self.say(f"starting TP{tp}")
        self._heads(tp)
        backend = self._backend(folder, tp, log)
        try:
            backend.wait_ready()
            self.measured.data.setdefault("kernels", {})[str(tp)] = backend.kernels
            began = time.monotonic()
            left = max(0.0, self.started + self.seconds * share - began)
            ends = {part: began + left * end for part, end in ENDS.items()}
            grids = {"decode": self._decode(backend, ends["decode"])}
            grids["prefill"] = self._prefill(backend, ends["prefill"])
            self._mixed(backend, grids["decode"], ends["mixed"])
            self._again(backend, ends["again"])
            if backend.deep is not None:
                self._serving(backend.deep, tp)
        finally:
            backend.end()
        self.measured.data["grids"].append(
            {"tp": tp, **{name: vars(grid) for name, grid in grids.items()}}
        )
        self.measured.data["complete_tp"].append(tp)
        self.measured.save()

    def _decode(self, backend: Backend, until: float) -> Found:
        contexts = [max(32, self.context // 16), self.context]
        batches = _powers(self.batch, 4)

        def at(batch: int, context: int) -> Time:
            return self._point(backend, "decode", batch, batch, context)

        return Grid(batches, contexts, at, lambda: time.monotonic() < until).run()

    def _prefill(self, backend: Backend, until: float) -> Found:
        def at(tokens: int, context: int) -> Time:
            return self._point(backend, "prefill", 1, tokens, context)

        for tokens in (self.tokens // 2, self.tokens):  # the same tokens as four prompts
            try:
                self._point(backend, "prefill", 4, tokens, 0)
            except TooLargeError as error:
                self.say(f"left out: four prompts of {tokens} tokens ({error})")
        return Grid(
            _powers(self.tokens, 4, least=16), [0, self.context], at,
            lambda: time.monotonic() < until,
        ).run()  # fmt: skip

    def _again(self, backend: Backend, until: float) -> None:
        """Points whose bursts differ get another chance, the most doubtful first."""
        mine = [p for p in self.measured.data["points"] if p["tp"] == self.tp]
        for point in sorted(mine, key=lambda p: -_doubt(backend, p)):
            if _doubt(backend, point) <= DOUBTFUL or time.monotonic() > until:
                break
            kind, batch, tokens = point["kind"], point["batch"], point["tokens"]
            self.say(f"TP{self.tp} {kind}, batch {batch}, {tokens} tokens once more")
            found = backend.measure(kind, batch, tokens, point["context"])
            if _doubt(backend, found) < _doubt(backend, point):
                point.update(found)
                self.measured.save()

    def _heads(self, tp: int) -> None:
        """Logits by rows: of one rank, with torch's own matrix product."""
        from .torch_backend import Head

        data = self.measured.data
        if any(one["tp"] == tp for one in data.setdefault("head", [])):
            return
        head = Head(data["config"], data["dtype"], self.device, tp)
        data["head"] += [
            {"tp": tp, "rows": rows, "ms": head.measure(rows)} for rows in _powers(self.batch, 4)
        ]
        self.measured.save()

    def _mixed(self, backend: Backend, decode: Found, until: float) -> None:
        """Decodes with a prompt among them: one point, and more while there is time."""
        context = decode.ys[len(decode.ys) // 2]
        wanted = [
            (batch, tokens)
            for batch in (decode.xs[-1], decode.xs[len(decode.xs) // 2])
            for tokens in (self.tokens // 2, self.tokens // 8)
        ]
        for number, (batch, tokens) in enumerate(wanted):
            if number and time.monotonic() > until:
                break
            try:
                self._point(backend, "mixed", batch, batch + tokens, context)
            except TooLargeError as error:
                self.say(f"left out: a prompt of {tokens} beside {batch} ({error})")

    def _point(self, backend: Backend, kind: str, batch: int, tokens: int, context: int) -> Time:
        key = {"tp": self.tp, "kind": kind, "batch": batch, "tokens": tokens, "context": context}
        found = self.measured.get(**key)
        if found is None:
            self.say(f"TP{self.tp} {kind}, batch {batch}, {tokens} tokens, context {context}")
            found = self.measured.add({**key, **backend.measure(kind, batch, tokens, context)})
        return backend.layer(found)

    def _backend(self, folder: Path, tp: int, log: Any) -> Backend:
        data = self.measured.data
        if data["backend"] == "torch":
            from .torch_backend import TorchBackend

            return TorchBackend(data["config"], data["dtype"], self.device, tp)
        from .vllm_backend import VllmBackend

        depths = (self.options.depths[0], self.options.depths[1])
        return VllmBackend(data["config"], folder, depths, tp, self._engine_options(), log)

    def _engine_options(self) -> dict[str, Any]:
        return {
            "dtype": self.measured.data["dtype"],
            "cores": self.options.cores,
            "longest": max(self.context, self.tokens) + self.tokens + 64,
            "kv_tokens": self.batch * (self.context + SPARE_TOKENS) + 2 * self.tokens,
            "step_tokens": max(self.tokens + self.batch, self.batch * 4),
            "sequences": self.batch + 4,
            # Several engines share the GPU; their KV has a size of its own.
            "more": {"gpu_memory_utilization": 0.25} if self.device == "cuda" else {},
        }

    def _serving(self, engine: EngineProcess, tp: int) -> None:
        """The whole engine at the deeper depth: what the tables are compared with."""
        from .serving import measure_serving

        kept = self.measured.data.setdefault("serving", [])
        if self.options.no_serving or kept:
            return
        points = serving_points(self.device, self.batch, self.context)
        kept += measure_serving(engine, tp, points, self.say)
        self.measured.save()

    def _log(self) -> Any:
        path = self.options.out.with_suffix(".log")
        print(f"engines write to {path}", file=sys.stderr)
        return path.open("a")


def serving_points(device: str, batch: int, context: int) -> list[tuple[int, int, int]]:
    """Runs of the whole engine that a grid of such a batch and context can be compared with."""
    points = SERVING_CUDA if device == "cuda" else SERVING
    return [point for point in points if point[0] <= batch and point[1] <= context]


def fitting(batch: int, context: int, tokens: float) -> tuple[int, int]:
    """Halved, batch first, until `tokens` of KV hold them. Raises TooLargeError: nothing does."""
    while batch * (context + SPARE_TOKENS) > tokens:
        if batch > LEAST_BATCH:
            batch //= 2
        elif context > LEAST_CONTEXT:
            context //= 2
        else:
            raise TooLargeError(f"{tokens:.0f} tokens of KV fit, which is too few to measure with")
    return batch, context


def _doubt(backend: Backend, point: Point) -> float:
    """What part of a layer's time its bursts differ by."""
    found = backend.layer(point)
    return found.error_ms / found.ms


def _sizes(count: int) -> list[int]:
    return [size for size in (1, 2, 4, 8) if size <= count]


def _powers(most: int, step: int, least: int = 1) -> list[int]:
    """From least to most by factors."""
    found = [least]
    while found[-1] * step < most:
        found.append(found[-1] * step)
    return [*found, most]
