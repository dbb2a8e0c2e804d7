"""Calibrated caps on templates that were made with assumed ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.caps import ANY, with_caps
from planner.types import Phase
from tests.builders import template

ASSUMED = {Phase.PREFILL: 0.5, Phase.DECODE: 0.9, Phase.AGGREGATED: 0.8}


def test_each_workload_has_its_own_cap() -> None:
    shared = replace(template("t", Phase.DECODE, {"A x1": 1}, 9.0), shared_rps={"code": 1.8})
    apart = template("p", Phase.PREFILL, {"A x1": 1}, 5.0)
    found, other = with_caps([shared, apart], {("code", Phase.DECODE, ANY): 0.45}, ASSUMED)
    assert found.throughput_rps == 9.0
    assert found.shared_rps == {"code": pytest.approx(0.9)}
    assert other == apart
    (up,) = with_caps([apart], {("chat", Phase.PREFILL, ANY): 0.75}, ASSUMED)
    assert up.throughput_rps == pytest.approx(7.5)


def test_a_template_that_was_met_has_its_own_before_that_of_its_phase() -> None:
    met, other = (template(key, Phase.DECODE, {"A x1": 1}, 9.0) for key in ("met", "other"))
    key = ("chat", Phase.DECODE)
    caps = {(*key, ANY): 0.6, (*key, met.id): 0.3, (*key, "gone"): 0.1}
    found = with_caps([met, other], caps, ASSUMED)
    assert [each.throughput_rps for each in found] == pytest.approx([3.0, 6.0])


def test_who_attains_at_no_load_is_left_out() -> None:
    shared = replace(template("t", Phase.DECODE, {"A x1": 1}, 9.0), shared_rps={"code": 1.8})
    (alone,) = with_caps([shared], {("code", Phase.DECODE, "t"): 0.0}, ASSUMED)
    assert dict(alone.serves) == {"chat": 9.0}
    assert with_caps([shared], {("chat", Phase.DECODE, "t"): 0.0}, ASSUMED) == []
