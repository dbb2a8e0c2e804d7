"""How a function becomes a Prefect task here: never cached, and tried again where that can help.

Where no server keeps runs it is a plain call (recording.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task
from prefect.utilities.annotations import quote

from catalog.errors import DatabaseLockedError
from executor.fleet import TransientError
from planner.errors import CoralError
from tasks.recording import server_url

P = ParamSpec("P")
R = TypeVar("R")


class _CoralTask(Task[P, R]):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if server_url() is not None:
            return super().__call__(*args, **kwargs)
        call: Callable[..., R] = self.fn
        return call(*map(_plain, args), **{name: _plain(x) for name, x in kwargs.items()})


def coral_task(name: str, function: Callable[P, R]) -> Task[P, R]:
    """The task; deployments say how often it is tried again (prefect.yaml), commands never do."""
    return _CoralTask(function, name=name, cache_policy=NO_CACHE, retry_condition_fn=may_pass)


def publishing_task(name: str, function: Callable[P, None]) -> Task[P, None]:
    """One that leaves artifacts at the server: it does nothing where there is none."""

    @wraps(function)
    def publish(*args: P.args, **kwargs: P.kwargs) -> None:
        if server_url() is not None:
            function(*args, **kwargs)

    return coral_task(name, publish)


def _plain(value: object) -> object:
    """Without the mark that keeps Prefect from looking into it (opaque.py)."""
    return value.unwrap() if isinstance(value, quote) else value


def may_pass(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """What fails outside the input may pass by itself; what the user gave does not change."""
    try:
        state.result()
    except (TransientError, DatabaseLockedError):
        return True
    except CoralError as error:
        return error.exit_code == 1
    except Exception:
        return True
    return False
