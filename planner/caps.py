"""Utilisation caps: the share of its throughput that a replica is loaded to.

By workload and phase, and by template where simulation has met one in a plan: a replica with few
places queues more than one with many. A template's key and placement do not depend on its cap, so
a library made with the caps that a scenario assumes is planned with calibrated ones.
Source: docs/formulation.md, section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from planner.types import Phase, Template

ANY = ""  # in place of a template's id: all templates without a cap of their own
CapKey = tuple[str, Phase, str]  # workload, phase, id of a template or ANY
Caps = Mapping[CapKey, float]


def cap_of(caps: Caps, workload: str, template: Template, assumed: float) -> float:
    """The cap of a workload on a template: its own, that of its phase, or the assumed one."""
    of_phase = caps.get((workload, template.phase, ANY), assumed)
    return caps.get((workload, template.phase, template.id), of_phase)


def with_caps(
    templates: Iterable[Template], caps: Caps, assumed: Mapping[Phase, float]
) -> list[Template]:
    """Templates made with the assumed caps, as they serve under others.

    A cap of 0 says that no load is low enough: such a guest, or template, is left out.
    """
    return [
        _with_caps(template, caps, assumed[template.phase])
        for template in templates
        if cap_of(caps, template.workload, template, assumed[template.phase]) > 0.0
    ]


def _with_caps(template: Template, caps: Caps, assumed: float) -> Template:
    def factor(workload: str) -> float:
        return cap_of(caps, workload, template, assumed) / assumed

    return replace(
        template,
        throughput_rps=template.throughput_rps * factor(template.workload),
        shared_rps={
            name: planned * factor(name)
            for name, planned in template.shared_rps.items()
            if factor(name) > 0.0
        },
    )
