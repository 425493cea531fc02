"""Taking a port of this machine before anything slow begins, so that a busy one is known at once."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress

from cli import show
from cli.failures import CommandError

BACKLOG = 128  # connections that wait while the gateway loads; more are refused, as is usual


def listen_on(host: str, port: int) -> socket.socket:
    """Bind and listen on a port (0: any free one) of an address or name. Raises OSError when it is taken.

    Listening keeps others out; binding alone would not: with SO_REUSEADDR a port is shared until one listens.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # elsewhere the option would let two listeners share the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def check_listen(host: str, port: int, flag: str = "--listen") -> None:
    """Say now that a port is taken; the service binds it when it can serve. Raises `CommandError`."""
    try:
        with suppress(socket.gaierror):  # the service may resolve what we cannot
            listen_on(host, port).close()
    except OSError as error:
        raise cannot_listen(host, port, error, flag) from error


def cannot_listen(host: str, port: int, error: OSError, flag: str) -> CommandError:
    """What to say where `listen_on` failed, with the flag that chooses another port."""
    where = show.host_port(host, port)
    if error.errno == errno.EADDRINUSE:
        return CommandError(f"{where} is in use: stop what listens there, or choose another port with {flag}")
    return CommandError(f"cannot listen on {where} ({error.strerror}): choose another address with {flag}")


def bind_loopback(port: int) -> socket.socket:
    """Bind and listen on a port of this machine that only it can reach. Raises OSError when it is taken."""
    return listen_on("127.0.0.1", port)
