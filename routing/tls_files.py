"""The files of TLS: a certificate with its chain, its key, and a CA. What is wrong with them is said here.

The texts name the flag and the file, never what a key file holds.
"""

from __future__ import annotations

import logging
import os
import stat
import warnings
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from routing.errors import SettingsError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

logger = logging.getLogger(__name__)

MAX_FILE: Final = 4 << 20  # B: a system's whole bundle of authorities has 0.3 MB


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """What `--tls-cert`, `--tls-key` and `--tls-ca` name."""

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None


def stamp_of(files: TlsFiles) -> tuple[tuple[int, int, int] | None, ...]:
    """What changes whenever one of the files does; links, as certbot and Kubernetes use them, are followed."""
    return tuple(None if path is None else _stamp(path) for path in (files.cert, files.key, files.ca))


def check_own(files: TlsFiles) -> tuple[float, float]:
    """Look at certificate and key; return from when to when the certificate is good. Raises `SettingsError`."""
    if files.cert is None or files.key is None:
        missing, given = ("--tls-cert", "--tls-key") if files.cert is None else ("--tls-key", "--tls-cert")
        raise SettingsError(f"{missing} is missing: {given} needs it, they are a pair")
    certificate = _certificates(files.cert, "--tls-cert")[0]
    _check_time(certificate, f"--tls-cert {files.cert}")
    key = _private_key(files.key)
    if _bytes_of(key.public_key()) != _certified(certificate, files.cert):
        raise SettingsError(
            f"--tls-key {files.key} is not the key of --tls-cert {files.cert}: give the pair that was made together "
            "(the certificate itself comes first in its file, its chain after it)"
        )
    return certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()


def check_ca(path: Path) -> None:
    """Look at the CA's certificates; one that is good now will do. Raises `SettingsError`."""
    trouble: SettingsError | None = None
    for certificate in _certificates(path, "--tls-ca"):
        try:
            _check_time(certificate, f"--tls-ca {path}")
        except SettingsError as error:
            trouble = error
        else:
            return
    assert trouble is not None
    raise trouble


def _certificates(path: Path, flag: str) -> list[Certificate]:
    from cryptography import x509

    content = _read(path, flag)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old certificates in a system's bundle
        try:
            return x509.load_pem_x509_certificates(content)
        except (ValueError, x509.InvalidVersion) as error:
            raise SettingsError(
                f"{flag} {path} holds no certificate that can be read: it must be PEM, with "
                '"-----BEGIN CERTIFICATE-----"'
            ) from error


def _certified(certificate: Certificate, path: Path) -> bytes:
    """The public key that a certificate is for."""
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        return _bytes_of(certificate.public_key())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SettingsError(f"--tls-cert {path} is for a key of no known kind: {error}") from error


def _private_key(path: Path) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    content = _read(path, "--tls-key")
    _warn_open(path)
    try:
        return load_pem_private_key(content, password=None)
    except TypeError as error:
        raise SettingsError(
            f"--tls-key {path} is encrypted, and nobody is there to type its password: write it out plain with "
            f"`openssl pkey -in {path} -out plain.key`, and chmod 600 plain.key"
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SettingsError(
            f'--tls-key {path} holds no key that can be read: it must be PEM, with "-----BEGIN PRIVATE KEY-----"'
        ) from error


def _read(path: Path, flag: str) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE + 1)
    except OSError as error:
        raise SettingsError(f"{flag} {path}: {error.strerror or error}") from error
    if len(content) > MAX_FILE:
        raise SettingsError(f"{flag} {path} is larger than any such file")
    return content


def _warn_open(path: Path) -> None:
    if os.name == "posix" and path.stat().st_mode & stat.S_IROTH:
        logger.warning("--tls-key %s can be read by every user of this machine: chmod 600 it", path)


def _check_time(certificate: Certificate, name: str) -> None:
    now = datetime.now(UTC)
    if certificate.not_valid_after_utc < now:
        raise SettingsError(f"{name} has expired on {_day(certificate.not_valid_after_utc)}: renew it")
    if certificate.not_valid_before_utc > now:
        begins = _day(certificate.not_valid_before_utc)
        raise SettingsError(f"{name} is not good before {begins}: is this machine's clock right?")


def _day(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M} UTC"


def _bytes_of(public: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    written: bytes = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return written


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
