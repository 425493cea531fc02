"""Tasks beside a part end with it, and their bugs are told."""

from __future__ import annotations

import asyncio
import gc

import pytest

from routing.background import Background
from routing.errors import ErrorCode, LinkError


async def test_closing_leaves_no_task_behind() -> None:
    background, ended = Background(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            ended.set()

    background.spawn(work(), "work")
    await asyncio.sleep(0)
    await background.close()
    assert ended.is_set()
    assert len(background) == 0
    background.spawn(work(), "late work")
    assert len(background) == 0


async def test_work_that_never_began_ends_without_a_warning() -> None:
    background = Background()
    background.spawn(asyncio.sleep(100), "work")
    await background.close()
    gc.collect()


async def test_a_bug_is_told_without_its_text_and_a_lost_peer_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    background = Background()

    async def fail(error: Exception) -> None:
        raise error

    background.spawn(fail(LinkError(ErrorCode.LINK_LOST)), "a ping")
    background.spawn(fail(ValueError("a secret")), "a dial")
    while len(background):
        await asyncio.sleep(0)
    assert "a dial: ValueError" in caplog.text
    assert "secret" not in caplog.text
    assert "a ping" not in caplog.text
