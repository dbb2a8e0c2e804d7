"""Measure a model on a GPU type (or on CPU cores) and take the tables into the catalog."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.parameters import Dask, Home
from tasks.events import PROFILE_IMPORTED, tell
from tasks.home import open_catalog
from tasks.opaque import opaque
from tasks.profile_catalog import import_profile_task, known_of
from tasks.profile_file import read_measurements
from tasks.profile_run import (
    ProfileRequest,
    check_request,
    profile_on_workers_task,
    read_model,
    run_profiler_task,
    safe,
)
from tasks.profile_tables import Profile, gpu_named, profile_of, write_profile_file
from tasks.recording import coral_flow


@dataclass(frozen=True)
class ProfileResult:
    """What was measured, and where it is kept."""

    profiles: tuple[Profile, ...]
    files: tuple[Path, ...]


@coral_flow("profile-gpu")
def profile_gpu(
    model: str,
    gpu: str | None = None,
    name: str | None = None,
    options: Mapping[str, Any] | None = None,
    home: Home = None,
    dask: Dask = None,
) -> ProfileResult:
    """Measure, make tables, import them. On Dask: once on every host that has a GPU.

    Args:
        model: A folder with a config.json, or that file, on the machine of the worker.
        gpu: Name of the GPU type in the catalog; default: that of the device.
        name: Of the model; default: as the folder is named.
        options: Further fields of a profile, such as minutes, backend, dtype, max_batch.
    """
    config, found_name = read_model(Path(model), name)
    request = ProfileRequest(config, found_name, **(options or {}))
    check_request(request, here=dask is None)
    catalog = open_catalog(home)
    folder = catalog.home / "profiles"
    if dask:
        raw = profile_on_workers_task(dask, opaque(request), folder)
    else:
        file_name = f"{safe(request.name)}-{safe(gpu or 'this-machine')}.json"
        raw = [run_profiler_task(opaque(request), folder / file_name)]
    known, now = known_of(catalog), datetime.now(UTC)
    profiles, files = [], []
    for path in raw:
        found = read_measurements(path)
        profile = profile_of(found, request.name, gpu_named(gpu or "", known, found))
        file = path.with_suffix(".parquet")
        write_profile_file(profile, file)
        import_profile_task(catalog, opaque(profile), now)
        tell(PROFILE_IMPORTED, "gpu", profile.gpu.name, model=profile.model.name)
        profiles.append(profile)
        files.append(file)
    catalog.publish(force=True)
    return ProfileResult(tuple(profiles), tuple(files))
