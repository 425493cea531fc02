"""Which swarm we belong to, and as whom: network id, shared secrets, allow list, guest token.

Knows files and their permissions; what is read goes to `routing` and is never printed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from routing.errors import SettingsError
from routing.private_file import read_private

if TYPE_CHECKING:
    from routing.allow_list import AllowList
    from routing.tls import Tls
    from routing.tls_files import TlsFiles
    from routing.types import NodeAddress

PSK_SIZE: Final = 32
MAX_FILE: Final = 4096  # B, of a file with secrets or a token
_DOMAIN: Final = b"diffuse/network/1"


@dataclass(frozen=True, slots=True)
class Membership:
    """What a peer must know of a swarm to take part in it."""

    network_id: bytes
    psk: bytes | None = field(default=None, repr=False)  # for dialling
    accepted_psks: tuple[bytes, ...] = field(default=(), repr=False)  # others taken while secrets change
    tls: Tls | None = field(default=None, repr=False)  # around links; None: plain websockets


def read_membership(
    network: str, psk_file: Path | None, tls: TlsFiles | None = None, *, listens: bool = False
) -> Membership:
    """Read `--network`, `--psk-file` and the files of TLS; `listens`: for links of others. Raises `SettingsError`."""
    around = None if tls is None else _tls(tls, listens=listens)
    if psk_file is None:
        return Membership(network_id(network), tls=around)
    psk, *accepted = read_psks(psk_file)
    return Membership(network_id(network), psk, tuple(accepted), around)


def _tls(files: TlsFiles, *, listens: bool) -> Tls | None:
    from routing.tls import guest_tls, member_tls

    return member_tls(files) if listens else guest_tls(files)


def network_id(name: str) -> bytes:
    """The 32 bytes of a network: 64 hex digits as they stand, any other name through SHA-256."""
    if len(name) == 64 and all(digit in "0123456789abcdefABCDEF" for digit in name):
        return bytes.fromhex(name)
    return hashlib.sha256(_DOMAIN + name.encode()).digest()


def read_psks(path: Path) -> tuple[bytes, ...]:
    """Read a swarm's secrets: 32 raw bytes, or a line of 64 hex digits for each of one or two.

    The first one is for dialling. Raises `SettingsError`, also if the file is not private.
    """
    content = read_private(path, "secret", MAX_FILE)
    if len(content) == PSK_SIZE:
        return (content,)
    secrets = _hex_lines(content)
    if not 1 <= len(secrets) <= 2 or any(len(secret) != PSK_SIZE for secret in secrets):
        raise SettingsError(
            f"{path} does not hold {PSK_SIZE} bytes (or two secrets, one a line): make it with "
            f"`openssl rand -hex {PSK_SIZE} > {path}` and chmod 600 {path}"
        )
    return tuple(dict.fromkeys(secrets))


def read_prefix_secret(path: Path | None) -> bytes:
    """Read the secret of `--prefix-secret`; empty without one. Raises `SettingsError`, also if not private."""
    if path is None:
        return b""
    content = read_private(path, "secret", MAX_FILE)
    secrets = (content,) if len(content) == PSK_SIZE else _hex_lines(content)
    if len(secrets) != 1 or len(secrets[0]) != PSK_SIZE:
        raise SettingsError(
            f"--prefix-secret {path} does not hold {PSK_SIZE} bytes: make it with "
            f"`openssl rand -hex {PSK_SIZE} > {path}` and chmod 600 {path}"
        )
    return secrets[0]


def read_token(path: Path | None) -> bytes:
    """Read the guest token of `--token-file`; empty without one. Raises `SettingsError`, also if not private."""
    if path is None:
        return b""
    from routing.guest_token import parse_guest_token

    text = read_private(path, "guest token", MAX_FILE).decode("ascii", errors="replace")
    try:
        return parse_guest_token(text)
    except SettingsError as error:
        raise SettingsError(f"--token-file {path}: {error}") from error


def read_allow_list(
    path: Path | None, membership: Membership, always: Iterable[NodeAddress] = ()
) -> AllowList | None:
    """The allow list of `--allow-file`, with whom the operator named; None without one. Raises `SettingsError`."""
    if path is None:
        return None
    from routing.allow_list import AllowList

    named = frozenset(address.node_id for address in always)
    return AllowList(path, membership.network_id, always=named)


def _hex_lines(content: bytes) -> list[bytes]:
    """The bytes that each line stands for; nothing if one of them is no hex."""
    try:
        return [bytes.fromhex(line) for line in content.decode("ascii").split()]
    except ValueError:
        return []
