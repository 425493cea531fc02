"""Times and sizes, as people write them."""

from __future__ import annotations

import pytest
import typer

from cli import units


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30),
        ("30s", 30),
        ("200ms", 0.2),
        ("5m", 300),
        ("5 min", 300),
        ("1.5h", 5400),
        ("7d", 604800),
        (0.5, 0.5),
        (0, 0),
    ],
)
def test_a_time_without_a_unit_is_in_seconds(text: str | float, seconds: float) -> None:
    assert units.duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4096", 4096),
        (4096, 4096),
        ("500MB", 500_000_000),
        ("1.5gb", 1_500_000_000),
        ("32MiB", 32 << 20),
        ("2k", 2000),
        ("1Ti", 1 << 40),
    ],
)
def test_sizes_are_decimal_or_binary(text: str | int, size_bytes: int) -> None:
    assert units.size(text) == size_bytes


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "MB",
        "h",
        "5 apples",
        "-1MB",
        "-1s",
        "5MBB",
        "1e5",
        "nan",
        "inf",
        "1,5h",
        "٣s",
        True,
        float("nan"),
        1e40,
    ],
)
def test_what_is_neither_is_a_usage_error(wrong: object) -> None:
    for read, example in ((units.duration, "30s"), (units.size, "500MB")):
        with pytest.raises(typer.BadParameter, match=example):
            read(wrong)  # type: ignore[operator]


def test_a_unit_of_the_other_kind_is_no_unit() -> None:
    with pytest.raises(typer.BadParameter):
        units.size("5h")
    with pytest.raises(typer.BadParameter):
        units.duration("5GB")


@pytest.mark.parametrize("seconds", [0, 0.2, 1, 90, 600, 3600, 86400, 86401, 1234.5])
def test_a_time_that_is_shown_is_read_as_the_same(seconds: float) -> None:
    assert units.duration(units.write_duration(seconds)) == seconds


@pytest.mark.parametrize("size_bytes", [0, 1, 1000, 1024, 32 << 20, 500_000_000, 4 << 30, (1 << 30) + 1])
def test_a_size_that_is_shown_is_read_as_the_same(size_bytes: int) -> None:
    assert units.size(units.write_size(size_bytes)) == size_bytes


def test_they_are_shown_as_short_as_they_can_be() -> None:
    assert [units.write_duration(one) for one in (600, 90, 0.2)] == ["10m", "90s", "0.2s"]
    assert [units.write_size(one) for one in (32 << 20, 500_000_000, 7)] == ["32MiB", "500MB", "7"]
