"""The files around an identity key: the key itself, and after a rotation the old key and the statement of the move.

    node.key        the identity in use
    node.key.old    the one before, kept while anybody may believe the move
    node.key.moved  says that the old one is the new one, signed by both

Knows names and order of writing: a crash at any point leaves a key in use.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import time

from cli.failures import CommandError
from routing.errors import RemoteError
from routing.identity import Identity
from routing.moved import Moved, read_moved, sign_moved


def load_or_make(path: Path) -> Identity:
    """The identity in a key file, made there at the first use. Raises `SettingsError`."""
    if path.exists():
        return Identity.load(path)
    identity = Identity.generate()
    identity.save(path)
    return identity


def rotate(path: Path, *, now: Callable[[], float] = time) -> Moved:
    """Put a new key in the place of an old one, and say so with both. Raises `CommandError` during an earlier move."""
    old = Identity.load(path)
    if live_move(path, old, now=now):
        raise CommandError(
            f"{path} was rotated less than 7 days ago, and lists may still know only the key before it: "
            "rotate again once they know this one"
        )
    fresh, kept, moved = (path.with_name(path.name + ending) for ending in (".new", ".old", ".moved"))
    for leftover in (fresh, kept, moved):  # of a rotation that is over, or was interrupted before it counted
        leftover.unlink(missing_ok=True)
    new = Identity.generate()
    new.save(fresh)
    old.save(kept)
    moved.write_bytes(statement := sign_moved(old, new, now()))
    fresh.replace(path)
    return read_moved(statement)


def live_move(path: Path, identity: Identity, *, now: Callable[[], float] = time) -> bytes:
    """The statement that this identity was another, while it holds; empty otherwise."""
    with suppress(OSError, RemoteError):
        content = path.with_name(path.name + ".moved").read_bytes()
        moved = read_moved(content)
        if moved.new_key == identity.public_key and moved.is_live(now()):
            return content
    return b""
