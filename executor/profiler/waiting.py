"""How long threads waited for a core: what other work on the machine took from a measurement."""

from __future__ import annotations

from pathlib import Path


def waiting_s(pid: int) -> dict[int, float]:
    """Seconds by thread, of a process and its descendants; empty where nobody counts them."""
    found: dict[int, float] = {}
    pids = [pid]
    while pids:
        try:
            for task in Path(f"/proc/{pids.pop()}/task").iterdir():
                found[int(task.name)] = int((task / "schedstat").read_text().split()[1]) / 1e9
                pids += [int(one) for one in (task / "children").read_text().split()]
        except (OSError, IndexError, ValueError):
            continue
    return found


def longest_s(before: dict[int, float], after: dict[int, float]) -> float:
    """Of the thread that waited longest in between."""
    return max((after[thread] - before.get(thread, 0.0) for thread in after), default=0.0)
