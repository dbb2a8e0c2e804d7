"""Other clouds by gpuhunt: its catalogue, downloaded or from a folder, as offers.

gpuhunt (MPL-2.0) is an extra: pip install 'coral-serving[clouds]'. Its catalogue is made a few
times a day; it knows prices and no stock.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl

from catalog.market.pull import PRICED, PRICES, TYPES, Part, Pull
from planner.errors import CoralError, InputError
from planner.types import Market

CLOUDS = {"lambdalabs": "lambda"}  # by provider, where Coral calls it otherwise
ZONE = re.compile(r"^([a-z]+-[a-z]+\d+)-[a-z]$")  # of GCP
FOLDER = "GPUHUNT_CATALOG_DIR"
LARGE_GIB = {"A100": (60.0, "A100-80GB"), "V100": (24.0, "V100-32GB"), "H100": (90.0, "H100-NVL")}
# Names in the catalogue that the market calls otherwise.
NAMES = {"RTXPRO6000": "RTX PRO Server 6000", "H100NVL": "H100-NVL"}
ON_PCIE = {"A100-80GB": "A100-80GB-PCIe"}
_environment = threading.Lock()  # gpuhunt reads its folder from there


class HuntMissingError(InputError):
    """gpuhunt is not installed."""


class HuntFolderError(InputError):
    """The folder of catalogues lacks one."""


class HuntError(CoralError):
    """The catalogue could not be had or read."""


def pull_provider(provider: str, at: datetime, folder: Path | None = None) -> Pull:
    """All GPU offers of a provider.

    Raises HuntMissingError, HuntFolderError, HuntError.
    """
    items = _query(provider, folder)
    cloud = CLOUDS.get(provider, provider)
    offers = [offer_of(item, cloud) for item in items if item.gpu_count]
    rows = [row for row, _ in offers]
    domains = sorted({str(row["domain"]) for row in rows})
    types = pl.DataFrame([kind for _, kind in offers], schema=TYPES)
    return Pull(
        feed=provider,
        at=at,
        prices=pl.DataFrame(rows, schema=PRICES),
        parts=[Part(domain, of) for domain in domains for of in PRICED],
        types=types.unique(["cloud", "instance_type"], keep="first", maintain_order=True),
    )


def offer_of(item: Any, cloud: str) -> tuple[dict[str, object], dict[str, object]]:
    """A catalogue item as a price (pull.PRICES) and an instance type (pull.TYPES)."""
    zone = ZONE.match(item.location)
    domain = f"{cloud}:{zone.group(1) if zone else item.location}"
    gpu = market_name(item.gpu_name or "", item.gpu_memory or 0.0, item.instance_name)
    name = item.instance_name
    if cloud == "gcp" and name.startswith("n1-"):  # any GPU may be added to these
        name = f"{name}+{item.gpu_count}x{gpu}"
    price: dict[str, object] = {
        "observed_at": None, "cloud": cloud, "domain": domain,
        "zone": item.location if zone else None, "instance_type": name,
        "market": Market.SPOT.value if item.spot else Market.ON_DEMAND.value,
        "price_usd_per_hour": item.price, "nodes": None, "source": "gpuhunt catalogue",
    }  # fmt: skip
    kind: dict[str, object] = {
        "cloud": cloud, "instance_type": name, "gpu": gpu, "gpu_count": item.gpu_count,
        "vcpus": item.cpu or 0,
    }  # fmt: skip
    return price, kind


def market_name(gpu: str, memory_gib: float, instance: str) -> str:
    """The market's name of a GPU: 'A100' of 80 GiB is another card than that of 40."""
    name = NAMES.get(gpu, gpu)
    least, large = LARGE_GIB.get(name, (float("inf"), name))
    name = large if memory_gib >= least else name
    if "pcie" in instance.lower():
        return ON_PCIE.get(name, f"{name}-PCIe")
    return name


def _query(provider: str, folder: Path | None) -> Iterable[Any]:
    try:
        import gpuhunt  # noqa: F401
    except ImportError as error:
        raise HuntMissingError(
            f"market source {provider!r} needs gpuhunt: pip install 'coral-serving[clouds]', or "
            "leave it out"
        ) from error
    if folder is not None and not (folder / f"{provider}.csv").is_file():
        raise HuntFolderError(f"no catalogue {provider}.csv in {folder}; see market.gpuhunt_folder")
    try:
        with _catalogue(folder):
            catalog = _downloaded() if folder is None else _empty()
            found: list[Any] = catalog.query(provider=provider)
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        raise HuntError(
            f"gpuhunt has no catalogue of {provider} ({type(error).__name__}: {said}); without a "
            "network give a folder of catalogues as market.gpuhunt_folder"
        ) from error
    return found


@cache
def _downloaded() -> Any:
    """One for all providers: it is downloaded again when it is a quarter of an hour old."""
    import gpuhunt

    return gpuhunt.Catalog(balance_resources=False)


def _empty() -> Any:
    """One that reads a folder."""
    import gpuhunt

    return gpuhunt.Catalog(balance_resources=False, auto_reload=False)


@contextmanager
def _catalogue(folder: Path | None) -> Iterator[None]:
    """gpuhunt's own variable for a folder of catalogues, inside the block."""
    if folder is None:
        yield
        return
    with _environment:
        before = os.environ.get(FOLDER)
        os.environ[FOLDER] = str(folder)
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(FOLDER, None)
            else:
                os.environ[FOLDER] = before
