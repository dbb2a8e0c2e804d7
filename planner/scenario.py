"""Scenario files: what a person writes, and its resolution against what the catalog knows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from planner.allocation.options import AllocationOptions, Quota, ServiceRules
from planner.allocation.problem import AllocationSettings
from planner.demand import DemandForecast, DemandHistory, forecast_demand
from planner.engine import Engine
from planner.errors import MarketError, ScenarioError, UnknownNameError
from planner.placement.settings import PlacementSettings
from planner.types import (
    InstanceType,
    Lengths,
    Market,
    ModelSpec,
    NodeClass,
    Offer,
    Phase,
    Slo,
    Workload,
    gpu_of,
)

Share = Annotated[float, Field(gt=0.0, le=1.0)]
LARGEST_BATCH = 4096  # requests of a micro-batch
Sizes = Annotated[tuple[Annotated[int, Field(ge=1, le=LARGEST_BATCH)], ...], Field(min_length=1)]


class _Strict(BaseModel):
    """Unknown keys are refused: a misspelt option must never be silently ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SloSpec(_Strict):
    """Latency objectives, in milliseconds."""

    ttft_ms: PositiveFloat
    tpot_ms: PositiveFloat


class LengthsSpec(_Strict):
    """Prompt and output lengths, in tokens."""

    mean_input: PositiveFloat
    mean_output: PositiveFloat
    p95_input: PositiveFloat
    p95_output: PositiveFloat


class DemandSpec(_Strict):
    """A fixed rate, a quantile of a trace's rate by minute, or a forecast from a history."""

    requests_per_s: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    trace: str | None = None
    history: str | None = None
    until_hours: PositiveFloat | None = None  # what is known of the history; all of it
    quantile: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.95
    scale: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _one_source(self) -> DemandSpec:
        sources = (self.requests_per_s, self.trace, self.history)
        if sum(source is not None for source in sources) != 1:
            raise ValueError("give one of requests_per_s, trace and history")
        if self.until_hours is not None and self.history is None:
            raise ValueError("until_hours goes with history")
        return self


class WorkloadSpec(_Strict):
    """One stream of requests to one model."""

    model: str
    name: str | None = None
    dtype: str | None = None  # the model's own
    slo: SloSpec
    lengths: str | LengthsSpec
    demand: DemandSpec
    weight: PositiveFloat = 1.0
    domains: tuple[str, ...] | None = None
    least_served: float = Field(default=0.0, ge=0.0, le=1.0)
    largest_domain_share: Share = 1.0
    origin: str | None = None


class StockSpec(_Strict):
    """Which assumed stock level to plan with, and a factor on it.

    `unknown_gpus` stands in for instance types of which no level assumes anything in a domain: as
    many nodes as hold so many GPUs together, at least one. With 0 they are left out.
    """

    level: Literal["ample", "limited", "scarce"] = "limited"
    factor: float = Field(default=1.0, ge=0.0)
    unknown_gpus: int = Field(default=0, ge=0)

    @property
    def note(self) -> str:
        """What is said wherever the stock is used."""
        factor = "" if self.factor == 1.0 else f" x {self.factor:g}"
        note = f"assumed, level {self.level}{factor}"
        if self.unknown_gpus:
            note += f"; where unknown, {self.unknown_gpus} GPUs{factor} by type and domain assumed"
        return note


class OwnedSpec(_Strict):
    """Nodes that are paid for anyway."""

    domain: str
    instance_type: str
    nodes: PositiveInt


