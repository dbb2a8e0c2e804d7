"""The profiler's parts that need no torch: the grid, the file of points, the clock."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from executor.profiler.engine_process import GUARD
from executor.profiler.grid import Grid, Time, TooLargeError
from executor.profiler.points import Measurements, OtherRunError
from executor.profiler.run import fitting, serving_points
from executor.profiler.waiting import Clock

FOREVER = lambda: True  # noqa: E731
START = Path(__file__).parents[2] / "executor" / "profiler" / "start.py"


def test_straight_lines_are_not_refined() -> None:
    asked = []

    def measure(x: int, y: int) -> Time:
        asked.append((x, y))
        return Time(1.0 + 0.1 * x + 0.01 * x * y)

    found = Grid([1, 16], [32, 512], measure, FOREVER).run()
    assert (found.xs, found.ys, found.open_gaps) == ([1, 16], [32, 512], 0)
    assert {check["at"] for check in found.checks} == {4, 128}
    assert max(check["miss"] for check in found.checks) < 1e-3
    assert len(asked) == len(set(asked)) == 8  # corners, and two middles at both ends


def test_a_knee_is_refined_until_lines_are_within_three_per_cent() -> None:
    def ms(x: float, y: float) -> float:
        return max(1.0, 0.01 * x) * (1.0 + y / 1e6)

    found = Grid([1, 4096], [1, 64], lambda x, y: Time(ms(x, y)), FOREVER).run()
    assert len(found.xs) > 4 and found.ys == [1, 64]
    worst = 0.0
    for low, high in zip(found.xs, found.xs[1:], strict=False):
        middle = round((low * high) ** 0.5)
        if high / low >= 2.25 and middle not in (low, high):
            share = (middle - low) / (high - low)
            guess = ms(low, 1) + share * (ms(high, 1) - ms(low, 1))
            worst = max(worst, abs(guess / ms(middle, 1) - 1))
    assert worst <= 0.03


def test_what_may_be_noise_is_not_refined() -> None:
    noisy = Grid([1, 64], [1], lambda x, _: Time(1.0 + (x == 8) * 0.2, 0.2), FOREVER).run()
    sure = Grid([1, 64], [1], lambda x, _: Time(1.0 + (x == 8) * 0.2, 0.001), FOREVER).run()
    assert noisy.xs == [1, 64] and 8 in sure.xs


def test_every_crossing_of_a_knot_is_measured() -> None:
    times: dict[tuple[int, int], float] = {}

    def measure(x: int, y: int) -> Time:
        times[x, y] = float(x * x + y * y)
        return Time(times[x, y])

    found = Grid([1, 64], [1, 64], measure, FOREVER).run()
    assert len(found.xs) > 2
    assert all((x, y) in times for x in found.xs for y in found.ys)


def test_a_grid_that_memory_does_not_hold_shrinks_and_says_so() -> None:
    def measure(x: int, y: int) -> Time:
        if x * y > 4096:
            raise TooLargeError(f"{x * y} tokens of KV")
        return Time(1.0 + x)

    found = Grid([1, 8, 64], [32, 512], measure, FOREVER).run()
    assert (found.xs, found.ys) == ([1, 8], [32, 512])
    assert found.notes == ["the grid shrinks to x up to 8 instead of 64: 32768 tokens of KV"]
    with pytest.raises(TooLargeError, match="not even the smallest"):
        Grid([100], [100], measure, FOREVER).run()


def test_time_that_is_up_leaves_whole_rows_and_says_what_is_open() -> None:
    left = iter([True] * 2 + [False] * 100)
    found = Grid(
        [1, 4096], [1, 4096], lambda x, y: Time(float(x * x + y)), lambda: next(left)
    ).run()
    assert found.open_gaps > 0
    assert found.xs == [1, 4096]


def test_runs_beyond_the_grid_are_left_out() -> None:
    assert [point[0] for point in serving_points("cpu", 8, 512)] == [1, 4, 8]
    assert [point[0] for point in serving_points("cpu", 4, 512)] == [1, 4]
    assert [point[0] for point in serving_points("cuda", 256, 8192)] == [1, 16, 64]
    assert serving_points("cuda", 256, 512) == []


def test_kv_that_does_not_fit_halves_batch_then_context() -> None:
    assert fitting(256, 8192, 1e9) == (256, 8192)
    assert fitting(256, 8192, 64 * (8192 + 128)) == (64, 8192)
    assert fitting(16, 512, 4 * (256 + 128)) == (4, 256)
    with pytest.raises(TooLargeError, match="too few"):
        fitting(16, 512, 100.0)


def header(hidden: int = 8) -> dict:
    return {"config": {"hidden_size": hidden}, "dtype": "float32", "machine": {"name": "m"}}


def test_points_are_kept_and_taken_up_again(tmp_path: Path) -> None:
    point = {"tp": 1, "kind": "decode", "batch": 4, "tokens": 4, "context": 32, "deep_ms": 2.5}
    first = Measurements(tmp_path / "a.json", header(), ("config", "dtype"))
    assert first.get(**point) is None
    first.add(point)
    again = Measurements(tmp_path / "a.json", header(), ("config", "dtype"))
    assert again.get(tp=1, kind="decode", batch=4, tokens=4, context=32) == point
    assert again.get(tp=2, kind="decode", batch=4, tokens=4, context=32) is None


@pytest.mark.parametrize("content", ["{", '{"format": "other"}', "[]"])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(OtherRunError, match="choose another file"):
        Measurements(path, header(), ("config",))
    assert path.read_text() == content


def test_points_of_another_model_are_refused(tmp_path: Path) -> None:
    Measurements(tmp_path / "a.json", header(), ("config",)).save()
    with pytest.raises(OtherRunError, match=r"another config .*8.*now.*16"):
        Measurements(tmp_path / "a.json", header(16), ("config",))


def test_the_clock_takes_off_what_a_child_waited_for_its_core() -> None:
    spin = "import os\nos.sched_setaffinity(0, {0})\nwhile True: pass"
    children = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(4)]
    try:
        clock = Clock()
        clock.find()  # this process has run longest so far
        clock._found_at -= 10.0
        time.sleep(0.5)
        clock.find()
        waited, began = clock.waited_s(), clock.now()
        time.sleep(0.8)
        ended = clock.now()
        share = (clock.waited_s() - waited) / (ended - began)
        worked = clock.work_ms(began, ended) / 1e3 / (ended - began)
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert share > 0.1  # four on one core: each waits most of the time
    assert worked == pytest.approx(1.0 - share, abs=0.05)


def test_the_clock_goes_on_where_it_was_when_another_thread_is_busy() -> None:
    clock = Clock()
    clock.find()
    before = clock.waited_s()
    clock._found_at -= 10.0
    clock.find()
    assert before <= clock.waited_s() <= before + 1.0


class PiledUp:
    """An engine's client that reads six steps of 10 ms, long over, within no time."""

    def __init__(self) -> None:
        began = time.monotonic() - 0.2
        self.stamps = [began + 0.01 * number for number in range(6)]

    def get_output(self) -> SimpleNamespace:
        return SimpleNamespace(timestamp=self.stamps.pop(0))


