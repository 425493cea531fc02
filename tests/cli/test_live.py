"""The live answer on a terminal: what is redrawn stays where it is."""

from __future__ import annotations

import io

from rich.console import Console

from cli.answer import Timings
from cli.live import ECHO_WIDTH, LiveAnswer


def test_the_numbers_leave_room_for_the_echo_of_control_c() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=40)
    live = LiveAnswer(console)
    live.note(Timings(total_s=1.0, prefill_s=0.5, tokens=1))
    live.note(Timings(total_s=2.0, prefill_s=0.5, tokens=9, decode_s=1.5, compute_s=1.0, network_s=0.2))
    numbers = live._draw().renderables[-1]
    assert len(str(numbers)) == 40 - ECHO_WIDTH
    assert str(numbers).endswith("…")
