"""Children are listened to, ended, and never left behind, however their parent ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cli import children as children_module
from cli.children import Child, ChildCrashError, Children, Event

ROOT = str(Path(__file__).parents[2])
IDLE = "import json, time; print(json.dumps({'event': 'ready', 'n': 1}), flush=True); time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + IDLE
BROKEN = "import sys; print('{\"event\": \"progress\"}'); print('first\\nno such shard', file=sys.stderr); sys.exit(3)"
ORPHAN_TIMEOUT_S = 6.0


@pytest.fixture(autouse=True)
def plain_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children run a line of Python here rather than a command of ours."""
    monkeypatch.setattr(children_module, "own_command", lambda arguments: [sys.executable, "-c", *arguments])


async def start(family: Children, code: str, events: list[Event] | None = None) -> Child:
    heard = events if events is not None else []
    return await family.start("node 1", [code], on_event=heard.append, environment={})


async def test_events_are_heard_and_leaving_ends_the_child() -> None:
    heard: list[Event] = []
    async with Children() as family:
        child = await start(family, IDLE, heard)
        assert (await child.wait_for("ready"))["n"] == 1
    assert heard == [{"event": "ready", "n": 1}]
    assert not psutil.pid_exists(child.pid)


async def test_a_child_that_ends_too_early_is_reported_with_its_last_lines() -> None:
    async with Children() as family:
        child = await start(family, BROKEN)
        with pytest.raises(ChildCrashError) as caught:
            await child.wait_for("ready")
    assert str(caught.value) == "node 1 stopped with code 3; it said last: first / no such shard"


async def test_a_child_that_says_why_is_quoted() -> None:
    async with Children() as family:
        child = await start(family, "import sys; sys.exit('diffuse: no such model')")
        assert str(await child.wait_crash()) == "node 1: no such model"


async def test_a_killed_child_is_the_first_crash() -> None:
    async with Children() as family:
        child = await start(family, IDLE)
        await child.wait_for("ready")
        os.kill(child.pid, signal.SIGKILL)
        assert str(await family.first_crash()) == "node 1 was ended by SIGKILL"


async def test_a_child_that_will_not_go_is_killed() -> None:
    async with Children() as family:
        child = await start(family, STUBBORN)
        await child.wait_for("ready")
        await child.stop(timeout_s=0.1)
        assert not psutil.pid_exists(child.pid)


async def test_an_error_inside_ends_the_children_too() -> None:
    pids: list[int] = []

    async def fail() -> None:
        async with Children() as family:
            child = await start(family, IDLE)
            await child.wait_for("ready")
            pids.append(child.pid)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await fail()
    assert not psutil.pid_exists(pids[0])


async def test_a_released_child_is_no_crash() -> None:
    async with Children() as family:
        worker = await start(family, IDLE)
        await worker.wait_for("ready")
        await family.release(worker)
        other = await start(family, IDLE)
        crash = asyncio.create_task(family.first_crash())
        await other.wait_for("ready")
        assert not crash.done()
        crash.cancel()


# A child that watches its parent, and one that does so deaf to signals, as if deep in native code.
WATCHING = f"""
import json, signal, sys, time
sys.path.append({ROOT!r})
from cli.lifeline import end_with_parent
end_with_parent()
print(json.dumps({{"event": "ready"}}), flush=True)
time.sleep(600)
"""
DEAF = WATCHING.replace("print(", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(")
PARENT = f"""
import asyncio, sys
sys.path.append({ROOT!r})
from cli import children
children.own_command = lambda arguments: [sys.executable, "-c", *arguments]
async def main():
    async with children.Children() as family:
        for code in ({WATCHING!r}, {DEAF!r}):
            child = await family.start("child", [code], on_event=lambda event: None, environment={{}})
            await child.wait_for("ready")
            print(child.pid, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGKILL")
def test_children_end_when_their_parent_is_killed_outright() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        parent.kill()
    deadline = time.monotonic() + ORPHAN_TIMEOUT_S
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))


def is_alive(pid: int) -> bool:
    """A zombie that nobody has reaped yet is gone for our purpose."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
