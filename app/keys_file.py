"""The file of hashed API keys: read, looked at again when it changes, and written one entry at a time.

    [[keys]]
    name = "anna"
    sha256 = "9f86d0…"               # of the key, in hex
    models = ["smollm2"]             # left out: every model
    requests_per_minute = 60         # left out, as the next: what the gateway's settings say
    max_concurrent = 4
    expires = 2027-06-30T00:00:00Z   # left out: never

An entry that is removed is a key that is revoked. A version that cannot be used changes nothing, and is told once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import stat
import time
import tomllib
from collections.abc import Callable
from datetime import UTC, date, datetime
from math import inf
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from app.keys import ApiKey, KeyRing, digest_of
from app.settings import GatewaySettings
from app.whole_file import write_whole
from routing.errors import SettingsError
from routing.private_file import read_private

log = logging.getLogger(__name__)

MAX_BYTES = 4 << 20  # 10,000 keys
LOOK_S = 0.2  # between looks at the file
SETTLE_S = 0.2  # an editor empties a file before it fills it: what is read must have been still for so long
# Its group may read it, as Kubernetes has it with secrets: hashes of long random keys open nothing.
NOT_ALLOWED = stat.S_IWGRP | stat.S_IRWXO
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
SHA256 = re.compile(r"[0-9A-Fa-f]{64}")
HEADER = "# API keys of a Diffuse gateway. Removing an entry revokes its key.\n"

Stamp = tuple[int, int, int]  # mtime in ns, size, inode


def _plain(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ValueError("write it in 1 to 64 letters, digits and . _ @ -, a letter or digit first")
    return name


def _hexadecimal(digest: str) -> str:
    if not SHA256.fullmatch(digest):
        raise ValueError("a SHA-256 hash has 64 hex digits")
    return digest.lower()


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("write it in printable characters")
    return text


ModelName = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_printable)]


class KeyEntry(BaseModel):
    """One entry. Unknown names are refused: a misspelt limit must not be none."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: Annotated[str, AfterValidator(_plain)]
    sha256: Annotated[str, AfterValidator(_hexadecimal), Field(repr=False)]
    models: Annotated[tuple[ModelName, ...] | None, Field(min_length=1)] = None
    requests_per_minute: Annotated[int | None, Field(ge=1)] = None
    max_concurrent: Annotated[int | None, Field(ge=1)] = None
    expires: datetime | date | None = None

    @property
    def key(self) -> ApiKey:
        return ApiKey(
            bytes.fromhex(self.sha256),
            self.name,
            None if self.models is None else frozenset(self.models),
            self.requests_per_minute,
            self.max_concurrent,
            _unix(self.expires),
        )


class KeyEntries(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    keys: tuple[KeyEntry, ...] = ()


class KeysFile:
    """The keys of one file, as it is now. Raises `SettingsError` for one that cannot be used at first."""

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._clock = clock
        self._now = now
        self._stamp = _stamp(path)
        self._keys = read_keys(path)
        self._looked_at = clock()

    def current(self) -> tuple[ApiKey, ...]:
        """Return the keys of the last version that could be used."""
        if self._clock() - self._looked_at >= LOOK_S:
            self._look()
        return self._keys

    def _look(self) -> None:
        self._looked_at = self._clock()
        stamp = _stamp(self._path)
        if stamp == self._stamp or abs(self._now() - stamp[0] / 1e9) < SETTLE_S:
            return
        self._stamp = stamp
        try:
            self._keys = read_keys(self._path)
        except SettingsError as error:
            log.error("%s; the keys from before stay in use", error)  # noqa: TRY400 - the text says it all
            return
        log.info("%s was read again: %d keys", self._path, len(self._keys))


def ring_of(settings: GatewaySettings) -> KeyRing:
    """The keys that settings name. Raises `SettingsError` for a file that cannot be used."""
    fixed = [ApiKey(digest_of(key.get_secret_value())) for key in settings.api_keys]
    anyone = ApiKey(
        requests_per_minute=settings.requests_per_minute, max_concurrent=settings.max_requests_per_key
    )
    source = None if settings.keys_file is None else KeysFile(settings.keys_file)
    return KeyRing(fixed, source, anyone=anyone)


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Read a file of keys. Raises `SettingsError` for one that is broken, or that others may read or change."""
    content = read_private(
        path, "keys file", MAX_BYTES + 1, not_allowed=NOT_ALLOWED, trouble="is open to others"
    )
    return tuple(entry.key for entry in _entries(path, content))


def append_entry(path: Path, entry: KeyEntry) -> None:
    """Add an entry to a file, which is made where there is none. Raises `SettingsError`; then nothing is changed."""
    present = read_keys(path) if path.exists() else ()
    if any(key.name == entry.name for key in present):
        raise SettingsError(
            f"{path} has a key named {entry.name} already: remove its entry, or take another name"
        )
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        before = path.read_text("utf-8") if present or path.exists() else HEADER
        after = before.rstrip("\n") + "\n\n" + _written(entry)
        _entries(path, after.encode())  # a file in another hand may not bear one more entry at its end
        write_whole(path, after.encode())
    except OSError as error:
        raise SettingsError(f"cannot write the keys file {path}: {error.strerror}") from error


def _entries(path: Path, content: bytes) -> tuple[KeyEntry, ...]:
    if len(content) > MAX_BYTES:
        raise SettingsError(f"the keys file {path} is larger than {MAX_BYTES >> 20} MiB")
    try:
        entries = KeyEntries.model_validate(tomllib.loads(content.decode())).keys
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"the keys file {path} is no TOML: {_first_line(error)}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(step) for step in first["loc"])
        raise SettingsError(f"the keys file {path}: {place}: {_text_of(first)}") from None
    for what in ("name", "sha256"):
        values = [getattr(entry, what) for entry in entries]
        if len(set(values)) < len(values):
            raise SettingsError(f"the keys file {path} has two keys of one {what}")
    return entries


def _written(entry: KeyEntry) -> str:
    """An entry as text. Names of models are printable, so that JSON's strings are TOML's."""
    limits = ("requests_per_minute", "max_concurrent")
    lines = ["[[keys]]", f'name = "{entry.name}"', f'sha256 = "{entry.sha256}"']
    if entry.models is not None:
        lines.append(f"models = {json.dumps(list(entry.models), ensure_ascii=False)}")
    lines += [f"{limit} = {value}" for limit in limits if (value := getattr(entry, limit)) is not None]
    if isinstance(entry.expires, datetime):
        lines.append(f"expires = {entry.expires.astimezone(UTC).strftime('%Y-%m-%dT%H:%M:%SZ')}")
    return "\n".join(lines) + "\n"


def _stamp(path: Path) -> Stamp:
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino
    return 0, -1, 0


def _unix(expires: datetime | date | None) -> float:
    """Without a zone it is this machine's time; a day alone means its first moment, in UTC."""
    if expires is None:
        return inf
    if not isinstance(expires, datetime):
        expires = datetime(expires.year, expires.month, expires.day, tzinfo=UTC)
    return expires.timestamp()


def _text_of(error: ErrorDetails) -> str:
    return error["msg"].removeprefix("Value error, ")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
