"""Who may ask, for which models and how much: API keys, of which only hashes are held.

Plain keys come from the settings, hashed ones from a file that is looked at again while the gateway runs. Knows no
HTTP; the limits are kept by whoever admits requests.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key by its digest, and what it may do. None: no limit."""

    digest: bytes = field(default=b"", repr=False)  # SHA-256
    name: str = ""
    models: frozenset[str] | None = None  # ids or aliases
    requests_per_minute: int | None = None
    max_concurrent: int | None = None  # answers at once, those that wait for a place too
    expires_s: float = inf  # Unix seconds

    def may_use(self, *names: str) -> bool:
        """Whether it may use a model of these names."""
        return self.models is None or not self.models.isdisjoint(names)


ANYONE = ApiKey()  # where no key is asked for, and the gateway itself


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks one request, and for how long they wait for the first byte of its answer."""

    key: ApiKey = ANYONE
    patience_s: float = inf

    @property
    def tenant(self) -> bytes:
        """Whose answers may share what was computed: a digest of the key; b"" where none is asked for."""
        return self.key.digest


class KeySource(Protocol):
    """Keys that may change while the gateway runs."""

    def current(self) -> tuple[ApiKey, ...]:
        """Return the keys now: the same tuple for as long as they stay the same."""
        ...


class KeyRing:
    """Every key that opens this gateway. It stays closed when the last one is taken away.

    Keys without limits of their own have those of `anyone`, who is also the caller where no key is asked for.
    """

    def __init__(
        self,
        fixed: Iterable[ApiKey] = (),
        source: KeySource | None = None,
        *,
        anyone: ApiKey = ANYONE,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.anyone = anyone
        self._fixed = tuple(fixed)
        self._source = source
        self._now = now
        self._blind = secrets.token_bytes(32)
        self._read: tuple[ApiKey, ...] = ()  # what the index was made of, beside the fixed ones
        self._index = self._indexed()
        self.is_required = bool(self._fixed) or source is not None

    def find(self, digest: bytes) -> ApiKey | None:
        """Return the key of this digest, if it opens now.

        In constant time: the digest is blinded with a secret of this process, so how long the look-up takes tells
        nothing of the digests that are known.
        """
        if self._source is not None and (read := self._source.current()) is not self._read:
            self._read = read
            self._index = self._indexed()
        known = self._index.get(self._blinded(digest))
        if known is None or not hmac.compare_digest(known.digest, digest) or known.expires_s <= self._now():
            return None
        return known

    def _indexed(self) -> dict[bytes, ApiKey]:
        keys = (self._with_limits(key) for key in (*self._fixed, *self._read))
        return {self._blinded(key.digest): key for key in keys}

    def _with_limits(self, key: ApiKey) -> ApiKey:
        return replace(
            key,
            requests_per_minute=key.requests_per_minute or self.anyone.requests_per_minute,
            max_concurrent=key.max_concurrent or self.anyone.max_concurrent,
        )

    def _blinded(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._blind, digest_size=32).digest()


def digest_of(key: str) -> bytes:
    """Keys are long and random, so a plain hash is enough to keep them out of files and memory dumps."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
