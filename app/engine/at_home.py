"""What is computed at home around an answer, in the thread for it: an encoder before, a codec behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from routing.errors import ErrorCode, WorkError

Result = TypeVar("Result")


async def run_at_home(encoding: Executor, work: Callable[[], Result], *, deadline_s: float | None) -> Result:
    """Run it in `encoding`, one at a time. Raises WorkError DEADLINE when the time is over, and what `work` raises.

    What has begun cannot be stopped; nobody waits for it then.
    """
    running = asyncio.get_running_loop().run_in_executor(encoding, work)
    try:
        async with asyncio.timeout(deadline_s):
            return await running
    except TimeoutError:
        raise WorkError(ErrorCode.DEADLINE, "the answer took longer than its deadline") from None
