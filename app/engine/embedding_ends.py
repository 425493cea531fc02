"""The two ends of a model that makes vectors, for one session: token ids into steps, what came back into hidden states.

At home they share the thread of `ends_queue`; in the thin mode the first node embeds and the last one norms. Knows
nothing of links, of pooling, or of how a text is cut into steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from app.engine.ends_jobs import CloseRows, EndsSession, OpenRows
from app.engine.ends_queue import EndsQueue
from routing.errors import ErrorCode, WorkError
from routing.types import Answer, Buffer, Want, WireDtype
from slicing.buffers import DTYPES, all_finite, from_buffer


class TextEnds(Protocol):
    """The ends of texts that go through one session, one after the other."""

    @property
    def local_s(self) -> float:
        """What they took here, in seconds."""

    async def open_rows(self, token_ids: Sequence[int], position: int, wire: WireDtype) -> Buffer:
        """The payload of a step that feeds `token_ids` at `position`."""

    def wanted(self, rows: range, num_rows: int) -> tuple[Want, tuple[int, ...]]:
        """Which rows of a step of `num_rows` must come back, where the hidden states of `rows` are needed."""

    async def close_rows(self, answer: Answer, rows: range, wire: WireDtype) -> torch.Tensor:
        """The last hidden states [n, hidden] (float32) of the rows `rows` of a step that was answered."""

    async def close(self) -> None:
        """Free what is kept. Never cancelled half way."""


class LocalTextEnds:
    """Embedding and first K layers, last J layers and norm, in this process."""

    def __init__(self, queue: EndsQueue, tenant: Hashable = None, num_stages: int = 1) -> None:
        self._queue = queue
        self._session = EndsSession(
            queue.runner.new_cache(),
            queue.runner.new_cache(),  # its own: the opening end is ahead of the closing one
            None,  # nothing is drawn
            None,
            num_stages=num_stages,
            tenant=tenant,
        )
        self._is_closed = False

    @property
    def local_s(self) -> float:
        return self._session.compute_s

    async def open_rows(self, token_ids: Sequence[int], position: int, wire: WireDtype) -> Buffer:
        job = OpenRows(self._session, self._queue.opening_lane, token_ids, position, wire)
        await self._queue.run(job)
        return job.payload

    def wanted(self, rows: range, num_rows: int) -> tuple[Want, tuple[int, ...]]:
        return (Want.ALL, ()) if self._queue.has_last_layers else wanted_rows(rows, num_rows)

    async def close_rows(self, answer: Answer, rows: range, wire: WireDtype) -> torch.Tensor:
        keep = rows
        if not self._queue.has_last_layers:  # then only those came, and a row's place does not matter
            keep, answer = range(answer.rows), replace(answer, position=0)
        if answer.rows:
            job = CloseRows(self._session, self._queue.closing_lane, answer, wire, answer.rows, keep)
            await self._queue.run(job)
        return job.made if keep else torch.empty(0, self._queue.runner.hidden_size)

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            await asyncio.shield(asyncio.ensure_future(self._queue.free(self._session)))


class RemoteTextEnds:
    """Thin mode: no weights here."""

    def __init__(self, hidden_size: int) -> None:
        self._hidden_size = hidden_size

    @property
    def local_s(self) -> float:
        return 0.0  # a few ids are packed

    async def open_rows(self, token_ids: Sequence[int], position: int, wire: WireDtype) -> Buffer:
        return np.asarray(token_ids, dtype="<i4").tobytes()

    def wanted(self, rows: range, num_rows: int) -> tuple[Want, tuple[int, ...]]:
        return wanted_rows(rows, num_rows)

    async def close_rows(self, answer: Answer, rows: range, wire: WireDtype) -> torch.Tensor:
        """Raises WorkError where they are not finite."""
        wire_dtype = DTYPES[wire.name.lower()]
        states = from_buffer(answer.payload, wire_dtype, self._hidden_size, dtype=torch.float32)
        if not all_finite(states):
            raise WorkError(ErrorCode.COMPUTE, "the last node returned numbers that are not finite")
        return states

    async def close(self) -> None:
        """Nothing is held here."""


def wanted_rows(rows: range, num_rows: int) -> tuple[Want, tuple[int, ...]]:
    """How to ask for `rows` of `num_rows`, and for an acknowledgement where none is needed."""
    if len(rows) == num_rows:
        return Want.ALL, ()
    if rows == range(num_rows - 1, num_rows):
        return Want.LAST, ()
    return Want.LIST, tuple(rows)
