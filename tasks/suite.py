"""The fixed suite of allocation instances: one scenario under many markets and demands."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat, ValidationError

from planner.errors import ScenarioError, UnknownNameError
from planner.scenario import ScenarioSpec, StockSpec
from planner.types import Market
from tasks.scenario_file import example_folder


class Instance(BaseModel):
    """What one instance changes in the scenario."""

    model_config = ConfigDict(frozen=True)

    id: str
    stratum: str  # ample, limited, tight, scarce
    level: Literal["ample", "limited", "scarce"]
    stock_factor: PositiveFloat
    domains: str  # a list of the suite, or 'all' of the scenario's
    demand_scale: PositiveFloat
    markets: tuple[Market, ...]


class Suite(BaseModel):
    """The suite as its file has it."""

    model_config = ConfigDict(frozen=True)

    domains: dict[str, tuple[str, ...] | str]
    instances: tuple[Instance, ...]

    def scenario(self, spec: ScenarioSpec, instance: Instance) -> ScenarioSpec:
        """The scenario as the instance has it; its library stays the same."""
        if instance.domains not in self.domains:
            raise UnknownNameError("domain list", instance.domains, self.domains, "the suite")
        domains = self.domains[instance.domains]
        changes = {
            "domains": spec.domains if isinstance(domains, str) else domains,
            "markets": instance.markets,
            "demand_scale": instance.demand_scale,
            "stock": StockSpec(level=instance.level, factor=instance.stock_factor),
        }
        return spec.model_copy(update=changes)


def read_suite(path: Path | None = None) -> Suite:
    """The shipped suite, or another file of its kind.

    Raises ScenarioError: no such file, or not a suite.
    """
    path = path or example_folder() / "suite.json"
    try:
        return Suite.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScenarioError(f"cannot read suite file {path}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ScenarioError(f"{path} is not a suite: {where}: {first['msg']}") from error
