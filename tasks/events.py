"""What Coral tells a Prefect server, for automations to act on (prefect.yaml, `coral alerts`)."""

from __future__ import annotations

from prefect.events import emit_event

from tasks.recording import server_url

PROFILE_IMPORTED = "coral.profile.imported"
FLEET_LOSS = "coral.fleet.loss"
SHORTFALL = "coral.plan.shortfall"
SPEND_NEAR_CAP = "coral.spend.near-cap"
MARKET_STALE = "coral.market.stale"


def tell(event: str, kind: str, name: str, **payload: object) -> None:
    """Emit an event about a scenario or GPU type; without a Prefect server nobody is there."""
    if server_url() is not None:
        emit_event(event, {"prefect.resource.id": resource(kind, name)}, payload=dict(payload))


def resource(kind: str, name: str) -> str:
    """How automations name it: 'coral.scenario.core'."""
    return f"coral.{kind}.{name}"


def labels(kind: str) -> dict[str, str | list[str]]:
    """Matches the events of all of a kind."""
    return {"prefect.resource.id": resource(kind, "*")}