class PlacementSpec(_Strict):
    """Caps and assumptions of the template library; defaults are PlacementSettings'."""

    max_nodes: Annotated[int, Field(ge=1, le=8)] = 3
    memory_ratio: Annotated[float, Field(ge=1.0)] = 12.0
    least_gain: Annotated[float, Field(ge=1e-4, lt=1.0)] = PlacementSettings().least_gain
    solver: Literal["exact", "ilp"] = "exact"
    node_options: Literal["all", "whole"] = "all"
    decode_batch_sizes: Sizes = PlacementSettings().decode_batch_sizes
    prefill_batch_sizes: Sizes = PlacementSettings().prefill_batch_sizes
    aggregated_batch_sizes: Sizes = PlacementSettings().aggregated_batch_sizes
    memory_utilization: Share = 0.90
    reserve_gib_per_gpu: float = Field(default=1.5, ge=0.0)
    max_batched_tokens: PositiveInt = 8192
    hop_latency_ms: float = Field(default=0.2, ge=0.0)
    ttft_queue_share: float = Field(default=0.20, ge=0.0, lt=1.0)
    kv_handover_share: float = Field(default=0.30, gt=0.0, lt=1.0)
    prefill_utilization: Share = 0.70
    decode_utilization: Share = 0.90
    aggregated_utilization: Share = 0.80

    @model_validator(mode="after")
    def _leave_time(self) -> PlacementSpec:
        if self.ttft_queue_share + self.kv_handover_share >= 1.0:
            raise ValueError("ttft_queue_share and kv_handover_share leave no time for prefill")
        return self

    def settings(self) -> PlacementSettings:
        names = {phase: f"{phase.value}_utilization" for phase in Phase}
        values = self.model_dump(exclude=set(names.values()))
        utilization = {phase: getattr(self, name) for phase, name in names.items()}
        return PlacementSettings(**values, utilization=utilization)


class QuotaSpec(_Strict):
    """Most vCPUs of instance types and domains that match shell patterns."""

    vcpus: Annotated[int, Field(ge=0)]
    domains: str = "*"
    instance_types: str = "*"
    market: Market | None = None


class EgressSpec(_Strict):
    """Price of traffic that leaves a domain for a workload's origin elsewhere."""

    usd_per_gib: dict[str, Annotated[float, Field(ge=0.0)]]
    bytes_per_token: PositiveFloat = 4.0


class AllocationSpec(_Strict):
    """Horizon, costs of change, limits and solver limits of the allocation."""

    horizon_hours: PositiveFloat = 1.0
    startup_minutes: float = Field(default=10.0, ge=0.0)
    drain_minutes: float = Field(default=2.0, ge=0.0)
    restart_minutes: float = Field(default=5.0, ge=0.0)
    relative_gap: float = Field(default=0.005, ge=0.0, lt=1.0)
    deadline_s: PositiveFloat = 60.0
    solver: Literal["columns", "full"] = "columns"
    quotas: tuple[QuotaSpec, ...] = ()
    largest_spot_share: float = Field(default=1.0, ge=0.0, le=1.0)
    budget_usd_per_hour: PositiveFloat | None = None
    egress: EgressSpec | None = None

    @model_validator(mode="after")
    def _drain_within_horizon(self) -> AllocationSpec:
        if self.drain_minutes > 60.0 * self.horizon_hours:
            raise ValueError("drain_minutes is longer than horizon_hours")
        return self

    def settings(self) -> AllocationSettings:
        names = {field.name for field in fields(AllocationSettings)}
        return AllocationSettings(**self.model_dump(include=names))

    def options(self) -> AllocationOptions:
        return AllocationOptions(
            quotas=tuple(Quota(**quota.model_dump()) for quota in self.quotas),
            largest_spot_share=self.largest_spot_share,
            budget_usd_per_hour=self.budget_usd_per_hour,
            egress_usd_per_gib=dict(self.egress.usd_per_gib) if self.egress else {},
            bytes_per_token=self.egress.bytes_per_token if self.egress else 4.0,
        )


class FleetSpec(_Strict):
    """The simulated fleet that a plan is applied to."""

    startup_minutes: PositiveFloat = 10.0
    failure_rate: float = Field(default=0.0, ge=0.0, le=1.0)
    seed: int = 0


class OperateSpec(_Strict):
    """When a running plan gives way to a better one."""

    interval_minutes: PositiveFloat = 10.0  # between rounds; forecasts reach over it and a start-up
    least_saving_share: float = Field(default=0.01, ge=0.0, lt=1.0)  # of the running plan's cost


