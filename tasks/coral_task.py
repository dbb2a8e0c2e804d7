"""How a function becomes a Prefect task here: never cached, and tried again where that can help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task

from catalog.errors import DatabaseLockedError
from executor.fleet import TransientError
from planner.errors import CoralError

P = ParamSpec("P")
R = TypeVar("R")


def coral_task(name: str, function: Callable[P, R]) -> Task[P, R]:
    """The task; deployments say how often it is tried again (prefect.yaml), commands never do."""
    return task(name=name, cache_policy=NO_CACHE, retry_condition_fn=may_pass)(function)


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
