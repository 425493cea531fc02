"""What gateways remember between requests, and share where several stand behind one address: the interface.

Three forms: memory, one file (SQLite), Redis. None of them knows HTTP, engines or what an API key is: keys are names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal, Protocol

from app.jobs.job import Job
from app.state.trouble import Part

ShelfName = Literal["records", "pictures"]


class StateError(Exception):
    """The store cannot be reached or used; the text may name a file, never an address or a secret."""


class StateInUseError(StateError):
    """Another gateway has the file."""


class StateFullError(StateError):
    """The store takes no more; what is there can be read and removed."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What came of taking from a limit of requests in a moving minute."""

    wait_s: float  # 0.0: granted; else when it is worth asking again
    remaining: int  # places left in this minute
    reset_s: float  # until the oldest taken place is free again; 0.0 when none is taken

    @property
    def is_granted(self) -> bool:
        return self.wait_s == 0.0


@dataclass(frozen=True, slots=True)
class Bound:
    """How much a shelf holds: numbers of values, or bytes of them, and each for how long."""

    total: int
    lifetime_s: float
    counts_bytes: bool = False


@dataclass(frozen=True, slots=True)
class Kept:
    """A value and how long it will still be there."""

    value: bytes = field(repr=False)
    seconds_left: float


@dataclass(frozen=True, slots=True)
class JobRow:
    """A video job with what only the gateways know of it."""

    job: Job
    gateway_id: str  # whose process makes it
    size_bytes: int  # what it and its files take


@dataclass(frozen=True, slots=True)
class JobBounds:
    """How much all jobs of a store may be together."""

    max_jobs: int
    max_bytes: int
    lifetime_s: float  # of one that is over


class Shelf(Protocol):
    """Values that wait a while to be fetched; the oldest make room."""

    async def put(self, name: str, value: bytes) -> None:
        """Keep a value, in place of an older one of that name. One that never fits is not kept."""

    async def get(self, name: str) -> Kept | None: ...

    async def remove(self, name: str) -> None: ...


class JobTable(Protocol):
    """Video jobs by owner. A change of one that is over or gone does nothing and says so."""

    async def add(self, row: JobRow, bounds: JobBounds) -> bool:
        """Keep a new job; False: there is no room."""

    async def get(self, job_id: str, owner: str) -> JobRow | None: ...

    async def rows(self, owner: str | None = None) -> list[JobRow]:
        """The jobs of one owner, or all, oldest first."""

    async def change(self, job: Job, bounds: JobBounds) -> bool:
        """Keep another state of a job that is not over; False: it is, or was removed."""

    async def reserve(self, job_id: str, owner: str, size_bytes: int, bounds: JobBounds) -> bool:
        """Note how much a job will take; False: there is no room."""

    async def remove(self, job_id: str, owner: str) -> None: ...

    async def note(self, job_id: str, told: bytes, lifetime_s: float) -> None:
        """Keep what is known of a running job: replaced often, worth no write to a disk."""

    async def noted(self, job_id: str) -> bytes | None: ...


class JobFile(Protocol):
    """One finished file, read piece by piece."""

    @property
    def size(self) -> int: ...

    async def read(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end), or as many of them as one read gives; none: it is gone."""

    async def close(self) -> None: ...


class JobFiles(Protocol):
    """The files of jobs: each whole, or not there."""

    async def put(self, job_id: str, files: dict[str, bytes], lifetime_s: float) -> None: ...

    async def open(self, job_id: str, name: str) -> JobFile | None: ...

    async def remove(self, job_id: str) -> None: ...


class State(Protocol):
    """The whole store, as one gateway uses it. Everything but `shelf` raises `StateError` when it cannot be reached.

    While it is open, others see that the gateway of this id lives. What a gateway that died held is let go.
    """

    on_error: Callable[[Part, str], None]  # told of each failure, before it is raised

    @property
    def gateway_id(self) -> str: ...

    @property
    def is_shared(self) -> bool:
        """Whether other gateways may change what is kept here."""

    @property
    def jobs(self) -> JobTable: ...

    @property
    def files(self) -> JobFiles | None:
        """Where files of jobs are kept; None: the gateway has a folder for them."""

    def shelf(self, name: ShelfName, bound: Bound) -> Shelf: ...

    async def living(self, gateway_ids: Collection[str]) -> frozenset[str]:
        """Those of these gateways that live."""

    async def take(self, key: str, per_minute: int, cost: int = 1) -> Allowance:
        """Take `cost` places of the `per_minute` that a key has in a moving minute: all of them or none."""

    async def hold(self, key: str, most: int, cost: int = 1) -> str | None:
        """Hold `cost` of the `most` places that a key has at once. Return the lease to release; None: no place.

        It is held while this gateway lives; nothing has to be renewed.
        """

    async def release(self, lease: str) -> None:
        """Let go of a lease; of one that is unknown by now, nothing."""
