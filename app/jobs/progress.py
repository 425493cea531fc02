"""How far a job is that runs now, and how another gateway is told of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields

import msgpack

STEPS_SHARE = 95  # percent of a job's progress; the rest is decoding and encoding


@dataclass(slots=True)
class Progress:
    """The last of what is known of a running job."""

    step: int = 0
    steps: int = 0
    seconds_per_step: float = 0.0
    patches: str = ""  # why steps run as patches or do not
    thumbnail: bytes = field(default=b"", repr=False)

    @property
    def percent(self) -> int:
        return STEPS_SHARE * self.step // self.steps if self.steps else 0

    def encode(self) -> bytes:
        return bytes(msgpack.packb(asdict(self)))

    @classmethod
    def decode(cls, told: bytes) -> Progress:
        """Read what `encode` wrote; fields of another version are left out."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in msgpack.unpackb(told).items() if name in known})
