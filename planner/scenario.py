"""Scenario files: what a person writes, and its resolution against what the catalog knows."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from planner.allocation.options import AllocationOptions, AllocationSettings, Quota
from planner.cloud_site import AwsSite
from planner.engine import Engine
from planner.market import MarketSpec
from planner.placement.settings import PlacementSettings
from planner.site import STOCK_NOTE, LocalSite
from planner.strict import Strict
from planner.types import (
    Market,
    Phase,
)

Share = Annotated[float, Field(gt=0.0, le=1.0)]
STOCK_LEVELS = ("ample", "limited", "scarce")
PLACEMENT = PlacementSettings()
LARGEST_BATCH = 4096  # requests of a micro-batch
Sizes = Annotated[tuple[Annotated[int, Field(ge=1, le=LARGEST_BATCH)], ...], Field(min_length=1)]


class SloSpec(Strict):
    """Latency objectives, in milliseconds."""

    ttft_ms: PositiveFloat  # time to first token, at the 95th percentile of lengths
    tpot_ms: PositiveFloat  # time per output token after the first


class LengthsSpec(Strict):
    """Prompt and output lengths, in tokens."""

    mean_input: PositiveFloat
    mean_output: PositiveFloat
    p95_input: PositiveFloat  # the latency objectives hold up to these
    p95_output: PositiveFloat


class ObservedSpec(Strict):
    """A forecast from what gateways saw of the workload's model."""

    at_first_rps: float = Field(ge=0.0, allow_inf_nan=False)  # until enough was seen
    at_least_rps: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)  # always
    share: Share = 1.0  # of the model's requests: gateways see models, not workloads


class DemandSpec(Strict):
    """A fixed rate, a quantile of a trace's rate by minute, or a forecast.

    A forecast is from a history of the catalog, or from what gateways saw.
    """

    requests_per_s: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)  # a fixed rate
    trace: str | None = None  # a shipped trace, at a quantile of its minutes
    history: str | None = None  # a shipped history of days, forecast
    observed: ObservedSpec | None = None
    until_hours: PositiveFloat | None = None  # what is known of the history; all of it
    quantile: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.95  # of the minutes, or of what may come
    scale: PositiveFloat = 1.0  # on the rate

    @model_validator(mode="after")
    def _one_source(self) -> DemandSpec:
        sources = (self.requests_per_s, self.trace, self.history, self.observed)
        if sum(source is not None for source in sources) != 1:
            raise ValueError("give one of requests_per_s, trace, history and observed")
        if self.until_hours is not None and self.history is None:
            raise ValueError("until_hours goes with history")
        return self


class WorkloadSpec(Strict):
    """One stream of requests to one model."""

    model: str  # its name in the catalog, or the end of it
    name: str | None = None  # the model's, where it is left out
    dtype: str | None = None  # the model's own
    slo: SloSpec
    lengths: str | LengthsSpec  # a shipped distribution by name, or its figures
    demand: DemandSpec
    weight: PositiveFloat = 1.0  # of a request that is not served, beside those of others
    domains: tuple[str, ...] | None = None  # the only ones that may serve it (residency)
    least_served: float = Field(default=0.0, ge=0.0, le=1.0)  # of its demand, or no plan at all
    largest_domain_share: Share = 1.0  # of its demand in one domain (spread)
    origin: str | None = None  # domain where its traffic comes from: egress is paid elsewhere


class StockSpec(Strict):
    """Which assumed stock level to plan with, and a factor on it.

    `unknown_gpus` stands in for instance types of which no level assumes anything in a domain: as
    many nodes as hold so many GPUs together, at least one. With 0 they are left out.
    """

    level: Literal["ample", "limited", "scarce"] = "limited"  # of the shipped assumption
    factor: float = Field(default=1.0, ge=0.0)  # on the nodes assumed
    unknown_gpus: int = Field(default=0, ge=0)  # see above

    @property
    def note(self) -> str:
        """What is said wherever the stock is used."""
        factor = "" if self.factor == 1.0 else f" x {self.factor:g}"
        note = f"assumed, level {self.level}{factor}"
        if self.unknown_gpus:
            note += f"; where unknown, {self.unknown_gpus} GPUs{factor} by type and domain assumed"
        return note


class OwnedSpec(Strict):
    """Nodes that are paid for anyway."""

    domain: str
    instance_type: str
    nodes: PositiveInt  # so many are there


