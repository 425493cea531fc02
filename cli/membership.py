"""Which swarm we belong to: the network id and the shared secret behind two flags.

Knows files and their permissions; what is read goes to `routing` and is never printed.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from routing.errors import SettingsError

PSK_SIZE: Final = 32
_DOMAIN: Final = b"diffuse/network/1"


@dataclass(frozen=True, slots=True)
class Membership:
    """What a peer must know of a swarm to take part in it."""

    network_id: bytes
    psk: bytes | None = field(default=None, repr=False)


def read_membership(network: str, psk_file: Path | None) -> Membership:
    """Read `--network` and `--psk-file`. Raises `SettingsError`."""
    return Membership(network_id(network), read_psk(psk_file) if psk_file else None)


def network_id(name: str) -> bytes:
    """The 32 bytes of a network: 64 hex digits as they stand, any other name through SHA-256."""
    if len(name) == 64 and all(digit in "0123456789abcdefABCDEF" for digit in name):
        return bytes.fromhex(name)
    return hashlib.sha256(_DOMAIN + name.encode()).digest()


def read_psk(path: Path) -> bytes:
    """Read a swarm's secret: 32 raw bytes, or 64 hex digits. Raises `SettingsError`, also if not private."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read(3 * PSK_SIZE)
    except OSError as error:
        raise SettingsError(f"cannot read the secret {path}: {error.strerror}") from error
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SettingsError(f"the secret {path} can be read by others: run chmod 600 {path}")
    if len(secret) == PSK_SIZE:
        return secret
    try:
        decoded = bytes.fromhex(secret.decode("ascii").strip())
    except ValueError:
        decoded = b""
    if len(decoded) != PSK_SIZE:
        raise SettingsError(
            f"{path} does not hold {PSK_SIZE} bytes: make it with `openssl rand -hex {PSK_SIZE} > {path}` "
            f"and chmod 600 {path}"
        )
    return decoded
