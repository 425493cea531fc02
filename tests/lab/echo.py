"""A TCP echo for the lab, where `ping` is not installed: `serve PORT`, or `ask HOST PORT TIMES` (a median in ms)."""

from __future__ import annotations

import socket
import statistics
import sys
import time


def _serve(port: int) -> None:
    with socket.create_server(("0.0.0.0", port)) as server:
        print("up", flush=True)
        while True:
            connection, _ = server.accept()
            with connection:
                while data := connection.recv(4096):
                    connection.sendall(data)


def _ask(host: str, port: int, times: int) -> None:
    took: list[float] = []
    with socket.create_connection((host, port), timeout=10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(times):
            began = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(16)
            took.append((time.perf_counter() - began) * 1000)
    print(statistics.median(took))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(int(sys.argv[2]))
    else:
        _ask(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