class PlacementSpec(Strict):
    """Caps and assumptions of the template library; defaults are PlacementSettings'."""

    max_nodes: Annotated[int, Field(ge=1, le=8)] = 3  # of one replica (N_max)
    memory_ratio: Annotated[float, Field(ge=1.0)] = 12.0  # GPU memory over weights (rho), at most
    least_gain: Annotated[float, Field(ge=1e-4, lt=1.0)] = PLACEMENT.least_gain  # over its parts
    solver: Literal["exact", "ilp"] = "exact"  # exact is compiled, ilp is PuLP and HiGHS
    node_options: Literal["all", "whole"] = "all"  # whole: no groups smaller than a node
    decode_batch_sizes: Sizes = PLACEMENT.decode_batch_sizes  # tried
    prefill_batch_sizes: Sizes = PLACEMENT.prefill_batch_sizes  # tried
    aggregated_batch_sizes: Sizes = PLACEMENT.aggregated_batch_sizes  # tried
    memory_utilization: Share = 0.90  # of GPU memory, as vLLM takes it
    reserve_gib_per_gpu: float = Field(default=1.5, ge=0.0)  # beside weights and KV
    max_batched_tokens: PositiveInt = 8192  # of a step, as vLLM takes it
    hop_latency_ms: float | None = Field(default=None, ge=0.0)  # None: measured, or else assumed
    ttft_queue_share: float = Field(default=0.20, ge=0.0, lt=1.0)  # of the TTFT, to wait
    kv_handover_share: float = Field(default=0.30, gt=0.0, lt=1.0)  # of the TTFT, to move KV
    prefill_utilization: Share = 0.70  # how full replicas are planned where nothing is calibrated
    decode_utilization: Share = 0.90  # the same
    aggregated_utilization: Share = 0.80  # the same
    caps: Literal["calibrated", "assumed"] = "calibrated"  # those found, or the three above
    corrections: Literal["observed", "none"] = "observed"  # what serving taught, or the profiles

    @model_validator(mode="after")
    def _leave_time(self) -> PlacementSpec:
        if self.ttft_queue_share + self.kv_handover_share >= 1.0:
            raise ValueError("ttft_queue_share and kv_handover_share leave no time for prefill")
        return self

    def settings(self) -> PlacementSettings:
        names = {phase: f"{phase.value}_utilization" for phase in Phase}
        values = self.model_dump(exclude=set(names.values()))
        if self.hop_latency_ms is None:
            del values["hop_latency_ms"]
        utilization = {phase: getattr(self, name) for phase, name in names.items()}
        return PlacementSettings(**values, utilization=utilization)


class QuotaSpec(Strict):
    """Most vCPUs of instance types and domains that match shell patterns."""

    vcpus: Annotated[int, Field(ge=0)]  # of all nodes that match
    domains: str = "*"  # shell pattern
    instance_types: str = "*"  # shell pattern
    market: Market | None = None  # spot, on_demand; both where it is left out


class EgressSpec(Strict):
    """Price of traffic that leaves a domain for a workload's origin elsewhere."""

    usd_per_gib: dict[str, Annotated[float, Field(ge=0.0)]]  # by domain
    bytes_per_token: PositiveFloat = 4.0  # of an answer


class AllocationSpec(Strict):
    """Horizon, costs of change, limits and solver limits of the allocation."""

    horizon_hours: PositiveFloat = 1.0  # over which start-ups and drains pay
    startup_minutes: float = Field(default=10.0, ge=0.0)  # paid before a node serves
    drain_minutes: float = Field(default=2.0, ge=0.0)  # paid after it served
    restart_minutes: float = Field(default=5.0, ge=0.0)  # of nodes whose replica changes
    relative_gap: float = Field(default=0.005, ge=0.0, lt=1.0)  # at which the search ends
    deadline_s: PositiveFloat = 60.0  # at which it ends anyway
    solver: Literal["columns", "full"] = "columns"  # columns: decomposed; full: one program
    quotas: tuple[QuotaSpec, ...] = ()  # of clouds, by patterns
    largest_spot_share: float = Field(default=1.0, ge=0.0, le=1.0)  # of the rented GPUs
    budget_usd_per_hour: PositiveFloat | None = None  # of rented nodes
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


