"""How a child process notices that its parent is gone, however the parent ended.

The parent holds the only write end of the pipe that is this process's standard input: when the parent dies,
by SIGKILL as well, the kernel closes it and we read end-of-file. On Linux the kernel is also asked for a
signal. Knows nothing of what the process is doing meanwhile.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1  # prctl(2)
GRACE_S = 2.0  # between the polite signal and the end: enough to say goodbye on every link


def end_with_parent() -> None:
    """Stop this process once standard input reaches its end, or at once if the parent is gone already.

    Call it before anything slow: a parent killed while we load a model must not leave us behind.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    threading.Thread(target=_watch, args=(sys.stdin.fileno(),), name="lifeline", daemon=True).start()


def _watch(pipe: int) -> None:
    """Read until end-of-file, then SIGTERM, then the end: a main thread in native code hears no signal."""
    try:
        while os.read(pipe, 4096):
            pass
    except OSError:
        pass  # an unreadable standard input is as good as a closed one
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(128 + signal.SIGTERM)
