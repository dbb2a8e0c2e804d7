"""Clients of AWS services: one per service and region, with explicit time-outs."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import Any

from executor.aws.errors import BotoMissingError, explained

CONNECT_S = 5.0  # a region that is up answers in well under a second
READ_S = 20.0  # the slowest page of spot prices takes some seconds
ATTEMPTS = 5  # of a read: throttling ends after some seconds of growing pauses
POOL = 16  # connections of one client
HOME_REGION = "us-east-1"  # where no region is configured
# Only these regions have the price list's API.
PRICING_REGIONS = ("us-east-1", "eu-central-1", "ap-south-1")


@dataclass
class AwsClients:
    """Clients as they are needed; a session is not safe between threads, a client is."""

    read_s: float = READ_S
    attempts: int = field(default_factory=lambda: ATTEMPTS)
    endpoint_url: str | None = None  # of all services; None: boto3's choice
    _clients: dict[tuple[str, str], Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _session: Any = None

    def __post_init__(self) -> None:
        try:
            import boto3
        except ImportError as error:
            raise BotoMissingError(
                "AWS needs boto3: pip install 'coral-serving[aws]', or leave aws out"
            ) from error
        with explained("sts:GetCallerIdentity", self.home_region):
            self._session = boto3.session.Session()

    @property
    def home_region(self) -> str:
        """The region that is asked what concerns the whole account."""
        named = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        found = getattr(self._session, "region_name", None)
        return str(named or found or HOME_REGION)

    @property
    def pricing_region(self) -> str:
        """The nearest region with a price list, roughly."""
        region = self.home_region
        same = [name for name in PRICING_REGIONS if name[:3] == region[:3]]
        return same[0] if same else PRICING_REGIONS[0]

    def get(self, service: str, region: str) -> Any:
        """The client of a service in a region."""
        from botocore.config import Config

        with self._lock:
            key = (service, region)
            if key not in self._clients:
                self._clients[key] = self._session.client(
                    service,
                    region_name=region,
                    endpoint_url=self.endpoint_url,
                    config=Config(
                        connect_timeout=CONNECT_S,
                        read_timeout=self.read_s,
                        max_pool_connections=POOL,
                        retries={"mode": "standard", "total_max_attempts": self.attempts},
                    ),
                )
            return self._clients[key]
