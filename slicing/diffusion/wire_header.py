"""The header of a call or of its answer: JSON that says which tensors follow and how the call is to be run.

What comes from elsewhere is read strictly: every field, number and length, before anything is made of it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from slicing.diffusion.calls import DIGEST_BYTES, MAX_BLOCKS, MAX_PLAN_BYTES, MAX_SLOTS, MAX_STREAMS
from slicing.diffusion.patches import Cut, PatchesRefused
from slicing.diffusion.wire_tensors import TensorEntry, WireForm
from slicing.errors import CallError

MAX_HEADER_BYTES = 1 << 20  # 8,192 slots of about 100 bytes; reading more would hold up other threads
MAX_MODE = 2  # whole, whole and keep, patch
MAX_NUMBER = (1 << 32) - 1
MAX_VERDICTS = 128  # one of each hop
MAX_TEXT = 200  # characters of a verdict's reason
_FIELDS = (
    "form",
    "mode",
    "pass",
    "cut",
    "extrapolate",
    "fresh",
    "plan",
    "first",
    "plan_bytes",
    "verdicts",
    "streams",
    "slots",
)


@dataclass(frozen=True)
class HopVerdict:
    """What the check at one hop found of patches there."""

    hop: int
    allowed: bool
    reason: str = ""
    mode: str = ""

    def to_json(self) -> list[object]:
        """As it stands in a header."""
        return [self.hop, self.allowed, _printable(self.reason), _printable(self.mode)]

    @classmethod
    def from_json(cls, value: object) -> HopVerdict:
        """Read one that came from elsewhere. Raises `CallError`."""
        match value:
            case [int(hop), bool(allowed), str(reason), str(mode)]:
                if type(hop) is int and 0 <= hop < MAX_VERDICTS and max(len(reason), len(mode)) <= MAX_TEXT:
                    return cls(hop, allowed, _printable(reason), _printable(mode))
        raise CallError("a call's header holds a verdict that is none")


@dataclass
class CallHeader:
    """How a call is run, and, of an answer, what every hop found. The last three are set by whoever packs or reads."""

    mode: int = 0
    pass_number: int = 0  # the same for all patches of one pass; what is sent again is told by it
    cut: Cut | None = None
    extrapolate: float = 0.0
    verdicts: list[HopVerdict] = field(default_factory=list)
    plan_digest: bytes = b""
    first_block: int = 0  # of the plan: 0 but where blocks are sent one by one
    form: WireForm = WireForm.RAW


@dataclass(frozen=True)
class SlotEntry:
    """One slot: its bytes follow (`entry`), to be kept or not, or it is one that was sent before (`entry` is None)."""

    entry: TensorEntry | None
    digest: bytes | None = None  # kept under it; None: not kept

    def to_json(self) -> list[object]:
        """As it stands in a header."""
        digest = None if self.digest is None else self.digest.hex()
        return [digest] if self.entry is None else [digest, *self.entry.to_json()]

    @classmethod
    def from_json(cls, value: object) -> SlotEntry | None:
        """Read one that came from elsewhere; None is a slot that only blocks before use. Raises `CallError`."""
        match value:
            case None:
                return None
            case [str(digest)]:
                return cls(None, read_digest(digest))
            case [digest, *rest] if digest is None or type(digest) is str:
                entry = TensorEntry.from_json(rest)
                if entry.form is WireForm.RAW:
                    return cls(entry, None if digest is None else read_digest(digest))
        raise CallError("a call's header names a slot that is none")


@dataclass(frozen=True)
class Contents:
    """What follows a header, in this order: the plan's JSON, streams, slots."""

    is_fresh: bool  # the sender has forgotten what it sent: the receiver must, too
    plan_bytes: int
    streams: tuple[TensorEntry, ...]
    slots: tuple[SlotEntry | None, ...]

    @property
    def size_bytes(self) -> int:
        """All that must follow the header."""
        slots = (slot.entry.size_bytes for slot in self.slots if slot is not None and slot.entry is not None)
        return self.plan_bytes + sum(stream.size_bytes for stream in self.streams) + sum(slots)

    def expanded_bytes(self, form: WireForm) -> int:
        """What tensors take beyond what is sent of them: their rows come in runs, or in a shorter form.

        Where differences are sent, streams are kept besides, as they came and as they will be sent on.
        """
        slots = [slot.entry for slot in self.slots if slot is not None and slot.entry is not None]
        more = sum(max(0, entry.full_bytes - entry.size_bytes) for entry in (*slots, *self.streams))
        kept = 2 if form is WireForm.INT8_DELTA else 0
        return more + kept * sum(stream.full_bytes for stream in self.streams)


