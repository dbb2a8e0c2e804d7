"""API keys: made once, shown once, kept as hashes; with what each may ask for.

A home without a key file lets everybody in. With one, a request needs a key of it, also when the
last one was revoked.
"""

from __future__ import annotations

import hashlib
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field

from executor.files import UnreadableError, read_model, write_private
from planner.errors import InputError

PREFIX = "coral-"
SECRET_BYTES = 32  # so much chance needs no slow hash


class ApiKeyError(InputError):
    """A key that is not there, or a file that holds none."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ApiKey(_Model):
    """One key, without its secret."""

    id: str
    name: str
    sha256: str
    made_at: datetime
    in_flight: Annotated[int, Field(ge=1)] | None = None  # requests; None: no limit
    per_minute: Annotated[int, Field(ge=1)] | None = None


class ApiKeys(_Model):
    """All of a home."""

    keys: tuple[ApiKey, ...] = ()


def read_api_keys(path: Path) -> ApiKeys | None:
    """The file; None where there is none.

    Raises ApiKeyError: not a key file.
    """
    if not path.exists():
        return None
    try:
        return read_model(path, ApiKeys)
    except UnreadableError as error:
        raise ApiKeyError(
            f"{path} is not a file of API keys ({error}); restore it, or move it away and add the "
            "keys again"
        ) from error


def add_key(
    path: Path, name: str, in_flight: int | None = None, per_minute: int | None = None
) -> tuple[ApiKey, str]:
    """A new key beside the others (of the same name too, to change over), and its secret."""
    secret = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    key = ApiKey(
        id=secrets.token_hex(4),
        name=name,
        sha256=hash_of(secret),
        made_at=datetime.now(UTC).replace(microsecond=0),
        in_flight=in_flight,
        per_minute=per_minute,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        known = read_api_keys(path) or ApiKeys()
        write_private(path, ApiKeys(keys=(*known.keys, key)).model_dump_json(indent=1))
    return key, secret


def revoke_key(path: Path, key_id: str) -> ApiKey:
    """Take a key out; gateways refuse it within a second.

    Raises ApiKeyError: no such key.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        known = (read_api_keys(path) or ApiKeys()).keys
        found = [key for key in known if key.id == key_id]
        if not found:
            there = ", ".join(f"{key.id} ({key.name})" for key in known) or "none"
            raise ApiKeyError(f"no API key has the id {key_id!r}; there are: {there}")
        kept = ApiKeys(keys=tuple(key for key in known if key.id != key_id))
        write_private(path, kept.model_dump_json(indent=1))
    return found[0]


def hash_of(secret: str) -> str:
    """What is kept of a secret."""
    return hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()