class FleetSpec(LocalSite):
    """The fleet that a plan is applied to: simulated, processes on this machine, or EC2."""

    kind: Literal["simulated", "local", "aws"] = "simulated"  # local: processes here; aws: EC2
    aws: AwsSite = AwsSite()
    start_up: Literal["measured", "given"] = "measured"  # minutes of a plan, once nodes came up
    startup_minutes: PositiveFloat = 10.0  # simulated, as the next three
    failure_rate: float = Field(default=0.0, ge=0.0, le=1.0)
    preemptions_per_hour: NonNegativeFloat = 0.0  # of a spot node
    seed: int = 0
    max_usd_per_hour: PositiveFloat | None = None  # of all nodes, those that end included
    max_nodes_per_domain: PositiveInt | None = None
    max_launches_per_minute: PositiveInt | None = None
    plans_per_round: PositiveInt = 3  # others follow where offers turn out to have no capacity
    gang_minutes: PositiveFloat = 30.0  # for all nodes of a replica; then what came is given back

    @property
    def is_local(self) -> bool:
        return self.kind == "local"

    @property
    def is_aws(self) -> bool:
        return self.kind == "aws"

    @model_validator(mode="after")
    def _what_its_kind_has(self) -> FleetSpec:
        if self.is_local and not (self.nodes and self.engines):
            raise ValueError("a local fleet says its nodes and engines")
        if self.is_aws and not self.engines:
            raise ValueError("an aws fleet says its engines")
        given = {"python", "random"}
        if self.is_aws and any(given & one.model_fields_set for one in self.engines.values()):
            raise ValueError("python and random of an engine go with kind: local")
        if self.is_aws and self.max_usd_per_hour is None:
            raise ValueError("an aws fleet says max_usd_per_hour: what it may cost at most")
        if not self.is_local and self.nodes:
            raise ValueError("nodes go with kind: local")
        if self.kind == "simulated" and self.engines:
            raise ValueError("engines go with kind: local or aws")
        if not self.is_aws and self.aws != AwsSite():
            raise ValueError("aws goes with kind: aws")
        return self


class OperateSpec(Strict):
    """When a running plan gives way to a better one."""

    interval_minutes: PositiveFloat = 10.0  # between rounds; forecasts reach over it and a start-up
    least_saving_share: float = Field(default=0.01, ge=0.0, lt=1.0)  # of the running plan's cost


class ScenarioSpec(Strict):
    """One scenario file."""

    name: str  # under which plans, nodes and replicas are kept
    description: str = ""  # for people
    workloads: Annotated[tuple[WorkloadSpec, ...], Field(min_length=1)]  # streams of requests
    demand_scale: PositiveFloat = 1.0  # on every workload's demand
    node_classes: Annotated[tuple[str, ...], Field(min_length=1)]  # as 'H100 x8'
    domains: Annotated[tuple[str, ...], Field(min_length=1)]  # regions: 'aws:us-east-1'
    markets: Annotated[tuple[Market, ...], Field(min_length=1)] = (Market.ON_DEMAND,)  # to rent in
    market: MarketSpec = MarketSpec()
    stock: StockSpec = StockSpec()
    owned: tuple[OwnedSpec, ...] = ()
    engine: Engine = Engine.ANY  # plan only with templates that it can run
    placement: PlacementSpec = PlacementSpec()
    allocation: AllocationSpec = AllocationSpec()
    fleet: FleetSpec = FleetSpec()
    operate: OperateSpec = OperateSpec()

    @model_validator(mode="after")
    def _what_a_local_fleet_can_run(self) -> ScenarioSpec:
        if self.fleet.is_local and self.domains != (self.fleet.domain,):
            raise ValueError(f"a local fleet has one domain: domains: [{self.fleet.domain!r}]")
        if self.fleet.kind != "simulated" and self.engine is Engine.ANY:
            kind = "an aws" if self.fleet.is_aws else "a local"
            raise ValueError(
                f"{kind} fleet runs stock vLLM, or vLLM with Coral's pipelines; plan with engine: "
                "vllm or coral"
            )
        return self

    @property
    def stock_note(self) -> str:
        """What is said of the stock wherever it is used."""
        return STOCK_NOTE if self.fleet.is_local else self.stock.note


def with_caps(spec: ScenarioSpec, max_nodes: int, memory_ratio: float) -> ScenarioSpec:
    """A scenario with other caps on its combinations."""
    caps = {"max_nodes": max_nodes, "memory_ratio": memory_ratio}
    return spec.model_copy(update={"placement": spec.placement.model_copy(update=caps)})


def with_whole_nodes(spec: ScenarioSpec) -> ScenarioSpec:
    """A scenario whose nodes are one tensor parallel group each."""
    whole = spec.placement.model_copy(update={"node_options": "whole"})
    return spec.model_copy(update={"placement": whole})
