"""What the cloud tells a node about its end: EC2's instance metadata (IMDSv2).

Two minutes before a spot instance is taken, `spot/instance-action` says when; a rebalance
recommendation may come earlier. Source: AWS, Spot Instance interruption notices.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from datetime import UTC, datetime

import httpx

EC2_METADATA = "http://169.254.169.254"
POLL_S = 5.0  # as AWS advises
TIMEOUT_S = 2.0
TOKEN_S = 21600
SPOT, REBALANCE = "spot", "rebalance"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Notice:
    """The node will be taken at a time, or may be soon."""

    kind: str  # SPOT | REBALANCE
    at: datetime


class MetadataWatch:
    """Asks in a thread of its own; `latest` is the gravest notice so far."""

    def __init__(self, url: str = EC2_METADATA, poll_s: float = POLL_S) -> None:
        self.latest: Notice | None = None
        self._url, self._poll_s = url.rstrip("/"), poll_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(TIMEOUT_S + 1.0)

    def _run(self) -> None:
        with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
            while not self._ended.wait(self._poll_s):
                try:
                    self.latest = look(client, self._url) or self.latest
                except (httpx.HTTPError, ValueError, KeyError) as error:
                    log.warning("instance metadata: %s", error)


def look(client: httpx.Client, url: str) -> Notice | None:
    """What the metadata says now.

    Raises httpx.HTTPError, ValueError, KeyError: no metadata, or other than expected.
    """
    asked = client.put(
        f"{url}/latest/api/token", headers={"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
    )
    asked.raise_for_status()
    headers = {"X-aws-ec2-metadata-token": asked.text}
    for kind, place, field in (
        (SPOT, "spot/instance-action", "time"),
        (REBALANCE, "events/recommendations/rebalance", "noticeTime"),
    ):
        answer = client.get(f"{url}/latest/meta-data/{place}", headers=headers)
        if answer.status_code == httpx.codes.NOT_FOUND:
            continue
        answer.raise_for_status()
        return Notice(kind, _time(answer.json()[field]))
    return None


def _time(text: str) -> datetime:
    found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return found if found.tzinfo else found.replace(tzinfo=UTC)
