"""Who is told when: automations at a Prefect server for what somebody should look at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from httpx import HTTPError
from prefect.automations import AutomationCore, EventTrigger, Posture, ResourceSpecification
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import Action, ChangeFlowRunState, DoNothing, SendNotification
from prefect.exceptions import PrefectHTTPStatusError

from planner.errors import InputError
from tasks.events import MARKET_STALE, SHORTFALL, SPEND_NEAR_CAP, labels
from tasks.recording import server_url

BLOCK = "coral-alerts"
AGAIN = timedelta(hours=1)  # before the same thing is told of again
ENDS = ("Completed", "Failed", "Crashed", "Cancelled", "TimedOut")
GONE = timedelta(seconds=120)  # without a heartbeat; they come every 30 s (prefect.yaml)
SILENT = timedelta(minutes=30)  # without a round of `operate` that ended well
TAG: dict[str, str | list[str]] = {
    "prefect.resource.id": "prefect.tag.coral",
    "prefect.resource.role": "tag",
}


class NoServerError(InputError):
    """PREFECT_API_URL names no server."""


class ServerAwayError(InputError):
    """The Prefect server does not answer, or refuses."""


def set_alerts(notify_url: str | None) -> list[str]:
    """Make or renew the automations; their names.

    A webhook gets a POST of {"text": ...} for each, as Slack and Mattermost take it. Without one
    an automation keeps the actions that it has; a new one appears in the event feed alone.
    Raises NoServerError, ServerAwayError.
    """
    url = require_server()
    try:
        found = list(_automations(_webhook(notify_url)))
        with get_client(sync_client=True) as client:
            for automation in found:
                before = client.read_automations_by_name(automation.name)
                if before and notify_url is None:
                    automation.actions = before[0].actions
                client.create_automation(automation)
                for old in before:
                    client.delete_automation(old.id)
    except (HTTPError, PrefectHTTPStatusError, RuntimeError) as error:
        raise ServerAwayError(
            f"the Prefect server at {url} did not take the alerts ({error}); is it running?"
        ) from error
    return [automation.name for automation in found]


def require_server() -> str:
    """The address of the Prefect server. Raises NoServerError."""
    url = server_url()
    if url is None:
        raise NoServerError(
            "this needs a Prefect server and PREFECT_API_URL names none; start one with `prefect "
            "server start` and set PREFECT_API_URL=http://127.0.0.1:4200/api"
        )
    return url


def _webhook(url: str | None) -> list[Action]:
    if url is None:
        return []
    block = CustomWebhookNotificationBlock(
        name="Coral",
        url=url,
        json_data={"text": "{{subject}}: {{body}}"},
        headers=None,
        cookies=None,
    )
    saved: Any = block.save(BLOCK, overwrite=True)
    return [
        SendNotification(
            block_document_id=saved,
            subject="{{ automation.name }}",
            body="{{ event.payload.what or event.resource.name or event.resource.id }}",
        )
    ]


def _automations(actions: Sequence[Action]) -> Iterator[AutomationCore]:
    does: list[Any] = list(actions) or [DoNothing()]
    for event, name, description in (
        (SHORTFALL, "Coral: shortfall", "A plan serves less than the demand."),
        (SPEND_NEAR_CAP, "Coral: spend near the cap", "The fleet costs 90% of its cap or more."),
        (MARKET_STALE, "Coral: stale market", "A source of prices has not answered for long."),
    ):
        trigger = EventTrigger(
            expect={event}, match=ResourceSpecification(labels("scenario")),
            for_each={"prefect.resource.id"}, threshold=1, within=AGAIN,
        )  # fmt: skip
        yield AutomationCore(name=name, description=description, trigger=trigger, actions=does)
    yield AutomationCore(
        name="Coral: run failed",
        description="A run of a deployment of Coral failed, crashed or ran out of time.",
        trigger=EventTrigger(
            expect={f"prefect.flow-run.{state}" for state in ("Failed", "Crashed", "TimedOut")},
            match_related=ResourceSpecification(TAG),
            for_each={"prefect.resource.id"},
            threshold=1,
            within=timedelta(0),
        ),
        actions=does,
    )
    yield AutomationCore(
        name="Coral: run is gone",
        description="A run's process says nothing any more (a killed worker): it has crashed.",
        trigger=EventTrigger(
            posture=Posture.Proactive,
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.heartbeat", *(f"prefect.flow-run.{s}" for s in ENDS)},
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            match_related=ResourceSpecification(TAG),
            for_each={"prefect.resource.id"},
            threshold=1,
            within=GONE,
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED, name=None, message="its process is gone", force=False
            )
        ],
    )
    yield AutomationCore(
        name="Coral: operate is silent",
        description="No round of operation has ended well for half an hour.",
        trigger=EventTrigger(
            posture=Posture.Proactive,
            expect={"prefect.flow-run.Completed"},
            match_related=ResourceSpecification(
                {"prefect.resource.name": "operate", "prefect.resource.role": "flow"}
            ),
            threshold=1,
            within=SILENT,
        ),
        actions=does,
    )
