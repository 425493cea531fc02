"""Certificates, keys and CAs as files: what is wrong is said in the flags' words, and renewal is noticed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from routing.errors import SettingsError
from routing.tls import guest_tls, https_tls, member_tls
from routing.tls_files import TlsFiles
from tests.support.certificates import Authority


@pytest.fixture(autouse=True)
def hears_warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "routing")


def trouble(files: TlsFiles) -> str:
    with pytest.raises(SettingsError) as caught:
        member_tls(files)
    return str(caught.value)


def test_without_files_there_is_no_tls() -> None:
    assert member_tls(TlsFiles()) is guest_tls(TlsFiles()) is https_tls(TlsFiles()) is None


def test_certificate_and_key_are_a_pair(ca: Authority) -> None:
    files = ca.files("node")
    assert "--tls-key is missing" in trouble(replace(files, key=None))
    assert "--tls-cert and --tls-key" in trouble(replace(files, cert=None))
    with pytest.raises(SettingsError, match="--tls-cert is missing"):
        https_tls(replace(files, cert=None))


def test_a_file_that_is_missing_or_may_not_be_read_is_named(ca: Authority, tmp_path: Path) -> None:
    files = ca.files("node")
    assert trouble(replace(files, cert=tmp_path / "no.pem")).endswith("no.pem: No such file or directory")
    assert trouble(replace(files, key=tmp_path / "no.key")).startswith("--tls-key ")
    assert trouble(replace(files, ca=tmp_path)).endswith("Is a directory")


def test_a_file_of_something_else_is_named(ca: Authority, tmp_path: Path) -> None:
    files = ca.files("node")
    assert "holds no certificate that can be read" in trouble(replace(files, cert=files.key))
    assert "holds no key that can be read" in trouble(replace(files, key=files.cert))
    (tmp_path / "empty").touch()
    assert "--tls-ca" in trouble(replace(files, ca=tmp_path / "empty"))


def test_an_encrypted_key_is_named_and_its_password_never_asked_for(ca: Authority) -> None:
    files = ca.files("node")
    assert files.key is not None
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    sealed = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    files.key.write_bytes(sealed)
    assert "is encrypted" in trouble(files)


def test_a_key_of_another_certificate_is_named(ca: Authority) -> None:
    files = replace(ca.files("node"), key=ca.files("other").key)
    assert "is not the key of --tls-cert" in trouble(files)


def test_a_certificate_that_is_not_good_now_is_named(ca: Authority) -> None:
    assert "has expired on" in trouble(ca.expired("node"))
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    assert "is not good before" in trouble(ca.files("node", not_before=tomorrow))


def test_a_certificate_that_others_would_refuse_is_named_at_the_start(ca: Authority, tmp_path: Path) -> None:
    strange = Authority(tmp_path, "strange").files("node")
    assert "is not one that --tls-ca vouches for" in trouble(replace(strange, ca=ca.path))


def test_a_certificate_that_may_not_be_shown_as_a_client_is_named(tmp_path: Path) -> None:
    assert "make one with serverAuth and clientAuth" in trouble(_own_signed(tmp_path))


def _own_signed(folder: Path) -> TlsFiles:
    """A certificate for servers only, which is its own CA."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "node")])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert, path = folder / "own.pem", folder / "own.key"
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return TlsFiles(cert, path, cert)


def test_a_gateway_does_not_show_what_nodes_would_refuse_and_says_so(
    ca: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    public = replace(Authority(tmp_path, "public").files("gateway"), ca=ca.path)
    tls = guest_tls(public)
    assert tls is not None
    assert tls.contexts.lifetime is None
    assert "is not shown to nodes and sentinels" in caplog.text


def test_a_ca_file_may_hold_old_ones_beside_a_good_one(ca: Authority, tmp_path: Path) -> None:
    old = ca.expired("old")
    assert old.cert is not None
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(old.cert.read_bytes() + ca.path.read_bytes())
    assert member_tls(replace(ca.files("node"), ca=bundle)) is not None
    assert "--tls-ca" in trouble(replace(ca.files("node"), ca=old.cert))


def test_a_key_that_everybody_can_read_is_warned_of(ca: Authority, caplog: pytest.LogCaptureFixture) -> None:
    files = ca.files("node")
    assert files.key is not None
    files.key.chmod(0o644)
    member_tls(files)
    assert "can be read by every user of this machine" in caplog.text
    assert "PRIVATE KEY" not in caplog.text


async def test_whatever_goes_wrong_with_new_files_ends_nothing(
    ca: Authority, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may go between two looks at it; a node's other tasks run beside the watch."""
    files = ca.files("node")
    tls = member_tls(files)
    assert tls is not None
    before = tls.contexts
    with monkeypatch.context() as changed:
        changed.setattr("routing.tls_files._warn_open", lambda path: path.with_name("gone").stat())
        tls.reload()
    assert tls.contexts is before
    assert "FileNotFoundError" in caplog.text
    tls.reload()
    assert tls.contexts is not before


async def test_files_that_will_not_do_leave_those_from_before_in_use(
    ca: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    files = ca.files("node")
    tls = member_tls(files)
    assert tls is not None
    before = tls.contexts
    assert files.cert is not None
    watching = asyncio.create_task(tls.watch(0.01, 0.01))
    files.cert.write_text("half")
    async with asyncio.timeout(5):
        while "the files from before stay in use" not in caplog.text:
            await asyncio.sleep(0.01)
        assert tls.contexts is before
        ca.files("node")  # the other half
        while tls.contexts is before:
            await asyncio.sleep(0.01)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert caplog.text.count("stay in use") == 1


async def test_a_certificate_that_is_about_to_end_is_told_of_once(
    ca: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    now = datetime.now(UTC)
    files = ca.files("node", not_before=now - timedelta(days=30), not_after=now + timedelta(hours=40))
    tls = member_tls(files)
    assert tls is not None
    watching = asyncio.create_task(tls.watch(0.01))
    await asyncio.sleep(0.1)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert caplog.text.count("expires in 40.0 hours") == 1
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_whatever_is_in_the_files_no_other_error_comes_of_it(ca: Authority) -> None:
    files, draw = ca.files("node"), random.Random(7)
    whole = {path: path.read_bytes() for path in (files.cert, files.key, files.ca) if path}
    for _ in range(150):
        path = draw.choice(list(whole))
        path.write_bytes(_garbled(whole[path], draw))
        with contextlib.suppress(SettingsError):
            member_tls(files)
        path.write_bytes(whole[path])


def _garbled(pem: bytes, draw: random.Random) -> bytes:
    """A byte or two of what the armour holds are others."""
    first, *middle, last = pem.strip().split(b"\n")
    content = bytearray(base64.b64decode(b"".join(middle)))
    for _ in range(draw.randint(1, 2)):
        content[draw.randrange(len(content))] = draw.randrange(256)
    return b"\n".join((first, base64.b64encode(content), last))
