"""Inputs and saved results of the systems that Coral is compared with: `bench/data`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.baselines.melange import GpuType, MelangeCase

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class PublishedMelange:
    """One case of Melange's and what it answered."""

    name: str
    case: MelangeCase
    cost_usd_per_hour: float  # of its repository's own solver
    shared_usd_per_hour: float  # least cost where buckets may share replicas in any proportion


def melange_cases() -> Iterator[PublishedMelange]:
    """Every case of `bench/data/melange`."""
    folder = DATA / "melange"
    results = json.loads((folder / "results.json").read_text())
    for name, payload in json.loads((folder / "cases.json").read_text()).items():
        found = results[name]
        yield PublishedMelange(
            name,
            melange_case(payload),
            float(found["melange"]["cost_per_hour"]),
            float(found["reference_same_input"]["fractional_assignment"]["cost"]),
        )


def melange_case(payload: Any) -> MelangeCase:
    """A case in Melange's own JSON: buckets are the cells of a grid (input row, output column)."""
    shares = payload["workload_distribution"]
    cells = [(i, j) for i, row in enumerate(shares) for j in range(len(row))]
    return MelangeCase.of(
        tuple(f"in{i}_out{j}" for i, j in cells),
        tuple(float(shares[i][j] * payload["total_request_rate"]) for i, j in cells),
        {
            name: GpuType(
                float(gpu["cost"]), tuple(float(rps) for row in gpu["tputs"] for rps in row)
            )
            for name, gpu in payload["gpu_info"].items()
        },
        int(payload["slice_factor"]),
    )
