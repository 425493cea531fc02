"""Commands in processes of their own that start in a moment: forked from one that has imported torch already.

A forked child is what `python -m cli` would be, with a process id, pipes and an end of its own; only the seconds of
importing are shared. Knows nothing of what the commands do.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Forked:
    """A running command, with what `subprocess.Popen` has for it."""

    def __init__(self, pid: int, stdin: int, stdout: int, end: int) -> None:
        self.pid = pid
        self.stdin = os.fdopen(stdin, "w")
        self.stdout = os.fdopen(stdout)
        self.returncode: int | None = None
        self._end = end
        self._turn = threading.Lock()

    def poll(self) -> int | None:
        """The exit code, negative for a signal's number; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Raises `subprocess.TimeoutExpired`."""
        with self._turn:
            if self.returncode is None:
                if not select.select([self._end], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("a forked command", timeout or 0.0)
                self.returncode = int(os.read(self._end, 64) or b"-1")  # nothing: its nursery is gone
                os.close(self._end)
            return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Nursery:
    """Where they are forked; ends, with all of them, when it is closed or we end."""

    def __init__(self) -> None:
        self._asked, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "tests.support.nursery_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ | ONE_THREAD,
            )
        self._turn = threading.Lock()

    def spawn(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Forked:
        """Start `diffuse ARGUMENTS`."""
        (their_in, our_in), (our_out, their_out), (our_end, their_end) = os.pipe(), os.pipe(), os.pipe()
        request = json.dumps({"arguments": list(arguments), "environment": dict(environment)}).encode()
        try:
            with self._turn:
                socket.send_fds(self._asked, [request], [their_in, their_out, their_end])
                pid = int(self._asked.recv(64))
        finally:
            for descriptor in (their_in, their_out, their_end):
                os.close(descriptor)
        return Forked(pid, our_in, our_out, our_end)

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it. Children should have ended; those that have not are told to."""
        self._asked.close()
        self._popen.wait()
