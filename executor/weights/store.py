"""Where weights lie: a folder that nodes see, or an S3 bucket."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from executor.weights.manifest import CHUNK, WeightsError


class Store(Protocol):
    """Objects by name below one place."""

    @property
    def url(self) -> str:
        """The place."""
        ...

    def read(self, name: str, start: int = 0) -> Iterator[bytes]:
        """An object from a byte on, in pieces. Raises WeightsError."""
        ...

    def write(self, name: str, path: Path) -> None:
        """An object from a file. Raises WeightsError."""
        ...

    def size(self, name: str) -> int | None:
        """Bytes of an object; None where there is none. Raises WeightsError."""
        ...


def open_store(url: str) -> Store:
    """Of a folder (or file://), or s3://bucket/prefix.

    Raises WeightsError: another kind of address.
    """
    parts = urlsplit(url)
    if parts.scheme in {"", "file"}:
        return FolderStore(parts.path)
    if parts.scheme == "s3" and parts.netloc:
        return S3Store(url, parts.netloc, parts.path.strip("/"))
    raise WeightsError(f"weights cannot lie at {url}; give a folder or s3://bucket/prefix")


@dataclass(frozen=True)
class FolderStore:
    """A folder."""

    url: str

    def read(self, name: str, start: int = 0) -> Iterator[bytes]:
        """As the protocol says."""
        try:
            with (Path(self.url) / name).open("rb") as file:
                file.seek(start)
                while piece := file.read(CHUNK):
                    yield piece
        except OSError as error:
            raise WeightsError(f"cannot read {self.url}/{name}: {error.strerror}") from error

    def write(self, name: str, path: Path) -> None:
        """As the protocol says."""
        target = Path(self.url) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(target.name + ".part")
        shutil.copyfile(path, draft)
        draft.replace(target)

    def size(self, name: str) -> int | None:
        """As the protocol says."""
        path = Path(self.url) / name
        return path.stat().st_size if path.is_file() else None


@dataclass(frozen=True)
class S3Store:
    """A bucket, by boto3; credentials are the machine's own."""

    url: str
    bucket: str
    prefix: str

    def read(self, name: str, start: int = 0) -> Iterator[bytes]:
        """As the protocol says."""
        with self._explained(name):
            answer = self._client.get_object(
                Bucket=self.bucket, Key=self._key(name), Range=f"bytes={start}-"
            )
            yield from answer["Body"].iter_chunks(CHUNK)

    def write(self, name: str, path: Path) -> None:
        """As the protocol says."""
        with self._explained(name):
            self._client.upload_file(str(path), self.bucket, self._key(name))

    def size(self, name: str) -> int | None:
        """As the protocol says."""
        try:
            answer = self._client.head_object(Bucket=self.bucket, Key=self._key(name))
        except Exception as error:
            code = str((getattr(error, "response", None) or {}).get("Error", {}).get("Code", ""))
            if code in {"404", "NoSuchKey", "NotFound"}:
                return None
            raise WeightsError(f"cannot look at {self.url}/{name}: {error}") from error
        return int(answer["ContentLength"])

    @property
    def _client(self) -> Any:
        try:
            import boto3
        except ImportError as error:
            raise WeightsError(
                "S3 needs boto3: pip install 'coral-serving[aws]', or use a folder"
            ) from error
        return boto3.client("s3")

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        try:
            yield
        except WeightsError:
            raise
        except Exception as error:
            raise WeightsError(f"cannot reach {self.url}/{name}: {error}") from error
