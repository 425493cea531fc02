"""What a node writes of a session: whose line it is, once at its end, and nothing of it whatever breaks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from node import step_batch, step_job
from node.history import History
from node.openings import Openings
from node.outbox import Outbox
from node.scheduler import Scheduler
from node.session import Session
from node.step_flow import StepFlow
from routing import sealing
from tests.node.rig import Node, Rig, Script, fake_rig, loopback_rig, until
from tests.node.test_steps import some_rows
from tests.support.log_lines import Lines, written

SECRET = "hush 0.25"


@pytest.fixture
def lines() -> Iterator[Lines]:
    with written(level=logging.DEBUG) as lines:
        yield lines


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with fake_rig() as rig:
        yield rig


async def opened(rig: Rig) -> tuple[Node, Script]:
    node = await rig.add_fake_node(2, 5)
    script = rig.script((node, 2, 5))
    await script.open()
    return node, script


async def test_a_session_has_one_line_with_its_counts(rig: Rig, lines: Lines) -> None:
    node, script = await opened(rig)
    await script.run(1, 0, some_rows(3))
    await script.run(2, 3, some_rows(1))
    await script.first.send(script.cancel())
    await until(lambda: not node.stats.num_sessions)
    (line,) = [line for line in lines.objects if line["level"] == "info"]
    del line["timestamp"], line["compute_s"], line["queue_s"], line["lasted_s"]
    assert line == {
        "level": "info",
        "logger": "node.server",
        "event": f"session {script.session_id[:4].hex()} hop 0: ended after 2 steps of 4 rows",
        "session": script.session_id[:4].hex(),
        "hop": 0,
        "layers": "2:5",
        "peer": rig.gateway.identity.node_id.hex()[:8],
        "outcome": "ended",
        "steps": 2,
        "rows": 4,
    }


@pytest.mark.parametrize(("how", "advance_s"), [("expired", 1000.0), ("stopped", 0.0)])
async def test_it_says_how_a_session_ended(how: str, advance_s: float, rig: Rig, lines: Lines) -> None:
    node, script = await opened(rig)
    await script.run(1, 0, some_rows(1))
    node.now[0] += advance_s
    if how == "expired":
        node.server.sweep()
    else:
        node.server.close()
    assert [line["outcome"] for line in lines.objects if "outcome" in line] == [how]


async def test_tokens_add_no_line(rig: Rig, lines: Lines) -> None:
    _, script = await opened(rig)
    await script.run(1, 0, some_rows(3))
    before = len(lines.objects)
    for number in range(2, 30):
        await script.run(number, 1 + number, some_rows(1))
    assert len(lines.objects) == before


def fails(*_: Any, **__: Any) -> Any:
    raise ValueError(SECRET)


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (sealing, "decode_entry"),
        (Openings, "_open"),
        (Session, "admit"),
        (StepFlow, "take"),
        (StepFlow, "_finish"),
        (StepFlow, "_send_answer"),
        (Scheduler, "submit"),
        (History, "add"),
        (Outbox, "put"),
        (step_batch, "decode_together"),
        (step_job, "encode_rows"),
        (step_job, "checked"),
    ],
)
async def test_what_breaks_is_told_by_place(
    where: Any, name: str, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with loopback_rig() as rig:
        node = await rig.add_fake_node()
        script = rig.script((node, 0, 6))
        monkeypatch.setattr(where, name, fails)
        with contextlib.suppress(Exception):
            async with asyncio.timeout(0.3):
                await script.open()
                await script.run(1, 0, some_rows(2))
        monkeypatch.undo()
    gc.collect()
    assert "hush" not in lines.text
    assert "0.25" not in lines.text
    told = [line for line in lines.objects if line["level"] in ("warning", "error")]
    assert told
    assert all("ValueError" in line["event"] + line.get("error", "") for line in told)
