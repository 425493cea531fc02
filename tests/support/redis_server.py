"""A real Redis for tests: on a socket of its own, keeping nothing. Ended by its process id."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PROGRAM = "redis-server"


@dataclass
class RedisProcess:
    """One server; `stop` and `start` again to have it fail and come back, empty."""

    folder: Path
    options: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def socket(self) -> Path:
        return self.folder / "redis.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        bound = (
            ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        )  # it ends when we are killed
        arguments = [
            *bound,
            PROGRAM,
            "--port",
            "0",
            "--unixsocket",
            str(self.socket),
            "--dir",
            str(self.folder),
        ]
        arguments += ["--save", "", "--appendonly", "no", "--databases", "16", *self.options]
        self.process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while not self._answers():
            assert self.process.poll() is None, "redis-server ended by itself"
            assert time.monotonic() < deadline, "redis-server did not begin to answer"
            time.sleep(0.01)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
            self.socket.unlink(missing_ok=True)

    def pause(self) -> None:
        """Have it answer nobody, and forget nothing."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def flush(self) -> None:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(self.socket))
            client.sendall(b"FLUSHALL SYNC\r\n")
            client.recv(100)

    def _answers(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(self.socket))
                client.sendall(b"PING\r\n")
                return bool(client.recv(100))
        except OSError:
            return False


@contextmanager
def redis_process(*options: str) -> Iterator[RedisProcess]:
    """Run a server; the test is skipped where there is none."""
    if shutil.which(PROGRAM) is None:
        pytest.skip(f"{PROGRAM} is not installed: apt-get install {PROGRAM}")
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:  # short: names of sockets are
        server = RedisProcess(Path(folder), options)
        try:
            server.start()
            yield server
        finally:
            server.stop()
