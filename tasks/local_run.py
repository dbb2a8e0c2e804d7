"""A local fleet put to work: models and tables made ready, requests measured beside the plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from catalog import reads
from catalog.seed import import_seed
from catalog.store import Catalog
from executor.vllm.environment import require_vllm
from planner.figures import ServiceFigures, service_figures
from planner.scenario import ScenarioSpec
from planner.site import LocalEngineSpec, LocalSite
from planner.types import Workload
from tasks.coral_task import coral_task
from tasks.inputs import Inputs
from tasks.load import LoadFigures, LoadRequest, figures, make_requests, send
from tasks.local_site import check_engines, make_models, model_folder
from tasks.operating import lease_store
from tasks.profile_file import read_measurements
from tasks.profile_run import ProfileRequest, measured_before, read_model, run_profiler
from tasks.profile_tables import import_profile, profile_of

MINUTES = 1.5  # for one model on one kind of core; the coarse grid is measured however long it is


@dataclass(frozen=True, slots=True)
class Served:
    """One workload: what its requests saw, and what the plan says."""

    workload: Workload
    concurrency: int
    measured: LoadFigures
    planned: ServiceFigures


def prepare(catalog: Catalog, spec: ScenarioSpec) -> None:
    """Models that are to be made, and measured tables of each on this machine's cores.

    Raises VllmError, MakeModelError, ProfilerError, NoisyProfileError.
    """
    home, site = catalog.home, spec.fleet
    make_models(home, site)
    check_engines(home, site)
    with catalog.write() as connection:
        import_seed(connection)
    for name, engine in sorted(site.engines.items()):
        for profile in sorted({node.profile for node in site.nodes}):
            _measure(catalog, site, name, engine, profile)


def measure_service(
    catalog: Catalog, inputs: Inputs, url: str, requests: int, concurrency: int | None
) -> list[Served]:
    """Send requests to every workload's model, one workload after the other.

    Without `concurrency` as many are in flight as the planned replicas take.
    """
    found = []
    for workload in inputs.scenario.workloads:
        planned = _planned(catalog, inputs, workload)
        width = concurrency or planned.in_flight
        model, lengths = workload.model, workload.lengths
        sent = make_requests(model.name, lengths, model.vocab, requests)
        _warm(url, sent, width)
        found.append(Served(workload, width, figures(model.name, send(url, sent, width)), planned))
    return found


def _planned(catalog: Catalog, inputs: Inputs, workload: Workload) -> ServiceFigures:
    """Of the replicas that run."""
    replicas = lease_store(catalog).replicas(inputs.scenario.name)
    with catalog.read() as connection:
        known = {
            template.id: template
            for template in reads.read_templates(connection, [r.template_id for r in replicas])
        }
    mine = [
        known[r.template_id] for r in replicas if known[r.template_id].workload == workload.name
    ]
    return service_figures(mine, workload.lengths)


def _warm(url: str, requests: Sequence[LoadRequest], concurrency: int) -> None:
    """The first requests of an engine are slower."""
    send(url, requests[: 2 * concurrency], concurrency)


def _measure(
    catalog: Catalog, site: LocalSite, name: str, engine: LocalEngineSpec, profile: str
) -> None:
    """Once for a config.json; a run that was cut off is taken up."""
    folder = model_folder(catalog.home, engine)
    config, _ = read_model(folder, name)
    groups, sizes = _alike(site, profile)
    request = ProfileRequest(
        config, name, str(require_vllm(engine.python)), device="cpu", backend="vllm",
        dtype=engine.dtype, minutes=MINUTES, cores=groups, tp=sizes,
    )  # fmt: skip
    out = measurements_file(catalog.home, profile, config)
    if not measured_before(request, out):
        run_profiler(request, out)
    found = read_measurements(out)
    import_profile(
        catalog, profile_of(found, name, found.gpu(profile)), datetime.now(UTC), replace=True
    )


def measurements_file(home: Path, profile: str, config: dict[str, Any]) -> Path:
    """Of a model, by its config.json, on one kind of cores."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12]
    return home / "profiles" / profile / f"{digest}.json"


def _alike(site: LocalSite, profile: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Core groups of the largest node of one profile, and the tensor parallel sizes it has."""
    nodes = [node for n in site.nodes if n.profile == profile for node in n.cores]
    sizes = {1 << power for node in nodes for power in range(len(node).bit_length())}
    groups = max((tuple(node) for node in nodes), key=lambda node: len(node))
    return groups, tuple(sorted(sizes))


prepare_task = coral_task("prepare-local", prepare)
measure_service_task = coral_task("measure-service", measure_service)
