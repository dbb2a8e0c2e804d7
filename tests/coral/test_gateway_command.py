"""`coral gateway`: its keys and certificates."""

from __future__ import annotations

import json
import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from typer.testing import CliRunner

from coral.cli import app
from coral.serving import _tls
from executor.gateway.app import CertificateError, make_app
from executor.gateway.door import Door
from executor.gateway.errors import RequestError
from executor.home import HomeFiles
from planner.errors import InputError
from tests.support.gateway import served


def coral(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["gateway", *arguments])
    if isinstance(done.exception, InputError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def test_keys_are_added_listed_and_revoked(tmp_path: Path) -> None:
    home = ("--home", str(tmp_path))
    assert "lets everybody in" in coral("keys", "list", *home)
    made = json.loads(coral("keys", "add", "alice", "--per-minute", "60", *home, "--json"))
    second = coral("keys", "add", "alice", *home).splitlines()[0]
    door = Door(HomeFiles(tmp_path).gateway_keys)
    for secret in (made["key"], second):
        found = door.check(f"Bearer {secret}")
        assert found is not None and found.name == "alice"
    listed = coral(*home, "keys", "list")  # the home may also be named before the verb
    assert f"{made['id']}  alice" in listed and "60 a minute" in listed
    assert second not in listed and made["key"] not in listed
    coral("keys", "revoke", made["id"], *home)
    with pytest.raises(RequestError):
        Door(HomeFiles(tmp_path).gateway_keys).check(f"Bearer {made['key']}")
    with pytest.raises(InputError, match="no API key has the id"):
        coral("keys", "revoke", made["id"], *home)
    left = json.loads(coral("keys", "list", *home, "--json"))
    assert (left["open"], len(left["keys"])) == (False, 1)
    assert "sha256" not in left["keys"][0]


def test_certificates(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    with pytest.raises(CertificateError, match="needs both"):
        _tls(certificate, None)
    with pytest.raises(CertificateError, match="No such file"):
        _tls(certificate, tmp_path / "none.pem")
    with pytest.raises(CertificateError, match="no certificate and its key"):
        _tls(key, certificate)
    trusted = ssl.create_default_context(cafile=str(certificate))
    with served(make_app(tmp_path), **_tls(certificate, key)) as url:
        assert url.startswith("https:")
        assert httpx.get(f"{url}/health", verify=trusted).status_code == 200


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 and its key."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "coral")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    files = folder / "certificate.pem", folder / "key.pem"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    pem = serialization.PrivateFormat.PKCS8
    files[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, pem, serialization.NoEncryption())
    )
    return files
