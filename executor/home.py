"""The home folder: where it lies, and the files in it that parts of the executor share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from executor.control.keys import KeyPair, load_or_make


def resolve_home(home: str | None = None) -> Path:
    """The folder named, or CORAL_HOME, or the user's data folder (~/.local/share/coral)."""
    named = home or os.environ.get("CORAL_HOME")
    return Path(named).expanduser() if named else platformdirs.user_data_path("coral")


@dataclass(frozen=True)
class HomeFiles:
    """Files of a home folder that the controller shares with others."""

    home: Path

    @property
    def deployment(self) -> Path:
        return self.home / "deployment.json"

    @property
    def leases(self) -> Path:
        return self.home / "leases.sqlite"

    @property
    def routes(self) -> Path:
        return self.home / "routes.json"

    @property
    def notices(self) -> Path:
        return self.home / "notices.json"

    @property
    def nodes(self) -> Path:
        return self.home / "nodes.json"

    @property
    def aws(self) -> Path:
        return self.home / "aws.json"

    @property
    def controller(self) -> Path:
        return self.home / "controller.json"

    @property
    def address(self) -> Path:
        return self.home / "controller.address"

    @property
    def lock(self) -> Path:
        return self.home / "controller.lock"

    @property
    def keys(self) -> Path:
        return self.home / "keys"

    @property
    def gateway_keys(self) -> Path:
        return self.home / "gateway-keys.json"

    @property
    def gateway_key(self) -> Path:
        """With which gateways come to the controller; another file than clients' API keys."""
        return self.keys / "gateway.key"

    @property
    def inbox(self) -> Path:
        return self.home / "inbox"

    def controller_keys(self) -> KeyPair:
        return load_or_make(self.keys / "controller.key")

    def lease_keys(self, lease_id: str) -> KeyPair:
        return load_or_make(self.keys / f"lease-{lease_id}.key")
