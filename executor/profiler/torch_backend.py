"""Points from torch's own kernels, where no vLLM is: linear work and attention timed apart."""

from __future__ import annotations

from typing import Any

from .grid import Time, TooLargeError
from .machine import free_bytes
from .timing import median_ms
from .torch_layer import Layer, Shapes

SPARE = 0.9  # of the free memory, that a point may take


class Head:
    """The logits of one rank."""

    def __init__(self, config: dict[str, Any], dtype: str, device: str, tp: int) -> None:
        import torch

        shapes = Shapes.of(config, tp)
        self.device, self.hidden = device, shapes.hidden
        self.settings = {"device": device, "dtype": getattr(torch, dtype)}
        self.random = torch.randn
        self.weight = torch.randn(shapes.vocab, self.hidden, **self.settings).mul_(0.02).T

    def measure(self, rows: int) -> float:
        """Milliseconds of the logits of so many tokens."""
        x = self.random(rows, self.hidden, **self.settings)
        return median_ms(lambda: x @ self.weight, x.normal_, self.device, True)[0]


class TorchBackend:
    """One rank's layer on one device."""

    name = "torch"
    deep: None = None  # no engine that serves

    def __init__(self, config: dict[str, Any], dtype: str, device: str, tp: int) -> None:
        import torch

        self.torch, self.device = torch, device
        if device == "cpu":
            torch.set_num_threads(1)
        self.shapes = Shapes.of(config, tp)
        self.model = Layer(self.shapes, device, dtype)

    @property
    def kernels(self) -> str:
        return self.model.kernels + (", CUDA graphs" if self.device == "cuda" else "")

    def wait_ready(self) -> None:
        """Nothing to wait for."""

    def measure(self, kind: str, batch: int, tokens: int, context: int) -> dict[str, Any]:
        """Linear and attention parts. Raises TooLargeError: out of memory."""
        self._refuse_large(batch, tokens, context)
        try:
            linear = self._linear_ms(tokens)
            if kind == "decode":
                attention = self._attention_ms(batch, 1, context)
            elif kind == "prefill":
                attention = batch * self._attention_ms(1, tokens // batch, context)
            else:
                attention = self._attention_ms(batch, 1, context)
                attention += self._attention_ms(1, tokens - batch, 0)
        except self.torch.OutOfMemoryError as error:
            self.torch.cuda.empty_cache()
            raise TooLargeError(str(error).splitlines()[0]) from error
        return {"linear_ms": linear, "attention_ms": attention}

    def layer(self, point: dict[str, Any]) -> Time:
        """Milliseconds of the layer."""
        return Time(point["linear_ms"] + point["attention_ms"])

    def end(self) -> None:
        """Nothing is left running."""

    def _linear_ms(self, tokens: int) -> float:
        x = self.model.random(tokens, self.shapes.hidden)
        work = lambda: self.model.linear(x)  # noqa: E731
        return median_ms(work, x.normal_, self.device, self.model.graphable)[0]

    def _attention_ms(self, sequences: int, new: int, context: int) -> float:
        s, random = self.shapes, self.model.random
        q = random(sequences, s.heads, new, s.head_dim)
        k = random(sequences, s.kv_heads, new + context, s.head_dim)
        v = random(sequences, s.kv_heads, new + context, s.head_dim)
        work = lambda: self.model.attention(q, k, v, new > 1)  # noqa: E731
        return median_ms(work, v.normal_, self.device, True)[0]

    def _refuse_large(self, batch: int, tokens: int, context: int) -> None:
        """Before it is tried: on a CPU nothing says so in time."""
        s = self.shapes
        kv = 2 * (batch * context + tokens) * s.kv_heads * s.head_dim
        work = tokens * (4 * s.hidden + 3 * s.inner * max(1, s.chosen))
        needed = 4 * (kv + work)
        free = free_bytes(self.device)
        if needed > SPARE * free:
            raise TooLargeError(f"it needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free")
