from __future__ import annotations

import pytest

from routing import admission
from routing.admission import Admission, Limits, TokenBucket, is_this_machine


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_bucket_gives_its_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(rate=10.0, burst=20.0, now=0.0)
    assert sum(bucket.take(0.0) for _ in range(50)) == 20
    assert sum(bucket.take(0.5) for _ in range(50)) == 5
    assert sum(bucket.take(100.0) for _ in range(50)) == 20


def test_one_address_gets_20_at_once_and_10_a_second() -> None:
    clock = Clock()
    gate = Admission(Limits(), clock)
    assert sum(gate.admit("192.0.2.1", 0) for _ in range(100)) == 20
    assert gate.admit("192.0.2.2", 0)
    clock.now += 1.0
    assert sum(gate.admit("192.0.2.1", 0) for _ in range(100)) == 10
    assert gate.num_refused == 170


def test_this_machine_is_exempt_from_limits_per_address_but_not_from_the_global_one() -> None:
    gate = Admission(Limits(), Clock())
    assert sum(gate.admit("127.0.0.1", 0) for _ in range(300)) == 200


def test_half_open_connections_are_bounded() -> None:
    gate = Admission(Limits(), Clock())
    assert gate.admit("127.0.0.1", 63)
    assert not gate.admit("127.0.0.1", 64)


def test_one_ipv6_network_counts_as_one_address() -> None:
    gate = Admission(Limits(), Clock())
    assert sum(gate.admit(f"2001:db8::{number:x}", 0) for number in range(100)) == 20


def test_links_of_one_address_are_bounded_and_come_back() -> None:
    gate = Admission(Limits(), Clock())
    assert sum(gate.link_up("192.0.2.1") for _ in range(20)) == 16
    gate.link_down("192.0.2.1")
    assert gate.link_up("192.0.2.1")
    assert all(gate.link_up("::1") for _ in range(50))


def test_remembered_addresses_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_REMEMBERED", 4)
    clock = Clock()
    gate = Admission(Limits(), clock)
    assert [gate.admit(f"192.0.2.{number}", 0) for number in range(6)] == [True] * 4 + [False] * 2
    clock.now += 10.0
    assert gate.admit("192.0.2.9", 0)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("192.0.2.1", False),
        ("", False),
    ],
)
def test_loopback_addresses_are_known(host: str, expected: bool) -> None:
    assert is_this_machine(host) is expected
