"""Requests with the lengths asked for, and figures of what they saw."""

from __future__ import annotations

import pytest

from planner.types import Lengths
from tasks.load import Seen, figures, make_requests


def test_prompts_and_outputs_have_the_mean_and_the_p95() -> None:
    lengths = Lengths("l", 64, 32, 96, 48)
    made = make_requests("m", lengths, 512, 200)
    prompts, outputs = [len(r.prompt) for r in made], [r.output_tokens for r in made]
    assert sum(prompts) / 200 == pytest.approx(64, abs=0.5)
    assert sum(outputs) / 200 == pytest.approx(32, abs=0.5)
    assert sorted(prompts)[189] == 96
    assert sorted(outputs)[189] == 48
    assert made == make_requests("m", lengths, 512, 200)
    assert all(0 < token < 512 for request in made for token in request.prompt)


def seen(first: float, last: float, tokens: int = 11, error: str = "", model: str = "m") -> Seen:
    return Seen(model, 1.0, first, last, tokens, error)


def test_figures_are_of_the_answers_in_full() -> None:
    found = figures(
        "m",
        [seen(1.1, 2.1), seen(1.3, 3.0, 18), seen(1.1, 9.0, 3, "broke off"), seen(1, 9, model="x")],
    )
    assert (found.requests, found.failed, found.errors) == (3, 1, ("broke off",))
    assert found.seconds == pytest.approx(2.0)
    assert found.output_tokens_per_s == pytest.approx((11 + 18) / 2.0)
    assert (found.ttft_mean_ms, found.ttft_p95_ms) == (pytest.approx(200), pytest.approx(300))
    assert found.tpot_mean_ms == pytest.approx(100)  # 1 s over 10 tokens, 1.7 s over 17


def test_without_an_answer_there_are_no_figures() -> None:
    found = figures("m", [seen(1.1, 2.0, 0, "status 503")])
    assert (found.failed, found.output_tokens_per_s) == (1, 0.0)
    assert found.ttft_mean_ms != found.ttft_mean_ms
