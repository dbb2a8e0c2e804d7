"""A local fleet put to work: models and tables made ready, requests measured beside the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefect import task
from prefect.cache_policies import NO_CACHE

from catalog import reads
from catalog.seed import import_seed
from catalog.store import Catalog
from executor.vllm.environment import require_vllm
from planner.figures import ServiceFigures, service_figures
from planner.scenario import ScenarioSpec
from planner.site import LocalSite
from planner.types import Workload
from tasks.inputs import Inputs
from tasks.load import LoadFigures, LoadRequest, figures, make_requests, send
from tasks.local_site import check_engines, make_models, model_folder
from tasks.operating import lease_store
from tasks.profiling import import_probe, probe
from tasks.progress import report


@dataclass(frozen=True, slots=True)
class Served:
    """One workload: what its requests saw, and what the plan says."""

    workload: Workload
    concurrency: int
    measured: LoadFigures
    planned: ServiceFigures


def prepare(catalog: Catalog, spec: ScenarioSpec) -> None:
    """Models that are to be made, and measured tables of each on this machine's cores."""
    home, site = catalog.home, spec.fleet
    steps = 2 * len(site.engines)
    report("models made and measured", 0, steps)
    make_models(home, site)
    check_engines(home, site)
    with catalog.write() as connection:
        import_seed(connection)
    for done, (name, engine) in enumerate(sorted(site.engines.items()), 1):
        folder = model_folder(home, engine)
        report("models made and measured", 2 * done - 1, steps)
        for profile in sorted({node.profile for node in site.nodes}):
            out = home / "profiles" / profile
            found = probe(require_vllm(engine.python), folder, _alike(site, profile), out)
            import_probe(catalog, found, name, folder, engine.dtype, profile)
        report("models made and measured", 2 * done, steps)


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


def _alike(site: LocalSite, profile: str) -> list[str]:
    """At most two groups of cores that nodes of one profile have: each depth starts on its own."""
    groups = {
        cores for n in site.nodes if n.profile == profile for node in n.cores for cores in node
    }
    return sorted(groups)[:2]


prepare_task = task(name="prepare-local", cache_policy=NO_CACHE)(prepare)
measure_service_task = task(name="measure-service", cache_policy=NO_CACHE)(measure_service)
