"""Calibrated caps on templates that were made with assumed ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.caps import with_caps
from planner.types import Phase
from tests.builders import template

ASSUMED = {Phase.PREFILL: 0.5, Phase.DECODE: 0.9, Phase.AGGREGATED: 0.8}


def test_each_workload_has_its_own_cap() -> None:
    shared = replace(template("t", Phase.DECODE, {"A x1": 1}, 9.0), shared_rps={"code": 1.8})
    apart = template("p", Phase.PREFILL, {"A x1": 1}, 5.0)
    found, other = with_caps([shared, apart], {("code", Phase.DECODE): 0.45}, ASSUMED)
    assert found.throughput_rps == 9.0
    assert found.shared_rps == {"code": pytest.approx(0.9)}
    assert other == apart
    (up,) = with_caps([apart], {("chat", Phase.PREFILL): 0.75}, ASSUMED)
    assert up.throughput_rps == pytest.approx(7.5)
