"""The command line: measure a model on this machine into one file of raw points.

Progress goes to stdout, one JSON line each; the log and errors go to stderr. Exit codes: 0 done,
1 the measurement failed, 2 the machine or the arguments do not allow it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

REFUSED = 2


def main() -> None:
    """Parse and measure; with --engine or --link be one process of a measurement."""
    parser = _parser()
    options = parser.parse_args()
    if options.engine:
        from .engine import main as engine

        engine(json.loads(options.engine))
        return
    if options.link:
        from .links import main as link

        link(json.loads(options.link))
        return
    if options.model is None or options.out is None:
        parser.error("MODEL and OUT are needed")
    try:
        _measure(options)
    except Exception as error:
        if type(error).__name__ in REFUSALS:
            print(f"{error}", file=sys.stderr)
            sys.exit(REFUSED)
        if type(error).__name__ in FAILURES:
            print(f"{error}", file=sys.stderr)
            sys.exit(1)
        raise


REFUSALS = {"BusyError", "NoDeviceError", "OtherRunError", "UnsupportedError"}
FAILURES = {"EngineError", "TooLargeError", "WrongOutputError"}


class NoDeviceError(Exception):
    """The device that was asked for is not there."""


class UnsupportedError(Exception):
    """A back end that this machine does not have."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure a model's layer on this machine.")
    parser.add_argument("model", type=Path, nargs="?", help="config.json, or the folder with it")
    parser.add_argument("out", type=Path, nargs="?", help="file of raw points")
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"])
    parser.add_argument("--backend", default="auto", choices=["auto", "vllm", "torch"])
    parser.add_argument("--dtype", default="auto", help="bfloat16, float16 or float32")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--tp", type=int, nargs="+", help="tensor parallel sizes")
    parser.add_argument("--cores", nargs="+", default=["0"], help="core groups that stand for GPUs")
    parser.add_argument("--depths", type=int, nargs=2, default=(1, 3))
    parser.add_argument("--max-batch", type=int)
    parser.add_argument("--max-context", type=int)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--no-serving", action="store_true")
    parser.add_argument(
        "--serve-only", nargs="+", metavar="IN_FLIGHT,PROMPT,OUTPUT",
        help="only run the whole engine, with all layers of the config.json, at these points",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="measure on a busy GPU too")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--link", help=argparse.SUPPRESS)
    return parser


def _measure(options: argparse.Namespace) -> None:
    from .machine import clocks_mhz, describe, rates, refuse_busy
    from .points import Measurements
    from .run import Run

    config = read_config(options.model)
    device = _device(options.device)
    if not options.force:
        refuse_busy(device)
    machine = describe(device, options.cores)
    backend = _backend(options.backend, machine)
    dtype = options.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    header = {
        "config": config,
        "dtype": dtype,
        "backend": backend,
        "depths": list(options.depths),
        "machine_name": machine["name"],
        "machine": machine,
    }
    measured = Measurements(
        options.out, header, ("config", "dtype", "backend", "depths", "machine_name")
    )
    if "rates" not in measured.data:
        measured.data["rates"] = rates(device, dtype)
        measured.data["clocks_mhz"] = {"start": clocks_mhz(device)}
        measured.save()
    run = Run(measured, options, device, time.monotonic())
    if options.serve_only:
        run.serve_only([tuple(int(n) for n in one.split(",")) for one in options.serve_only])
    else:
        run.everything()
    measured.data["clocks_mhz"]["end"] = clocks_mhz(device)
    measured.data["complete"] = True
    measured.save()


def read_config(model: Path) -> dict[str, Any]:
    """Of a folder or a file."""
    path = model / "config.json" if model.is_dir() else model
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _device(asked: str) -> str:
    import torch

    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise NoDeviceError(
            "no GPU here that torch can use; measure on one, or on CPU cores with --device cpu"
        )
    return asked if asked != "auto" else "cuda" if there else "cpu"


def _backend(asked: str, machine: dict[str, Any]) -> str:
    there = machine["vllm"] is not None
    if asked == "vllm" and not there:
        raise UnsupportedError(
            f"no vLLM in the environment {sys.prefix}; install it, or take --backend torch"
        )
    return asked if asked != "auto" else "vllm" if there else "torch"
