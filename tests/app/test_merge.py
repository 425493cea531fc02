"""Several answers as one stream: what becomes of the others when one of them fails at its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from app.engine.merge import merge


async def test_every_answer_is_closed_also_where_another_fails_at_it() -> None:
    closed: list[int] = []

    async def answer(number: int) -> AsyncGenerator[int, None]:
        try:
            while True:
                yield number
        finally:
            closed.append(number)
            if number < 2:
                raise ValueError(str(number))

    events = merge([answer(number) for number in range(4)], silence_s=1.0, stop=asyncio.Event())
    for _ in range(8):
        await anext(events)
    await asyncio.sleep(0)  # the next events are there, so no task is left to cancel
    with pytest.raises(ValueError, match="0"):
        await events.aclose()
    assert closed == [0, 1, 2, 3]
