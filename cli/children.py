"""Child processes of this console: started, listened to, and ended, each and every one.

A child is this same program with another command. It prints events as JSON lines on standard output; its
standard input is a pipe whose only write end is ours, so that it notices our death (see `lifeline.py`).
Knows nothing of models or layers.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from cli.failures import CommandError

Event = dict[str, Any]

STOP_TIMEOUT_S: Final = 8.0  # a gateway lets streams drain before it goes
TAIL_LINES: Final = 12
OWN_WORDS: Final = "diffuse: "  # how a command of ours begins its last words, see failures.report
LINE_LIMIT: Final = 1 << 20

# Every thread pool a numeric library might open, set before torch is imported: it reads them only once.
_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class ChildCrashError(CommandError):
    """A child ended although nobody asked it to."""


def thread_environment(num_threads: int) -> dict[str, str]:
    """Environment variables that keep a process to so many compute threads."""
    return dict.fromkeys(_THREAD_VARIABLES, str(num_threads))


def own_command(arguments: Sequence[str]) -> list[str]:
    """The command line that runs this very program, installed or from a checkout, in any working folder.

    -P keeps folders named like our packages in the user's working folder from being imported instead.
    """
    root = str(Path(__file__).resolve().parent.parent)
    start = f"import sys; sys.path.append({root!r}); from cli.main import main; main()"
    return [sys.executable, "-P", "-c", start, *arguments]


class Child:
    """One running child."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        on_event: Callable[[Event], None],
        on_words: Callable[[str], None],
    ) -> None:
        self.name = name
        self._process = process
        self._on_event = on_event
        self._on_words = on_words
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._arrived: dict[str, asyncio.Future[Event]] = {}
        self._readers = (
            asyncio.create_task(self._read_events(), name=f"{name} events"),
            asyncio.create_task(self._read_words(), name=f"{name} words"),
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_for(self, event_name: str) -> Event:
        """Wait for the first event of this name; raises `ChildCrashError` if the child ends before it."""
        arrived = self._expect(event_name)
        ended = asyncio.create_task(self._ended())
        watched: set[asyncio.Future[Any]] = {arrived, ended}
        try:
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if arrived.done():
            return arrived.result()
        raise self.crash()

    async def wait_crash(self) -> ChildCrashError:
        """Wait until the child has ended by itself, and say how."""
        await self._ended()
        return self.crash()

    def crash(self) -> ChildCrashError:
        """How this ended child ended, with its last lines."""
        if self._tail and self._tail[-1].startswith(OWN_WORDS):  # it said itself why, in one line
            return ChildCrashError(f"{self.name}: {self._tail[-1].removeprefix(OWN_WORDS)}")
        code = self._process.returncode
        how = (
            f"was ended by {signal.Signals(-code).name}" if code and code < 0 else f"stopped with code {code}"
        )
        said = "; it said last: " + " / ".join(self._tail) if self._tail else ""
        return ChildCrashError(f"{self.name} {how}{said}")

    def kill(self) -> None:
        """Send SIGKILL; nothing if it is gone."""
        self._signal(signal.SIGKILL)

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End the child: politely, then by SIGKILL. Returns once it is gone; safe to cancel and repeat."""
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            self.kill()
        await self._process.wait()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):  # it ended just now
                self._process.send_signal(number)

    def _expect(self, event_name: str) -> asyncio.Future[Event]:
        if event_name not in self._arrived:
            self._arrived[event_name] = asyncio.get_running_loop().create_future()
        return self._arrived[event_name]

    async def _ended(self) -> None:
        """The process is gone and everything it said has been read."""
        await self._process.wait()
        await asyncio.gather(*self._readers)

    async def _read_events(self) -> None:
        async for line in _open(self._process.stdout):
            event = _event_in(line)
            if event is None:
                self._tail.append(line.decode(errors="replace").rstrip())
                continue
            self._on_event(event)
            arrived = self._expect(str(event.get("event", "")))
            if not arrived.done():
                arrived.set_result(event)

    async def _read_words(self) -> None:
        async for line in _open(self._process.stderr):
            if text := line.decode(errors="replace").rstrip().rsplit("\r", 1)[-1]:  # bars redraw their line
                self._tail.append(text)
                self._on_words(text)


class Children:
    """A family of children; leaving the context ends them all, whatever happened inside."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop_all()

    async def start(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        on_event: Callable[[Event], None],
        on_words: Callable[[str], None] = lambda line: None,
        environment: Mapping[str, str],
        pass_fds: Sequence[int] = (),
    ) -> Child:
        """Start this program with `arguments`; it is ended with the family. `on_words` gets its standard error.

        It gets a session of its own: a terminal's Ctrl+C reaches us alone, and we end children in order.
        """
        process = await asyncio.create_subprocess_exec(
            *own_command(arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **environment},
            start_new_session=True,
            pass_fds=tuple(pass_fds),
            limit=LINE_LIMIT,
        )
        child = Child(name, process, on_event, on_words)
        self._children.append(child)
        return child

    async def release(self, child: Child) -> None:
        """End one child whose work is done."""
        await child.stop()
        self._children.remove(child)

    async def first_crash(self) -> ChildCrashError:
        """Wait until any child ends by itself."""
        waits = [asyncio.ensure_future(child.wait_crash()) for child in self._children]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for wait in waits:
                wait.cancel()

    async def stop_all(self) -> None:
        """End the youngest, then the rest together: a gateway says goodbye while it still has nodes."""
        for group in (self._children[-1:], self._children[:-1]):
            await asyncio.gather(*(child.stop() for child in group))

    def kill_all(self) -> None:
        """Send SIGKILL to every child, for a user who will not wait."""
        for child in self._children:
            child.kill()


def _open(pipe: asyncio.StreamReader | None) -> asyncio.StreamReader:
    assert pipe is not None, "children are started with pipes"
    return pipe


def _event_in(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
