"""The command line with a wall clock that is wrong: `python -m tests.chaos.skewed SECONDS host …`."""

from __future__ import annotations

import sys
import time


def main() -> None:
    """Shift the clock before anything imports it, then run the command."""
    offset_s = float(sys.argv.pop(1))
    true_time, true_time_ns = time.time, time.time_ns
    time.time = lambda: true_time() + offset_s
    time.time_ns = lambda: true_time_ns() + int(offset_s * 1e9)
    from cli.main import main as diffuse

    diffuse()


if __name__ == "__main__":
    main()
