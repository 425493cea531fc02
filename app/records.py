"""What there is to say of the last requests once they are over: times, counts and routes; nothing of what was said.

In memory, bounded. A record belongs to the key that asked, and only that key finds it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

from app.engine.request import HopUse, RouteHop

MAX_RECORDS = 1000  # some KB each

State = Literal["running", "finished", "failed", "aborted"]


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
    tenant: bytes = field(repr=False)
    model: str
    endpoint: str
    created: int = field(default_factory=lambda: int(time.time()))  # Unix seconds
    state: State = "running"
    error: str | None = None  # the code that it failed with
    took_s: float | None = None
    answers: dict[int, EndedAnswer] = field(default_factory=dict)  # by index
    _began: float = field(default_factory=time.perf_counter, repr=False)

    def end(self, state: State, error: str | None = None) -> None:
        """Note how it ended. What ended before stays."""
        if self.state == "running":
            self.state, self.error = state, error
            self.took_s = time.perf_counter() - self._began


class Records:
    """The last requests, by their two ids; the oldest make room."""

    def __init__(self, max_records: int = MAX_RECORDS) -> None:
        self._max = max_records
        self._kept: OrderedDict[tuple[bytes, str], RequestRecord] = OrderedDict()  # by the request's id
        self._answers: dict[tuple[bytes, str], RequestRecord] = {}

    def begin(
        self, request_id: str, *, answer_id: str, tenant: bytes, model: str, endpoint: str
    ) -> RequestRecord:
        """A new record; of two requests of one id, which clients may choose, the later is kept."""
        record = RequestRecord(request_id, answer_id, tenant, model, endpoint)
        self._drop(self._kept.pop((tenant, request_id), None))
        self._kept[tenant, request_id] = self._answers[tenant, answer_id] = record
        while len(self._kept) > self._max:
            self._drop(self._kept.popitem(last=False)[1])
        return record

    def find(self, some_id: str, tenant: bytes) -> RequestRecord | None:
        """The record of a request or an answer of this key."""
        return self._kept.get((tenant, some_id)) or self._answers.get((tenant, some_id))

    def __len__(self) -> int:
        return len(self._kept)

    def _drop(self, record: RequestRecord | None) -> None:
        if record is not None and self._answers.get(key := (record.tenant, record.answer_id)) is record:
            del self._answers[key]