def test_answers_that_pile_up_are_steps_of_their_own_length() -> None:
    core, clock = PiledUp(), Clock()
    clock.watch(core)
    clock.find()
    ends = []
    while core.stamps:
        core.get_output()
        ends.append(clock.step_ended)
    steps = [clock.work_ms(*pair) for pair in itertools.pairwise(ends)]
    assert steps == pytest.approx([10.0] * 5)


def test_waiting_is_taken_off_where_it_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks it passes evenly; before the first and after the last there is none."""
    clock, at = Clock(), SimpleNamespace()
    fake = SimpleNamespace(monotonic=lambda: at.now)
    monkeypatch.setattr("executor.profiler.waiting.time", fake)
    monkeypatch.setattr(clock, "waited_s", lambda: at.waited)
    for at.now, at.waited in ((10.0, 1.0), (11.0, 1.0), (12.0, 1.5)):
        clock.now()
    assert clock.work_ms(10.0, 11.0) == pytest.approx(1000.0)
    assert clock.work_ms(11.0, 12.0) == pytest.approx(500.0)
    assert clock.work_ms(10.5, 11.5) == pytest.approx(750.0)
    assert clock.work_ms(9.0, 10.0) == pytest.approx(1000.0)


def test_an_engine_ends_with_its_profiler_also_when_it_is_stopped() -> None:
    engine = subprocess.Popen(["sleep", "60"], start_new_session=True)
    guard = subprocess.Popen(
        [sys.executable, "-S", "-c", GUARD, str(engine.pid)],
        stdin=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    os.kill(engine.pid, 19)
    assert guard.stdin is not None
    guard.stdin.close()
    assert engine.wait(20) == -9
    guard.wait(5)


def test_the_package_runs_from_its_folder_without_coral(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", str(START), "--help"], cwd=tmp_path, capture_output=True, text=True,
        env={"PATH": os.environ["PATH"]}, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "--minutes" in done.stdout
    assert not {p.stem for p in START.parent.glob("*.py")} & set(sys.stdlib_module_names)