class ScenarioSpec(_Strict):
    """One scenario file."""

    name: str
    description: str = ""
    workloads: Annotated[tuple[WorkloadSpec, ...], Field(min_length=1)]
    demand_scale: PositiveFloat = 1.0
    node_classes: Annotated[tuple[str, ...], Field(min_length=1)]
    domains: Annotated[tuple[str, ...], Field(min_length=1)]
    markets: Annotated[tuple[Market, ...], Field(min_length=1)] = (Market.ON_DEMAND,)
    stock: StockSpec = StockSpec()
    owned: tuple[OwnedSpec, ...] = ()
    engine: Engine = Engine.ANY  # plan only with templates that it can run
    placement: PlacementSpec = PlacementSpec()
    allocation: AllocationSpec = AllocationSpec()
    fleet: FleetSpec = FleetSpec()
    operate: OperateSpec = OperateSpec()


def with_caps(spec: ScenarioSpec, max_nodes: int, memory_ratio: float) -> ScenarioSpec:
    """A scenario with other caps on its combinations."""
    caps = {"max_nodes": max_nodes, "memory_ratio": memory_ratio}
    return spec.model_copy(update={"placement": spec.placement.model_copy(update=caps)})


def with_whole_nodes(spec: ScenarioSpec) -> ScenarioSpec:
    """A scenario whose nodes are one tensor parallel group each."""
    whole = spec.placement.model_copy(update={"node_options": "whole"})
    return spec.model_copy(update={"placement": whole})


@dataclass(frozen=True, slots=True)
class MarketRow:
    """One accepted price of one zone, as the catalog has it."""

    domain: str
    zone: str | None
    instance_type: str
    node_class: str
    market: Market
    price_usd_per_hour: float


@dataclass(frozen=True, slots=True)
class Known:
    """What the catalog knows, for a scenario to be resolved against."""

    models: Mapping[str, ModelSpec]
    instance_types: Sequence[InstanceType]
    gpus: Sequence[str]
    lengths: Mapping[str, Lengths]
    trace_rps: Mapping[str, Sequence[float]]  # requests/s of every minute
    histories: Mapping[str, DemandHistory]
    prices: Sequence[MarketRow]
    stock: Mapping[tuple[str, str, str], int]  # (level, domain, instance type) -> nodes


@dataclass(frozen=True)
class Scenario:
    """A scenario with every name resolved."""

    name: str
    workloads: tuple[Workload, ...]
    node_classes: tuple[NodeClass, ...]
    offers: tuple[Offer, ...]
    placement: PlacementSettings
    allocation: AllocationSettings
    options: AllocationOptions
    rules: Mapping[str, ServiceRules]  # by workload
    stock_note: str  # said wherever the stock is used
    forecasts: Mapping[str, DemandForecast]  # by workload, before scales
    engine: Engine = Engine.ANY


def resolve_scenario(spec: ScenarioSpec, known: Known) -> Scenario:
    """Look every name up.

    Raises UnknownNameError, ScenarioError or MarketError with the name and the way out.
    """
    where = f"scenario {spec.name!r}"
    _refuse_repeats("node class", spec.node_classes, where)
    _refuse_repeats("domain", spec.domains, where)
    known_domains = {row.domain for row in known.prices}
    for domain in spec.domains:
        if domain not in known_domains:
            raise UnknownNameError("domain", domain, known_domains, where)
    nodes = tuple(_node_class(name, spec, known, where) for name in spec.node_classes)
    resolved = [_workload(item, spec, known, where) for item in spec.workloads]
    workloads = tuple(workload for workload, _ in resolved)
    _refuse_repeats("workload name", [w.name for w in workloads], where)
    offers = (*_offers(spec, known), *_owned(spec, known, where))
    if not offers:
        raise MarketError(
            f"{where}: no domain offers any of its node classes with stock at level "
            f"{spec.stock.level!r}; add domains, node classes or markets"
        )
    options = spec.allocation.options()
    for quota in options.quotas:
        if not any(quota.covers(offer) for offer in offers):
            raise ScenarioError(f"{where}: the {quota.describe()} covers none of its offers")
    for domain in options.egress_usd_per_gib:
        _require_domain(domain, spec, f"allocation.egress of {where}")
    return Scenario(
        name=spec.name,
        workloads=workloads,
        node_classes=nodes,
        offers=offers,
        placement=spec.placement.settings(),
        allocation=spec.allocation.settings(),
        options=options,
        rules={
            workload.name: _rules(item, workload.name, spec, where)
            for item, workload in zip(spec.workloads, workloads, strict=True)
        },
        stock_note=spec.stock.note,
        forecasts={workload.name: found for workload, found in resolved if found is not None},
        engine=spec.engine,
    )


