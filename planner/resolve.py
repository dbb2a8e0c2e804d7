"""A scenario file resolved against what the catalog knows: every name looked up.

Source: docs/operations.md, Scenarios.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from planner.allocation.options import AllocationOptions, ServiceRules
from planner.allocation.problem import AllocationSettings
from planner.cloud_site import region_of
from planner.demand import (
    DemandForecast,
    DemandHistory,
    first_demand,
    forecast_demand,
    least_windows,
)
from planner.engine import Engine
from planner.errors import MarketError, ScenarioError, UnknownNameError
from planner.hop import slowest
from planner.known import Known
from planner.offers import (
    OfferKey,
    avoided_places_of,
    live_quotas,
    offers_to_rent,
    unpriced_classes,
    zones_by_price,
)
from planner.placement.settings import PlacementSettings
from planner.scenario import DemandSpec, ObservedSpec, ScenarioSpec, WorkloadSpec
from planner.site import check_engines, with_site
from planner.types import (
    Lengths,
    Market,
    NodeClass,
    Offer,
    Slo,
    Workload,
    gpu_of,
)


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
    unpriced: tuple[str, ...]  # 'H100 x8 in aws:eu-west-1': rented elsewhere by the same cloud
    avoided: str  # places where launches failed lately, in words
    zones: Mapping[OfferKey, tuple[str, ...]]  # of each offer, the cheapest first
    engine: Engine = Engine.ANY


def resolve_scenario(spec: ScenarioSpec, known: Known) -> Scenario:
    """Look every name up.

    Raises UnknownNameError, ScenarioError or MarketError with the name and the way out.
    """
    where = f"scenario {spec.name!r}"
    if spec.fleet.is_local:
        known = with_site(known, spec.fleet, [spec.stock.level], where)
    _refuse_repeats("node class", spec.node_classes, where)
    _refuse_repeats("domain", spec.domains, where)
    known_domains = {row.domain for row in known.prices}
    for domain in spec.domains:
        if domain not in known_domains:
            raise UnknownNameError("domain", domain, known_domains, where)
    if spec.fleet.is_aws:
        for domain in spec.domains:
            region_of(domain, where)
    nodes = tuple(_node_class(name, spec, known, where) for name in spec.node_classes)
    resolved = [_workload(item, spec, known, where) for item in spec.workloads]
    workloads = tuple(workload for workload, _ in resolved)
    _refuse_repeats("workload name", [w.name for w in workloads], where)
    _refuse_double_counts(spec, workloads, where)
    if spec.fleet.kind != "simulated":
        check_engines(spec.fleet, workloads, where)
    rented = offers_to_rent(spec, known, known.evidence)
    if not rented and known.evidence.avoided:  # to try again is better than to have nothing
        rented = offers_to_rent(spec, known, replace(known.evidence, avoided={}))
    offers = (*rented, *_owned(spec, known, where))
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
    options = replace(options, quotas=(*options.quotas, *live_quotas(known.evidence, offers)))
    return Scenario(
        name=spec.name,
        workloads=workloads,
        node_classes=nodes,
        offers=offers,
        placement=_placement(spec, nodes, known),
        allocation=spec.allocation.settings(),
        options=options,
        rules={
            workload.name: _rules(item, workload.name, spec, where)
            for item, workload in zip(spec.workloads, workloads, strict=True)
        },
        stock_note=_stock_note(spec, known),
        unpriced=unpriced_classes(spec, known),
        avoided=avoided_places_of(spec, known),
        zones=zones_by_price(spec, known),
        forecasts={workload.name: found for workload, found in resolved if found is not None},
        engine=spec.engine,
    )


def _placement(spec: ScenarioSpec, nodes: Sequence[NodeClass], known: Known) -> PlacementSettings:
    """With the measured hop, where the scenario gives none and one was measured for every GPU."""
    settings, profiles = spec.placement.settings(), {node.gpu.profile_name for node in nodes}
    if spec.placement.hop_latency_ms is not None or not profiles <= known.hops.keys():
        return settings
    hop = slowest(known.hops[name] for name in profiles)
    return replace(
        settings,
        hop_latency_ms=hop.latency_ms,
        hop_ms_per_byte=hop.ms_per_byte,
        hop_measured=True,
    )


def _stock_note(spec: ScenarioSpec, known: Known) -> str:
    """What is said of the stock wherever it is used."""
    taken_off = [
        name
        for name, found in (
            ("placement scores", known.evidence.scores),
            ("quotas", known.evidence.quotas),
        )
        if found
    ]
    return spec.stock_note + (
        f", less what {' and '.join(taken_off)} take off" if taken_off else ""
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
    elif demand.observed is not None:
        forecast = _observed(demand.observed, demand.quantile, spec, known, model.name)
        rate = max(demand.observed.at_least_rps, demand.observed.share * forecast.rate_rps)
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
    history = DemandHistory.of(name, *known.histories[name])
    if demand.until_hours is not None:
        history = history.until(int(demand.until_hours * 60 / history.window_minutes))
    return forecast_demand(history, _horizon_minutes(spec), demand.quantile)


def _observed(
    observed: ObservedSpec, quantile: float, spec: ScenarioSpec, known: Known, model: str
) -> DemandForecast:
    """The same of all requests to a model, from the minutes that gateways saw."""
    minutes, rates = known.observed.get(model, ((), ()))
    horizon = _horizon_minutes(spec)
    history = DemandHistory.of_minutes(f"observed, {model}", minutes, rates) if minutes else None
    if history is None or history.rates_rps.size < least_windows(history, horizon):
        return first_demand(rates, observed.at_first_rps / observed.share)
    return forecast_demand(history, horizon, quantile)


def _horizon_minutes(spec: ScenarioSpec) -> float:
    return spec.allocation.startup_minutes + spec.operate.interval_minutes


def _refuse_double_counts(spec: ScenarioSpec, workloads: Sequence[Workload], where: str) -> None:
    """Workloads of a model that plan on its observed requests must share them."""
    shares: dict[str, float] = {}
    for item, workload in zip(spec.workloads, workloads, strict=True):
        if item.demand.observed is not None:
            name = workload.model.name
            shares[name] = shares.get(name, 0.0) + item.demand.observed.share
    for name, share in shares.items():
        if share > 1.0 + 1e-9:
            raise ScenarioError(
                f"{where}: workloads of {name} plan on {share:g} times its observed requests; "
                "gateways see models, not workloads: give each a demand.observed.share that "
                "together make 1"
            )


def _quantile(values: Sequence[float], quantile: float) -> float:
    """The smallest value that at least that share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)]


def _refuse_repeats(kind: str, names: Sequence[str], where: str) -> None:
    for name in names:
        if list(names).count(name) > 1:
            raise ScenarioError(f"{where}: {kind} {name!r} is there twice; keep one")