def encode_header(header: CallHeader, contents: Contents) -> bytes:
    """Return the JSON. Raises `CallError` where it is longer than anybody reads."""
    values = (
        header.form.value,
        int(header.mode),
        header.pass_number,
        None if header.cut is None else header.cut.to_json(),
        float(header.extrapolate),
        contents.is_fresh,
        header.plan_digest.hex(),
        header.first_block,
        contents.plan_bytes,
        [verdict.to_json() for verdict in header.verdicts],
        [stream.to_json() for stream in contents.streams],
        [None if slot is None else slot.to_json() for slot in contents.slots],
    )
    encoded = json.dumps(
        dict(zip(_FIELDS, values, strict=True)), separators=(",", ":"), allow_nan=False
    ).encode()
    if len(encoded) > MAX_HEADER_BYTES:
        raise CallError(f"a call's header of {len(encoded)} bytes is too long")
    return encoded


def decode_header(encoded: bytes) -> tuple[CallHeader, Contents]:
    """Read a header that came from elsewhere. Raises `CallError`."""
    try:
        fields = json.loads(encoded.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise CallError("a call's header is not JSON") from None
    if not isinstance(fields, dict) or tuple(fields) != _FIELDS:
        raise CallError("a call's header has other fields than a call")
    plan = fields["plan"]
    header = CallHeader(
        _number(fields["mode"], MAX_MODE),
        _number(fields["pass"], MAX_NUMBER),
        _read_cut(fields["cut"]),
        _read_share(fields["extrapolate"]),
        [HopVerdict.from_json(item) for item in _items(fields["verdicts"], MAX_VERDICTS)],
        b"" if plan == "" else read_digest(plan),
        _number(fields["first"], MAX_BLOCKS),
        _read_form(fields["form"]),
    )
    if type(fields["fresh"]) is not bool:
        raise CallError("a call's header does not say whether it is the first")
    contents = Contents(
        fields["fresh"],
        _number(fields["plan_bytes"], MAX_PLAN_BYTES),
        tuple(TensorEntry.from_json(item) for item in _items(fields["streams"], MAX_STREAMS)),
        tuple(SlotEntry.from_json(item) for item in _items(fields["slots"], MAX_SLOTS)),
    )
    return header, contents


def read_digest(value: Any) -> bytes:
    """16 bytes from hexadecimal digits. Raises `CallError`."""
    if type(value) is str and len(value) == 2 * DIGEST_BYTES and value.isascii() and value.isalnum():
        try:
            return bytes.fromhex(value)
        except ValueError:
            pass
    raise CallError("a call's header holds a digest that is none")


def _read_form(value: Any) -> WireForm:
    if value in tuple(WireForm):
        return WireForm(value)
    raise CallError("a call's header names no known form")


def _read_cut(value: Any) -> Cut | None:
    try:
        return None if value is None else Cut.from_json(value)
    except (PatchesRefused, TypeError):
        raise CallError("a call's header cuts no patch") from None


def _read_share(value: Any) -> float:
    if type(value) in (int, float) and math.isfinite(value) and 0 <= value <= 1:
        return float(value)
    raise CallError("a call's header extrapolates by no share")


def _number(value: Any, most: int) -> int:
    if type(value) is int and 0 <= value <= most:
        return value
    raise CallError("a call's header holds a number out of range")


def _items(value: Any, most: int) -> list[Any]:
    if isinstance(value, list) and len(value) <= most:
        return value
    raise CallError("a call's header holds no list, or one too long")


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text[:MAX_TEXT])
