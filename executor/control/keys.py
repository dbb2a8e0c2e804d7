"""CURVE keys: the controller's pair and one per lease, in files that only their owner may read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import zmq

from executor.files import write_private
from planner.errors import InputError


class KeyFileError(InputError):
    """A key file that is missing or not one."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Z85 text, 40 characters each."""

    public: str
    secret: str

    def __repr__(self) -> str:  # a secret never gets into a log
        return f"KeyPair({self.public!r})"


def new_keys() -> KeyPair:
    """A fresh pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode("ascii"), secret.decode("ascii"))


def load_or_make(path: Path) -> KeyPair:
    """The pair in a file, made first where it is not there.

    Raises KeyFileError: the file is not a key pair.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        keys = new_keys()
        write_private(path, f"{keys.public}\n{keys.secret}\n")
        return keys
    return read_keys(path)


def read_keys(path: Path) -> KeyPair:
    """The pair in a file.

    Raises KeyFileError: no such file, or not a key pair.
    """
    try:
        public, secret = path.read_text().split()
        derived = zmq.curve_public(secret.encode("ascii")).decode("ascii")
    except (OSError, ValueError, zmq.ZMQError) as error:
        raise KeyFileError(f"{path} is not a key file of Coral ({error})") from error
    if derived != public:
        raise KeyFileError(f"{path} is not a key file of Coral (its two keys are of two pairs)")
    return KeyPair(public, secret)
