"""Every error that crosses a link, with the number peers see and the advice callers follow.

The tree (drawn once, here):

    DiffuseError
    ├── LocalError            we were asked for something that cannot be done here
    │   └── SettingsError     a key, flag or file of ours is wrong
    ├── RemoteError           the peer, or the network to it, broke; carries `hop` where known
    │   ├── LinkError         1xx: time-outs and lost links
    │   ├── SecurityError     2xx: never retried with the same peer silently
    │   ├── RelayError        3xx: a sentinel cannot or will not pass us on
    │   ├── ProtocolError     4xx: the peer broke the rules of the wire
    │   └── WorkError         5xx: the peer could not do the work
    └── NoRouteError          no set of live nodes covers every layer

Texts name numbers, sizes and layers. They never hold prompts, tokens, hidden states or keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class ErrorCode(IntEnum):
    """Stable numbers on the wire."""

    TIMEOUT = 101
    LINK_LOST = 102
    KEEPALIVE = 103
    HANDSHAKE = 201
    ID_MISMATCH = 202
    CERTIFICATE_EXPIRED = 203
    NETWORK = 204
    VERSION = 205
    DECRYPT = 206
    NOT_ALLOWED = 207
    TLS = 208
    NO_RESERVATION = 301
    PEER_GONE = 302
    QUOTA = 303
    RELAY_FULL = 304
    GOING_AWAY = 305
    SUPERSEDED = 306
    MALFORMED = 401
    TOO_BIG = 402
    FLOW = 403
    STATE = 404
    BUSY = 501
    NO_SLICE = 502
    STEP = 503
    DEADLINE = 504
    HOP_LOST = 505
    COMPUTE = 506
    CANCELLED = 507
    NO_SESSION = 508
    NO_ROOM = 509


class DiffuseError(Exception):
    """The root: anything this project raises on purpose."""


class LocalError(DiffuseError):
    """We were asked for something that cannot be done here."""


class SettingsError(LocalError):
    """A key, flag or file of ours is wrong; the text says how to mend it."""


class TooLargeError(LocalError):
    """A pass over blocks is larger than any node takes; the text has the numbers."""


class NoRouteError(DiffuseError):
    """No set of live nodes covers every layer, or an end that a thin gateway needs, as the request wants it.

    `missing` holds the half-open global layer ranges that nobody serves, `missing_ends` "opening" or "closing";
    `reason` names what the request asked for that made a route impossible, "" where layers or ends are missing.
    """

    def __init__(
        self,
        missing: Sequence[tuple[int, int]],
        model: str = "",
        missing_ends: Sequence[str] = (),
        reason: str = "",
    ) -> None:
        parts = ["layers " + ", ".join(f"{start}:{end}" for start, end in missing)] if missing else []
        parts += [f"the {end} end" for end in missing_ends]
        of_model = f" of {model}" if model else ""
        text = f"no node serves {' and '.join(parts)}{of_model}" if parts else f"there is no route{of_model}"
        super().__init__(f"{text}: {reason}" if reason else text)
        self.missing = tuple(missing)
        self.missing_ends = tuple(missing_ends)
        self.reason = reason


class RemoteError(DiffuseError):
    """The peer, or the network to it, broke."""

    def __init__(
        self,
        code: ErrorCode,
        text: str = "",
        *,
        hop: int | None = None,
        retry_ms: int = 0,
        room: int = 0,
    ) -> None:
        super().__init__(f"E{int(code)} {code.name}: {text}" if text else f"E{int(code)} {code.name}")
        self.code = code
        self.text = text
        self.hop = hop
        self.retry_ms = retry_ms
        self.room = room  # NO_ROOM: positions that a session can have there at most


class LinkError(RemoteError):
    """1xx: time-outs and lost links. Dial again, or take another node."""


class SecurityError(RemoteError):
    """2xx: the peer is not who it should be, or what it sent does not authenticate."""


class RelayError(RemoteError):
    """3xx: the sentinel has no way to the node, or no room. Another sentinel, or a direct address, may do."""


class ProtocolError(RemoteError):
    """4xx: the peer broke the rules of the wire."""


class WorkError(RemoteError):
    """5xx: the peer could not do the work it was asked for."""


def remote_error(
    code: int, text: str = "", *, hop: int | None = None, retry_ms: int = 0, room: int = 0
) -> RemoteError:
    """Build the error class that a code on the wire stands for; an unknown number is a `ProtocolError`."""
    try:
        known = ErrorCode(code)
    except ValueError:
        return ProtocolError(ErrorCode.MALFORMED, f"unknown error code {code}", hop=hop)
    families: dict[int, type[RemoteError]] = {
        1: LinkError,
        2: SecurityError,
        3: RelayError,
        4: ProtocolError,
        5: WorkError,
    }
    return families[known // 100](known, text, hop=hop, retry_ms=retry_ms, room=room)
