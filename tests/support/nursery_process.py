"""`python -m tests.support.nursery_process FD`: imports what commands need, once, and forks a command when asked.

A request on the socket is one JSON object with the arguments and the environment, and three file descriptors: the
child's standard input and output, and where to write its exit code. The answer is the child's id. Starts no thread.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
from typing import NoReturn

import torch  # noqa: F401 - imported for those that are forked, as are the next ones
import transformers.models.llama.modeling_llama  # noqa: F401
import uvloop  # noqa: F401

import app.main
import cli.main
import cli.membership
import node.main
import slicing.fast.loading

MAX_REQUEST = 256 << 10
ERRORS_VARIABLE = "NURSERY_STDERR"  # of a child's environment: a file to write standard error to

__all__ = ["app", "node", "slicing"]


def main() -> None:
    """Fork until the other side closes the socket."""
    asked = socket.socket(fileno=int(sys.argv[1]))
    gc.freeze()  # pages that nobody looks at stay shared
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    ends: dict[int, int] = {}  # of living children: where their exit code goes
    while True:
        ready, _, _ = select.select([asked, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _reap(ends)
        if asked not in ready:
            continue
        request, descriptors, _, _ = socket.recv_fds(asked, MAX_REQUEST, 3)
        if not request:
            return
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (asked.detach(), woken, wake, *ends.values(), descriptors[2]):
                os.close(descriptor)
            _become(json.loads(request), *descriptors[:2])
        for descriptor in descriptors[:2]:
            os.close(descriptor)
        ends[pid] = descriptors[2]
        asked.send(str(pid).encode())


def _become(wanted: dict[str, object], stdin: int, stdout: int) -> NoReturn:
    """Be the command, to its end."""
    code = 1
    try:
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.close(stdin)
        os.close(stdout)
        os.environ.clear()
        os.environ.update(wanted["environment"])  # type: ignore[arg-type]
        if path := os.environ.get(ERRORS_VARIABLE):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        sys.argv = ["diffuse", *wanted["arguments"]]  # type: ignore[misc]
        cli.main.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)


def _reap(ends: dict[int, int]) -> None:
    while ends:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        end = ends.pop(pid)
        with contextlib.suppress(OSError):  # nobody waits for it
            os.write(end, str(os.waitstatus_to_exitcode(status)).encode())
        os.close(end)


if __name__ == "__main__":
    main()