def _node_class(name: str, spec: ScenarioSpec, known: Known, where: str) -> NodeClass:
    """The class as the scenario's own clouds give it: the slowest network among its types."""
    everywhere = {kind.node.name for kind in known.instance_types}
    if name not in everywhere:
        gpu = gpu_of(name)
        if gpu not in known.gpus:
            raise UnknownNameError("GPU", gpu, known.gpus, f"node class {name!r} of {where}")
        raise UnknownNameError("node class", name, everywhere, where)
    clouds = sorted({domain.split(":")[0] for domain in spec.domains})
    found = [k.node for k in known.instance_types if k.node.name == name and k.cloud in clouds]
    if not found:
        raise ScenarioError(
            f"{where}: no cloud of its domains ({', '.join(clouds)}) rents {name}; leave it out "
            "of node_classes or add a domain"
        )
    return replace(
        found[0],
        network_peak_gbit_per_s=min(node.network_peak_gbit_per_s for node in found),
        network_baseline_gbit_per_s=min(node.network_baseline_gbit_per_s for node in found),
    )


def _rules(item: WorkloadSpec, name: str, spec: ScenarioSpec, where: str) -> ServiceRules:
    place = f"workload {name!r} of {where}"
    for domain in (*(item.domains or ()), *([item.origin] if item.origin else ())):
        _require_domain(domain, spec, place)
    if item.domains == ():
        raise ScenarioError(f"{place} allows no domain; leave `domains` out to allow all")
    return ServiceRules(
        domains=None if item.domains is None else frozenset(item.domains),
        least_served=item.least_served,
        largest_domain_share=item.largest_domain_share,
        origin=item.origin,
    )


def _require_domain(domain: str, spec: ScenarioSpec, where: str) -> None:
    if domain not in spec.domains:
        raise UnknownNameError("domain", domain, spec.domains, where)


def _owned(spec: ScenarioSpec, known: Known, where: str) -> list[Offer]:
    offers = []
    for item in spec.owned:
        _require_domain(item.domain, spec, f"owned of {where}")
        cloud = item.domain.split(":")[0]
        kinds = {kind.name: kind for kind in known.instance_types if kind.cloud == cloud}
        if item.instance_type not in kinds:
            raise UnknownNameError("instance type", item.instance_type, kinds, f"owned of {where}")
        kind = kinds[item.instance_type]
        if kind.node.name not in spec.node_classes:
            raise ScenarioError(
                f"{where}: owned {item.instance_type} is of class {kind.node.name!r}, which is "
                "not in node_classes; add it there"
            )
        offers.append(
            Offer(
                domain=item.domain,
                instance_type=item.instance_type,
                node_class=kind.node.name,
                market=Market.OWNED,
                price_usd_per_hour=0.0,
                stock=item.nodes,
                stock_source="owned, as the scenario says",
                gpus=kind.node.gpu_count,
                vcpus=kind.vcpus,
            )
        )
    return offers


