"""How numbers and answers look."""

from __future__ import annotations

import pytest

from cli import show
from cli.answer import Timings


def test_an_answer_cannot_drive_the_terminal() -> None:
    assert show.printable("a\x1b[31mred\x1b]0;title\x07\r\n\tb\x9b2Jé漢") == "a[31mred]0;title\n\tb2Jé漢"


def test_durations_keep_three_figures() -> None:
    assert [show.seconds(value) for value in (0.0123, 0.83, 1.234, 12.34, 1234.0)] == [
        "12 ms",
        "830 ms",
        "1.23 s",
        "12.3 s",
        "1234 s",
    ]


def test_sizes_are_in_decimal_units() -> None:
    assert [show.size(value) for value in (12, 1500, 98_300_000, 2_000_000_000)] == [
        "12 B",
        "1.5 kB",
        "98.3 MB",
        "2.00 GB",
    ]


def test_the_line_of_timings_names_every_part() -> None:
    timings = Timings(1.2, 0.2, 11, 1.0, compute_s=0.6, local_s=0.2, network_s=0.15, crypto_s=0.05)
    assert show.timings_line(timings) == (
        "total 1.2 s | prefill 200 ms | per token 100 ms (10.0 tokens/s) | compute 800 ms | network 150 ms "
        "| crypto 50 ms | 11 tokens"
    )


def test_what_is_not_told_is_not_shown_as_zero() -> None:
    assert show.timings_line(Timings(0.2, 0.2, 1)) == "total 200 ms | prefill 200 ms | 1 token"


def test_a_token_pays_only_for_what_came_since() -> None:
    first = Timings(1.0, 1.0, 1, compute_s=0.9, network_s=0.1)
    later = Timings(2.0, 1.0, 11, compute_s=1.4, network_s=0.2)
    assert dict(later.shares_per_token(first)) == pytest.approx({"compute": 0.05, "network": 0.01})
    assert dict(first.shares_per_token(first)) == {}
