"""All-reduce time by node class: a property of the host's links, not of the GPU alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from planner.perf.grids import Floats, Line
from planner.types import Link, NodeClass, Provenance


@dataclass(frozen=True, slots=True)
class LinkFit:
    """`ms = latency_us / 1000 + 2 (n - 1) / n x bytes / bus_bandwidth`."""

    latency_us: float
    bus_bandwidth_gbyte_per_s: float
    source: str

    def ms(self, size: int, message_bytes: Floats) -> Floats:
        factor = 2.0 * (size - 1) / size
        return self.latency_us / 1e3 + factor * message_bytes / (
            self.bus_bandwidth_gbyte_per_s * 1e6
        )


# PCIe hosts without a measurement of their own: two GPUs as the L4 cloud VM of the seed (Helix
# tables), four and eight as its one measured PCIe host. Marked estimated wherever used.
DEFAULT_PCIE: Mapping[int, LinkFit] = {
    2: LinkFit(94.3, 4.7, "default PCIe: L4 cloud VM, 2 GPUs"),
    4: LinkFit(94.3, 3.8, "default PCIe: L40S collection host, 4 GPUs"),
    8: LinkFit(94.3, 2.0, "default PCIe: L40S collection host, 8 GPUs"),
}


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Milliseconds of one all-reduce by (GPU, group size)."""

    tables: Mapping[tuple[str, int], Line]  # (profile name, size) -> ms by message bytes
    fits: Mapping[tuple[str, int], LinkFit]

    def ms(self, node: NodeClass, size: int, message_bytes: ArrayLike) -> Floats:
        """Time of an all-reduce of `message_bytes` over `size` GPUs of one node, in ms."""
        data = np.asarray(message_bytes, dtype=float)
        if size == 1:
            return np.zeros(data.shape)
        key = (node.gpu.profile_name, size)
        if key in self.tables:
            return self.tables[key](data)
        fit = self.fits.get(key)
        if fit is None and node.link is Link.PCIE:
            fit = DEFAULT_PCIE.get(size)
        return np.full(data.shape, np.inf) if fit is None else fit.ms(size, data)

    def provenance(self, node: NodeClass, size: int) -> Provenance:
        """NVSwitch tables carry over between hosts of one GPU; PCIe ones do not."""
        key = (node.gpu.profile_name, size)
        if size == 1 or (key in self.tables and node.link is Link.NVSWITCH):
            return Provenance.MEASURED
        if key in self.tables or key in self.fits:
            return Provenance.CALIBRATED
        return Provenance.ESTIMATED
