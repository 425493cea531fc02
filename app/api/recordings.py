"""Recordings that clients send, decoded a few at a time and counted while they are held, as files and as samples."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from app.api.errors import invalid, unavailable
from app.media.errors import UnusableMediaError
from app.media.recording import decode_recording
from app.settings import GatewaySettings

if TYPE_CHECKING:
    import numpy as np

DECODED_AT_ONCE = 2  # each takes a core
BUSY_RETRY_S = 5


class Recordings:
    """Those of one gateway."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._max_s = settings.max_recording_s
        self._limit_bytes = settings.media_bytes
        self._turns = asyncio.Semaphore(DECODED_AT_ONCE)
        self.held_bytes = 0

    async def decoded(self, content: bytes, rate: int, param: str) -> np.ndarray:
        """Return float32 samples [length] of one channel at `rate` Hz. Raises `ApiError` 400 for the field `param`."""
        stop = threading.Event()
        async with self._turns:
            work = asyncio.to_thread(decode_recording, content, rate=rate, max_s=self._max_s, stop=stop)
            try:
                return await work
            except UnusableMediaError as error:
                raise invalid(param, str(error), code="invalid_file") from None
            finally:
                stop.set()  # a thread goes on when whoever waits for it is cancelled

    @contextmanager
    def held(self, samples: np.ndarray) -> Iterator[None]:
        """Count samples as long as they are needed. Raises `ApiError` 503 where there is no room for them."""
        with self.counted() as count:
            count(samples.nbytes)
            yield

    @contextmanager
    def counted(self) -> Iterator[Callable[[int], None]]:
        """Yield what counts bytes that are held until the end. It raises `ApiError` 503 where there is no room."""
        held = 0

        def count(num_bytes: int) -> None:
            nonlocal held
            if self.held_bytes + num_bytes > self._limit_bytes:
                message = "this gateway holds as many recordings as it can"
                raise unavailable("overloaded", message, BUSY_RETRY_S)
            self.held_bytes += num_bytes
            held += num_bytes

        try:
            yield count
        finally:
            self.held_bytes -= held
