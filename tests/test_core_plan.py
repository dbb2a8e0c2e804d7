"""Every template and plan of the core scenario, rechecked from the performance model up.

Nothing here uses the product's profiles, tables of stages, search or checks: memory, steps,
cycle, latency, hand-over, stock and demand are worked out anew from the formulation.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest

from catalog.store import Catalog
from planner.allocation.solve import plan_allocation
from planner.types import Phase, Template
from tasks.allocation import allocation_input, decide, read_library
from tasks.inputs import Inputs, load_inputs
from tasks.library import build_phase
from tasks.scenario_file import read_scenario
from tasks.solving import Solvers

GIB = 2**30


@pytest.fixture(scope="session")
def library(core: tuple[Catalog, Inputs]) -> list[Template]:
    catalog, inputs = core
    return read_library(catalog, inputs)


@pytest.fixture(scope="session")
def decision(core: tuple[Catalog, Inputs]):
    catalog, inputs = core
    return decide(catalog, inputs)


def recheck(inputs: Inputs, template: Template) -> None:
    scenario, performance = inputs.scenario, inputs.performance
    workload = next(w for w in scenario.workloads if w.name == template.workload)
    nodes = {node.name: node for node in scenario.node_classes}
    settings, placement = scenario.placement, template.placement
    model, lengths, slo = workload.model, workload.lengths, workload.slo
    mixed = template.phase is Phase.AGGREGATED
    decode = template.phase is Phase.DECODE or mixed  # requests stay for their whole output
    chunk = mixed * lengths.mean_input / lengths.mean_output  # new tokens per decode of a step
    hop_tokens_each = 1.0 + chunk if decode else lengths.mean_input
    m, b = placement.micro_batches, placement.micro_batch_size

    layers = [n for s in placement.stages for n in range(s.first_layer, s.first_layer + s.layers)]
    assert layers == list(range(model.layers))
    used = Counter(node.node_class for stage in placement.stages for node in stage.nodes)
    assert used == Counter(dict(template.combination))
    assert sum(used.values()) <= settings.max_nodes

    steps, latencies = [], []
    for index, stage in enumerate(placement.stages):
        first, last = index == 0, index == len(placement.stages) - 1
        assert sum(node.batch for node in stage.nodes) == b
        stage_steps, stage_latencies = [], []
        for part in stage.nodes:
            node, tp = nodes[part.node_class], part.tensor_parallel_size
            assert tp * part.data_parallel_size == node.gpu_count
            share = math.ceil(part.batch / part.data_parallel_size)
            weights = model.bytes_per_layer * stage.layers
            weights += model.embed_bytes * first + model.lm_head_bytes * last
            tokens = m * share * (lengths.mean_input + decode * lengths.mean_output)
            tokens += lengths.p95_input - lengths.mean_input
            tokens += decode * (lengths.p95_output - lengths.mean_output)
            kv = tokens * stage.layers * model.kv_bytes_per_token_per_layer
            room = node.gpu.memory_gib * settings.memory_utilization - settings.reserve_gib_per_gpu
            assert weights / tp + kv / model.kv_shards(tp) <= room * GIB * (1 + 1e-9)

            one = np.array([float(share)])
            if decode:
                context = lengths.mean_input + lengths.mean_output / 2
                long = lengths.p95_input + lengths.p95_output / 2
                seen = context + (long - context) / one
                if mixed:
                    times = performance.mixed_step(
                        model, workload.dtype, node, tp, one, seen, one * chunk, lengths.p95_input
                    )
                else:
                    times = performance.decode_step(model, workload.dtype, node, tp, one, seen)
                tail = times
            else:
                times = performance.prefill_step(
                    model, workload.dtype, node, tp, one, lengths.mean_input
                )
                tail = performance.prefill_step(
                    model, workload.dtype, node, tp, one, lengths.mean_input, lengths.p95_input
                )
            once = performance.overhead_ms(node.gpu, model.name) + last * times.head_ms[0]
            stage_steps.append(stage.layers * times.layer_ms[0] + once)
            stage_latencies.append(stage.layers * tail.layer_ms[0] + once)
            kv_bytes = stage.layers * model.kv_bytes_per_token_per_layer
            handed = lengths.p95_input
            if not decode:
                handed += (part.batch - 1) * lengths.mean_input
            handover_ms = 8 * kv_bytes * handed / (node.network_peak_gbit_per_s * 1e6)
            if not mixed:
                assert handover_ms <= settings.kv_handover_share * slo.ttft_ms * (1 + 1e-9)
            prompts = part.batch / lengths.mean_output if decode else part.batch
            moved = 0.0 if mixed else prompts * kv_bytes * lengths.mean_input
            hopped = part.batch * hop_tokens_each * model.hop_bytes_per_token
            received = hopped * (not first) + moved * decode
            sent = hopped * (not last) + moved * (not decode)
            sustained_ms = 8 * max(received, sent) / (node.network_baseline_gbit_per_s * 1e6)
            in_flight = m if decode else 1
            assert sustained_ms * in_flight <= placement.cycle_ms * (1 + 1e-9)
        steps.append(max(stage_steps))
        latencies.append(max(stage_latencies))
    slowest = min(nodes[name].network_peak_gbit_per_s for name, _ in template.combination)
    hop_tokens = b * hop_tokens_each
    if not decode:
        hop_tokens += lengths.p95_input - lengths.mean_input
    hop = settings.hop_latency_ms + hop_tokens * model.hop_bytes_per_token * 8 / (slowest * 1e6)
    total = sum(latencies) + hop * (len(steps) - 1)
    if decode:
        cycle = max(total, m * max(steps))
        assert placement.cycle_ms >= cycle * (1 - 1e-6)
        assert cycle <= slo.tpot_ms * (1 + 1e-6)
        if mixed:
            share = min(n.batch // n.data_parallel_size for s in placement.stages for n in s.nodes)
            chunks = math.ceil(lengths.p95_input / (chunk * share))
            limit = (1 - settings.ttft_queue_share) * slo.ttft_ms
            assert chunks * placement.cycle_ms <= limit * (1 + 1e-6)
        rps = m * b * 1000 / (lengths.mean_output * placement.cycle_ms)
    else:
        queue_and_handover = settings.ttft_queue_share + settings.kv_handover_share
        assert total + queue_and_handover * slo.ttft_ms + slo.tpot_ms <= slo.ttft_ms * (1 + 1e-6)
        assert placement.cycle_ms >= max(steps) * (1 - 1e-6)
        rps = b * 1000 / placement.cycle_ms
    cap = settings.utilization[template.phase]
    assert template.throughput_rps == pytest.approx(rps * cap, rel=1e-6)


def test_every_template_is_feasible(core: tuple[Catalog, Inputs], library: list[Template]) -> None:
    assert len(library) > 60
    for template in library:
        recheck(core[1], template)


def test_both_plans_are_feasible(core: tuple[Catalog, Inputs], decision) -> None:
    scenario = core[1].scenario
    for plan in (decision.coral, decision.homo_joint):
        rented: Counter[tuple[str, str]] = Counter()
        by_type: Counter[tuple[str, str]] = Counter()
        for nodes in plan.nodes:
            assert nodes.offer in scenario.offers
            rented[nodes.offer.domain, nodes.offer.node_class] += nodes.count
            by_type[nodes.offer.domain, nodes.offer.instance_type] += nodes.count
        stock = {(o.domain, o.instance_type): o.stock for o in scenario.offers}
        assert all(count <= stock[place] for place, count in by_type.items())
        needed: Counter[tuple[str, str]] = Counter()
        load: dict[tuple[str, str, Phase], float] = defaultdict(float)
        for planned in plan.replicas:
            recheck(core[1], planned.template)
            for name, count in planned.template.combination:
                needed[planned.domain, name] += count * planned.count
            busy = sum(
                rps / planned.template.serves[name] for name, rps in planned.load_rps.items()
            )
            assert busy <= planned.count * (1 + 1e-6)
            for name, rps in planned.load_rps.items():
                load[name, planned.domain, planned.template.phase] += rps
        assert needed == rented
        for service in plan.services:
            served = 0.0
            for domain in scenario_domains(scenario):  # KV moves inside a domain only
                prefill = load[service.workload, domain, Phase.PREFILL]
                assert prefill == pytest.approx(
                    load[service.workload, domain, Phase.DECODE], abs=1e-5
                )
                served += prefill + load[service.workload, domain, Phase.AGGREGATED]
            assert served == pytest.approx(service.served_rps, abs=1e-4)
            assert service.served_rps <= service.demand_rps + 1e-6
        cost = sum(n.count * n.offer.price_usd_per_hour for n in plan.nodes)
        assert plan.cost_usd_per_hour == pytest.approx(cost)


def test_coral_is_never_dearer_than_homo_joint(decision) -> None:
    coral, homo = decision.coral, decision.homo_joint
    assert coral.weighted_shortfall <= homo.weighted_shortfall + 1e-3
    if coral.served_share <= homo.served_share + 1e-6:
        assert coral.cost_usd_per_hour <= homo.cost_usd_per_hour + 1e-6
    assert coral.bound_usd <= coral.objective_usd + 1e-6


def test_no_single_gpu_type_serves_the_core_demand_and_the_h100s_run_out(
    core: tuple[Catalog, Inputs], library: list[Template], decision
) -> None:
    """What the scenario promises in its comment."""

    scenario = core[1].scenario
    data = allocation_input(core[1], library)
    for gpu in sorted({node.gpu.name for node in scenario.node_classes}):
        classes = {node.name for node in scenario.node_classes if node.gpu.name == gpu}
        own = tuple(t for t in data.templates if {n for n, _ in t.combination} <= classes)
        alone = plan_allocation(
            replace(data, templates=own, settings=replace(data.settings, deadline_s=6.0))
        )
        assert alone.served_share < 0.99, gpu
    used = sum(n.count for n in decision.coral.nodes if n.offer.node_class.startswith("H100"))
    stock = sum(
        {
            (o.domain, o.instance_type): o.stock
            for o in scenario.offers
            if o.node_class.startswith("H100")
        }.values()
    )
    assert used == stock


def scenario_domains(scenario) -> list[str]:
    return sorted({offer.domain for offer in scenario.offers})


def test_the_decision_is_in_the_catalog(core: tuple[Catalog, Inputs], decision) -> None:
    catalog, _ = core
    catalog.publish(force=True)
    _, rows = catalog.query(
        "SELECT planner, cost_usd_per_hour, served_share FROM allocation_history "
        f"WHERE decision_id = '{decision.decision_id}' ORDER BY planner"
    )
    assert [row[0] for row in rows] == ["coral", "homo-joint"]
    assert rows[0][1] == pytest.approx(decision.coral.cost_usd_per_hour)
    _, rows = catalog.query(
        "SELECT sum(nodes * price_usd_per_hour) FROM allocation_nodes "
        f"WHERE allocation_id = '{decision.decision_id}'"
    )
    assert rows[0][0] == pytest.approx(decision.coral.cost_usd_per_hour)
    _, rows = catalog.query("FROM best_templates")
    assert rows
    assert all(row[5] > 0 for row in rows)


def test_templates_of_three_nodes_are_feasible(tmp_path) -> None:
    """The shipped N_max, for one workload: pipelines of three and mixed data-parallel stages."""
    spec = read_scenario("core")
    one = spec.model_copy(update={"workloads": spec.workloads[:1]})
    catalog = Catalog(tmp_path)
    inputs = load_inputs(catalog, one)
    with Solvers(workers=2) as solvers:
        for phase in inputs.phases:
            build_phase(catalog, phase, solvers)
    templates = read_library(catalog, inputs)
    assert any(template.nodes == 3 for template in templates)
    for template in templates:
        recheck(inputs, template)
