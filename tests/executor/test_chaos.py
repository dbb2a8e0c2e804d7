"""Leases under chaos: nothing leaked, doubled or lost, and mistakes are caught."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.chaos import run_schedule
from bench.chaos_bugs import BUGS

SCHEDULES = 150


def found_in(seeds: range) -> Counter[str]:
    total: Counter[str] = Counter()
    for seed in seeds:
        total.update(run_schedule(seed).found)
    return +total


def test_nothing_is_leaked_doubled_or_lost() -> None:
    assert found_in(range(SCHEDULES)) == {}


def test_kills_come_everywhere() -> None:
    outcomes = [run_schedule(seed) for seed in range(40)]
    assert sum(one.kills for one in outcomes) > 20
    assert sum(one.boundaries for one in outcomes) > 40 * 50


@pytest.mark.parametrize("name", sorted(BUGS))
def test_a_controller_with_a_mistake_is_caught(name: str) -> None:
    with BUGS[name]():
        for start in range(0, 400, 20):
            if found_in(range(start, start + 20)):
                return
    pytest.fail(f"{name} went unnoticed")