def _workload(
    item: WorkloadSpec, spec: ScenarioSpec, known: Known, where: str
) -> tuple[Workload, DemandForecast | None]:
    if item.model not in known.models:
        raise UnknownNameError("model", item.model, known.models, where)
    model = known.models[item.model]
    name = item.name or model.short_name
    if isinstance(item.lengths, str):
        if item.lengths not in known.lengths:
            place = f"workload {name!r} of {where}"
            raise UnknownNameError("length distribution", item.lengths, known.lengths, place)
        lengths = known.lengths[item.lengths]
    else:
        try:
            lengths = Lengths(name, **item.lengths.model_dump())
        except ValueError as error:
            raise ScenarioError(f"workload {name!r} of {where}: {error}") from error
    if lengths.p95_input > spec.placement.max_batched_tokens:
        raise ScenarioError(
            f"workload {name!r} of {where}: a p95 prompt of {lengths.p95_input:g} tokens is more "
            f"than placement.max_batched_tokens ({spec.placement.max_batched_tokens}); raise it"
        )
    if item.dtype not in {None, model.dtype}:
        raise ScenarioError(
            f"workload {name!r} of {where}: {model.name} is known in {model.dtype}, not in "
            f"{item.dtype!r}; leave dtype out, or import that model's sizes and profiles"
        )
    demand, forecast = item.demand, None
    if demand.trace is not None:
        if demand.trace not in known.trace_rps:
            place = f"workload {name!r} of {where}"
            raise UnknownNameError("trace", demand.trace, known.trace_rps, place)
        rate = _quantile(known.trace_rps[demand.trace], demand.quantile)
    elif demand.history is not None:
        forecast = _forecast(demand, spec, known, f"workload {name!r} of {where}")
        rate = forecast.rate_rps
    else:
        rate = demand.requests_per_s or 0.0
    workload = Workload(
        name=name,
        model=model,
        dtype=model.dtype,
        slo=Slo(item.slo.ttft_ms, item.slo.tpot_ms),
        lengths=lengths,
        demand_rps=rate * demand.scale * spec.demand_scale,
        weight=item.weight,
    )
    return workload, forecast


def _forecast(demand: DemandSpec, spec: ScenarioSpec, known: Known, place: str) -> DemandForecast:
    """What may come until the nodes of the next round's plan could serve."""
    name = demand.history or ""
    if name not in known.histories:
        raise UnknownNameError("demand history", name, known.histories, place)
    history = known.histories[name]
    if demand.until_hours is not None:
        history = history.until(int(demand.until_hours * 60 / history.window_minutes))
    horizon = spec.allocation.startup_minutes + spec.operate.interval_minutes
    return forecast_demand(history, horizon, demand.quantile)


def _offers(spec: ScenarioSpec, known: Known) -> tuple[Offer, ...]:
    """The cheapest zone's price of every (domain, instance type, market) with stock."""
    cheapest: dict[tuple[str, str, Market], MarketRow] = {}
    for row in known.prices:
        if not (math.isfinite(row.price_usd_per_hour) and row.price_usd_per_hour > 0):
            raise MarketError(
                f"{row.domain} {row.instance_type} {row.market}: price must be positive, "
                f"got {row.price_usd_per_hour}; correct or remove that offer"
            )
        if (
            row.domain in spec.domains
            and row.market in spec.markets
            and row.node_class in spec.node_classes
        ):
            key = (row.domain, row.instance_type, row.market)
            found = cheapest.get(key)
            if found is None or row.price_usd_per_hour < found.price_usd_per_hour:
                cheapest[key] = row
    kinds = {(kind.cloud, kind.name): kind for kind in known.instance_types}
    assumed = {(domain, instance_type) for _, domain, instance_type in known.stock}
    offers = []
    for (domain, instance_type, market), row in sorted(cheapest.items()):
        kind = kinds[domain.split(":")[0], instance_type]
        if (domain, instance_type) in assumed or not spec.stock.unknown_gpus:
            nodes = known.stock.get((spec.stock.level, domain, instance_type), 0)
            stock, source = math.floor(nodes * spec.stock.factor), spec.stock.note
        else:
            nodes = max(1, spec.stock.unknown_gpus // kind.node.gpu_count)
            stock = math.floor(nodes * spec.stock.factor)
            source = f"stock unknown: assumed {stock} nodes"
        if stock > 0:
            offers.append(
                Offer(
                    domain=domain,
                    instance_type=instance_type,
                    node_class=row.node_class,
                    market=market,
                    price_usd_per_hour=row.price_usd_per_hour,
                    stock=stock,
                    stock_source=source,
                    zone=row.zone,
                    gpus=kind.node.gpu_count,
                    vcpus=kind.vcpus,
                )
            )
    return tuple(offers)


def _quantile(values: Sequence[float], quantile: float) -> float:
    """The smallest value that at least that share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)]


def _refuse_repeats(kind: str, names: Sequence[str], where: str) -> None:
    for name in names:
        if list(names).count(name) > 1:
            raise ScenarioError(f"{where}: {kind} {name!r} is there twice; keep one")
