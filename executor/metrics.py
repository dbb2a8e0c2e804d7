"""What the controller says to Prometheus: its nodes, processes and replicas, and the leases.

Definitions: docs/metrics.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from executor.control.controller import Controller
from planner.errors import InputError
from planner.leases import Lease

SILENT_S = 15.0  # a node that said nothing for so long


class MetricsAddressError(InputError):
    """Nothing can listen there."""


class Standing(Protocol):
    """The process that is asked."""

    controller: Controller

    def is_ready(self, replica_id: str) -> bool: ...


class ControllerCollector(Collector):
    """Reads what is there when it is asked; holds nothing of its own."""

    def __init__(self, standing: Standing, leases: Callable[[], Iterable[Lease]]) -> None:
        self._standing, self._leases = standing, leases

    def collect(self) -> Iterator[Metric]:
        """One family at a time."""
        controller = self._standing.controller
        now = controller.clock()
        nodes = list(controller.nodes.values())
        seen = [n for n in nodes if n.seen_at is not None and now - n.seen_at < SILENT_S]
        yield _gauge("nodes", "Nodes of the deployment.", "state",
                     {("heard",): len(seen), ("silent",): len(nodes) - len(seen)})  # fmt: skip
        noticed = sum(node.notice is not None for node in nodes)
        yield _gauge("nodes_noticed", "Nodes that their cloud takes soon.", "", {(): noticed})
        states: Counter[tuple[str, ...]] = Counter(
            (r.state.value,) for node in nodes for r in node.reports
        )
        yield _gauge("processes", "Engine processes that nodes report.", "state", states)
        running = list(controller.replicas.items())
        ready = sum(self._standing.is_ready(replica_id) for replica_id, _ in running)
        yield _gauge("replicas", "Replicas of the deployment.", "state",
                     {("ready",): ready, ("coming up",): len(running) - ready})  # fmt: skip
        restarts = sum(one.restarts for _, one in running)
        yield _gauge("restarts", "Starts after a failure, of replicas that are there.", "",
                     {(): restarts})  # fmt: skip
        yield from _leases(self._leases())


def serve_metrics(address: str, collector: Collector) -> Callable[[], None]:
    """Answer Prometheus at host:port until the function that comes back is called.

    Raises MetricsAddressError.
    """
    host, _, port = address.rpartition(":")
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(int(port), host or "127.0.0.1", registry)
    except (OSError, ValueError, OverflowError) as error:
        raise MetricsAddressError(
            f"cannot answer Prometheus at {address!r} ({error}); give --metrics a free host:port"
        ) from error

    def stop() -> None:
        server.shutdown()
        thread.join()

    return stop


def _leases(leases: Iterable[Lease]) -> Iterator[Metric]:
    held = [lease for lease in leases if not lease.state.is_over]
    counts = Counter(
        (x.scenario, x.domain, x.node_class, x.market.value, x.state.value) for x in held
    )
    nodes = GaugeMetricFamily(
        "coral_leases", "Nodes that are not over.",
        labels=("scenario", "domain", "node_class", "market", "state"),
    )  # fmt: skip
    for labels, count in counts.items():
        nodes.add_metric(labels, count)
    yield nodes
    spend: dict[str, float] = {}
    for lease in held:
        spend[lease.scenario] = spend.get(lease.scenario, 0.0) + lease.price_usd_per_hour
    cost = GaugeMetricFamily(
        "coral_leases_usd_per_hour", "Of these, at their launch prices.", labels=("scenario",)
    )
    for scenario, usd in spend.items():
        cost.add_metric([scenario], usd)
    yield cost


def _gauge(
    name: str, text: str, label: str, values: Mapping[tuple[str, ...], int]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"coral_controller_{name}", text, labels=[label] if label else [])
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
