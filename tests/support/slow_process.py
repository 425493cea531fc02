"""A machine that is several times slower than others: a process that is stopped most of the time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator

TURN_S = 0.08  # far below the half second after which a silent peer is asked


@contextlib.asynccontextmanager
async def slowed(pid: int, times: float) -> AsyncIterator[None]:
    """Let a process run one part in `times` of the time, while the block runs."""

    async def hold_back() -> None:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(TURN_S * (1 - 1 / times))
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(TURN_S / times)

    holding = asyncio.create_task(hold_back())
    try:
        yield
    finally:
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        os.kill(pid, signal.SIGCONT)
