"""Runs the package in an environment that has no Coral.

python start.py MODEL OUT.json [--minutes 10] ...
"""

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def load() -> None:
    """Make the folder importable as `profiler`, and its modules' plain names not."""
    sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != FOLDER]
    spec = importlib.util.spec_from_file_location(
        "profiler", FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["profiler"] = module
    spec.loader.exec_module(module)


load()  # at import: processes that torch and vLLM spawn need it too

if __name__ == "__main__":
    from profiler.command import main

    main()
