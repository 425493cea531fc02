"""Taking a port of this machine before anything slow begins, so that a busy one is known at once."""

from __future__ import annotations

import os
import socket

BACKLOG = 128  # connections that wait while the gateway loads; more are refused, as is usual


def bind_loopback(port: int) -> socket.socket:
    """Bind and listen on a loopback port (0: any free one). Raises OSError when it is taken.

    Listening keeps others out; binding alone would not: with SO_REUSEADDR a port is shared until one listens.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # elsewhere the option would let two listeners share the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
