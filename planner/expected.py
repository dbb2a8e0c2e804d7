"""What a template's replica should do at a load and at lengths that were seen.

Source: docs/formulation.md, section 12.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from planner.engine import SPARE_PLACES, engines_side_by_side
from planner.perf.behind import Step, row_behind
from planner.perf.grids import Floats
from planner.perf.model import PerformanceModel, StepTimes
from planner.placement.loads import LoadTimes, StageTimes, at_load, group_of
from planner.placement.profile import PhaseProblem, build_phase_problem
from planner.placement.settings import PlacementSettings
from planner.types import Lengths, NodeClass, Phase, StageNode, Template, Workload


@dataclass(frozen=True)
class Bench:
    """What every prediction of a scenario needs."""

    performance: PerformanceModel
    nodes: Mapping[str, NodeClass]  # by name
    settings: PlacementSettings


@dataclass(frozen=True)
class Expected:
    """One template at the lengths that were seen."""

    bench: Bench
    template: Template
    workload: Workload  # with these lengths
    problem: PhaseProblem
    chunk_tokens: float  # of a step for each decode, as the engine's budget is set

    @classmethod
    def of(
        cls,
        bench: Bench,
        template: Template,
        workload: Workload,
        prompt_tokens: float,
        output_tokens: float,
    ) -> Expected:
        """With the mean lengths that were seen.

        Raises MissingProfileError: its tables are gone.
        """
        p, o = max(1.0, prompt_tokens), max(1.0, output_tokens)
        met = replace(workload, lengths=Lengths("observed", p, o, p, o))
        problem = build_phase_problem(
            met,
            template.phase,
            [bench.nodes[name] for name, _ in template.combination],
            bench.performance,
            bench.settings,
        )
        planned = workload.lengths.mean_input / workload.lengths.mean_output
        return cls(bench, template, met, problem, planned)

    def tpot_ms(self, requests: Floats) -> Floats:
        """Of one among so many that decode."""
        times, count = self._times(requests)
        if self.template.phase is not Phase.AGGREGATED:
            return times.cycle_ms(count)
        share = self._held(requests) / count / self.template.placement.micro_batch_size
        alone, mixed = (
            replace(times, stages=self._stages(share, prompts=prompts)).cycle_ms(count)
            for prompts in (False, True)
        )
        engines = engines_side_by_side(self.template.placement)
        return mixed - (mixed - alone) / np.maximum(1.0, requests / engines)

    def _stages(self, share: Floats, *, prompts: bool) -> tuple[StageTimes, ...]:
        """Mean steps of aggregated stages, in which prompts come whole, or as far as they may.

        A step carries prompts as often as that makes up for the requests that end.
        """
        stages = self.template.placement.stages
        found = []
        for number, stage in enumerate(stages):
            steps = [
                self._step_ms(
                    node, stage.layers, share, last=number == len(stages) - 1, prompts=prompts
                )
                for node in stage.nodes
            ]
            step: Floats = np.maximum.reduce(steps)
            found.append(StageTimes(step, step, np.ones(step.shape, dtype=bool)))
        return tuple(found)

    def _step_ms(
        self, node: StageNode, layers: int, share: Floats, *, last: bool, prompts: bool
    ) -> Floats:
        """One group's step with its part of the decodes, on average."""
        performance, model, dtype = self.bench.performance, self.workload.model, self.workload.dtype
        node_class, tp = self.bench.nodes[node.node_class], node.tensor_parallel_size
        p, o = self.workload.lengths.mean_input, self.workload.lengths.mean_output
        decodes = np.maximum(1.0, group_of(node) * share)
        context = np.full(decodes.shape, p + o / 2.0)

        def ms(step: StepTimes) -> Floats:
            once = performance.overhead_ms(node_class.gpu, model.name) + last * step.head_ms
            return layers * step.layer_ms + once

        alone = ms(performance.decode_step(model, dtype, node_class, tp, decodes, context))
        if not prompts:
            return alone
        mean = decodes * p / o  # new tokens of a step
        room = group_of(node) * (1.0 + self.chunk_tokens) - decodes  # planner/engine.py
        chunk = np.maximum(mean, np.minimum(p, room))
        mixed = ms(performance.mixed_step(model, dtype, node_class, tp, decodes, context, chunk, p))
        return alone + mean / chunk * np.maximum(0.0, mixed - alone)

    def rate(self, requests: Floats) -> Floats:
        """Tokens/s of so many that decode; prefill: prompts/s of a full replica."""
        times, count = self._times(requests)
        if self.template.phase is Phase.PREFILL:
            return 1e3 * self.template.placement.micro_batch_size / times.slowest_ms
        return 1e3 * self._held(requests) / times.cycle_ms(count)

    def row(self, requests: float) -> str:
        """Of the performance tables: behind the stage that takes most of a cycle."""
        stages = self.template.placement.stages
        load, lengths = np.array([requests]), self.workload.lengths
        times, count = self._times(load)
        number = int(np.argmax([stage.step_ms[0] for stage in times.stages]))
        node = max(stages[number].nodes, key=lambda node: node.batch)
        size = float((self._held(load) / count)[0] / self.template.placement.micro_batch_size)
        group = max(1.0, group_of(node) * size)
        match self.template.phase:
            case Phase.PREFILL:
                prompts, weigh = group * lengths.mean_input, True
            case Phase.AGGREGATED:
                prompts = group * self.problem.terms.chunk_tokens
                share = np.array([size])
                alone, mixed = (
                    self._stages(share, prompts=too)[number].step_ms[0] for too in (False, True)
                )
                weigh = bool(alone < 0.5 * mixed)
            case Phase.DECODE:
                prompts, weigh = 0.0, False
        step = Step(group, prompts, lengths.mean_input + lengths.mean_output / 2.0, weigh)
        return row_behind(
            self.bench.performance, self.workload.model, self.workload.dtype,
            self.bench.nodes[node.node_class], node.tensor_parallel_size, step,
        )  # fmt: skip

    def _times(self, requests: Floats) -> tuple[LoadTimes, Floats]:
        """Of the stages, with so many micro-batches under way."""
        placement = self.template.placement
        held = self._held(requests)
        count = np.minimum(float(placement.micro_batches), held)
        share = held / count / placement.micro_batch_size
        return at_load(self.problem, self.template.combination, placement, share), count

    def _held(self, requests: Floats) -> Floats:
        """Those that have a place: at least one, and what the engines take at most."""
        placement = self.template.placement
        places = placement.micro_batches * placement.micro_batch_size
        spare = SPARE_PLACES if self.template.phase is Phase.AGGREGATED else 1.0
        return np.clip(requests, 1.0, spare * places)
