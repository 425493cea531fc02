"""A program that answers lines of JSON: the other side of a comparison, so that it takes turns with us in one run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Sequence
from typing import Any


class JsonChild:
    """A child process; its first line says that it is ready. Use as a context manager."""

    def __init__(self, command: Sequence[str], *, threads: int = 1) -> None:
        self._child = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )
        self.ready: dict[str, Any] = {}

    def __enter__(self) -> JsonChild:
        self.ready = self._read()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send one request and wait for its answer. Raises RuntimeError when the child ended."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(request) + "\n")
        self._child.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"a measured program ended: {self._child.args!r}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def free_port() -> int:
    """A port that nobody listens on now, for a child that must be told one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
