"""Utilisation caps: the share of its throughput that a replica is loaded to, by workload and phase.

A template's key and placement do not depend on its cap, so a library made with the caps that a
scenario assumes is planned with calibrated ones. Source: docs/formulation.md, section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from planner.types import Phase, Template

Caps = Mapping[tuple[str, Phase], float]  # by (workload, phase)


def with_caps(
    templates: Iterable[Template], caps: Caps, assumed: Mapping[Phase, float]
) -> list[Template]:
    """Templates made with the assumed caps, as they serve under others; those not given stay."""
    return [_with_caps(template, caps, assumed[template.phase]) for template in templates]


def _with_caps(template: Template, caps: Caps, assumed: float) -> Template:
    def rps(workload: str, planned: float) -> float:
        return planned * caps.get((workload, template.phase), assumed) / assumed

    return replace(
        template,
        throughput_rps=rps(template.workload, template.throughput_rps),
        shared_rps={name: rps(name, planned) for name, planned in template.shared_rps.items()},
    )
