"""What there is to say of the last requests once they are over: times, counts and routes; nothing of what was said.

A record belongs to the key that asked, and only that key finds it. Requests that run are known to their gateway; what
is over, and in a fleet also what runs, is in the state, bounded in number and time.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from app.engine.request import HopUse, RouteHop
from app.state.memory import MemoryState
from app.state.state import Bound, State, StateError

MAX_RECORDS = 1000  # of one gateway, some KB each
MAX_SHARED_RECORDS = 10_000  # of a fleet
LIFETIME_S = 24 * 3600.0
CLOSE_S = 2.0  # how long the last records may take to be kept
INTERRUPTED = "interrupted"  # the gateway ended while it ran
OWNER_BYTES = 16
ALIAS = b"="  # before the id of the request whose answer this is

KEPT_FIELDS = (
    "request_id", "answer_id", "model", "endpoint", "gateway_id", "created", "state", "error", "took_s",
)  # fmt: skip

Stage = Literal["running", "finished", "failed", "aborted"]


@dataclass(frozen=True, slots=True)
class EndedAnswer:
    """One answer of a request: how it ended, where its time went (in seconds, by part), and over whom."""

    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    timings: dict[str, float]
    replays: int
    route: tuple[RouteHop, ...]
    hops: tuple[HopUse, ...] = ()


@dataclass(slots=True)
class RequestRecord:
    """One accepted request. `request_id` is the response's, `answer_id` that of the answer in it."""

    request_id: str
    answer_id: str
    owner: str  # a digest of the key's; "" where no key is needed
    model: str
    endpoint: str
    gateway_id: str
    created: int = field(default_factory=lambda: int(time.time()))  # Unix seconds
    state: Stage = "running"
    error: str | None = None  # the code that it failed with
    took_s: float | None = None
    answers: dict[int, EndedAnswer] = field(default_factory=dict)  # by index
    on_end: Callable[[RequestRecord], None] = field(default=lambda record: None, repr=False)
    _began: float = field(default_factory=time.perf_counter, repr=False)

    def end(self, state: Stage, error: str | None = None) -> None:
        """Note how it ended. What ended before stays."""
        if self.state == "running":
            self.state, self.error = state, error
            self.took_s = time.perf_counter() - self._began
            self.on_end(self)


class Records:
    """The last requests, by their two ids; the oldest make room. Use `close` at the end."""

    def __init__(self, state: State | None = None) -> None:
        self._state = state or MemoryState()
        most = MAX_SHARED_RECORDS if self._state.is_shared else MAX_RECORDS
        self._kept = self._state.shelf("records", Bound(2 * most, LIFETIME_S))  # each has two names
        self._live: dict[tuple[str, str], RequestRecord] = {}  # until they are kept, by both ids
        self._unkept: OrderedDict[int, RequestRecord] = OrderedDict()
        self._keeping: asyncio.Task[None] | None = None

    def begin(
        self, request_id: str, *, answer_id: str, tenant: bytes, model: str, endpoint: str
    ) -> RequestRecord:
        """A new record; of two requests of one id, which clients may choose, the later is kept."""
        owner, gateway_id = owner_of(tenant), self._state.gateway_id
        record = RequestRecord(request_id, answer_id, owner, model, endpoint, gateway_id, on_end=self._keep)
        self._drop(self._live.get((owner, request_id)))
        self._live[owner, request_id] = self._live[owner, answer_id] = record
        if self._state.is_shared:
            self._keep(record)
        return record

    async def find(self, some_id: str, tenant: bytes) -> RequestRecord | None:
        """The record of a request or an answer of this key. Raises `StateError`."""
        owner = owner_of(tenant)
        if (live := self._live.get((owner, some_id))) is not None:
            return live
        told = await self._told(owner, some_id)
        if told is not None and told.startswith(ALIAS):
            told = await self._told(owner, told.removeprefix(ALIAS).decode())
        record = None if told is None else _decoded(owner, told)
        if record is None or some_id not in (record.request_id, record.answer_id):
            return None  # the answer's of an earlier request of that id
        if record.state == "running" and not await self._state.living([record.gateway_id]):
            record.end("failed", INTERRUPTED)
            record.took_s = None
        return record

    async def close(self) -> None:
        """Wait a little until what ended is kept."""
        if self._keeping is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._keeping

    async def _told(self, owner: str, some_id: str) -> bytes | None:
        kept = await self._kept.get(f"{owner}/{some_id}")
        return None if kept is None else kept.value

    def _keep(self, record: RequestRecord) -> None:
        """Have a record kept as soon as the state takes it."""
        self._unkept[id(record)] = record
        if len(self._unkept) > MAX_RECORDS:
            self._drop(self._unkept.popitem(last=False)[1])
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.create_task(self._keep_all(), context=Context())  # no request's own

    async def _keep_all(self) -> None:
        while self._unkept:
            _, record = self._unkept.popitem(last=False)
            with suppress(StateError):
                await self._kept.put(f"{record.owner}/{record.request_id}", _encoded(record))
                alias = ALIAS + record.request_id.encode()
                await self._kept.put(f"{record.owner}/{record.answer_id}", alias)
            if record.state != "running" and id(record) not in self._unkept:
                self._drop(record)

    def _drop(self, record: RequestRecord | None) -> None:
        """No longer hold a record here."""
        if record is not None:
            for some_id in (record.request_id, record.answer_id):
                if self._live.get((record.owner, some_id)) is record:
                    del self._live[record.owner, some_id]


def owner_of(tenant: bytes) -> str:
    """Whose a record or a job is, as the state may know it: nothing that leads back to a key; "" without one."""
    if not tenant:
        return ""
    return hashlib.blake2b(tenant, digest_size=OWNER_BYTES, person=b"diffuse.owner").hexdigest()


def _encoded(record: RequestRecord) -> bytes:
    told = {name: getattr(record, name) for name in KEPT_FIELDS}
    answers = [[index, asdict(ended)] for index, ended in record.answers.items()]
    return json.dumps(told | {"answers": answers}).encode()


def _decoded(owner: str, told: bytes) -> RequestRecord:
    fields: dict[str, Any] = json.loads(told)
    answers = {int(index): _answer(ended) for index, ended in fields.pop("answers")}
    return RequestRecord(owner=owner, answers=answers, **fields)


def _answer(told: dict[str, Any]) -> EndedAnswer:
    route = tuple(RouteHop(**hop) for hop in told.pop("route"))
    hops = tuple(HopUse(hop=RouteHop(**use.pop("hop")), **use) for use in told.pop("hops"))
    return EndedAnswer(route=route, hops=hops, **told)
