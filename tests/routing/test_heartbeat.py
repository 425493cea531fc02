from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from routing.heartbeat import Heartbeat, HeartbeatTiming

TIMING = HeartbeatTiming(idle_s=5.0, dead_s=10.0, watch_s=0.5)


def run(heartbeat: Heartbeat, until: float) -> list[tuple[float, str]]:
    """Check whenever it asks to be; return what was due, and when."""
    seen = []
    while heartbeat.next_check <= until:
        now = heartbeat.next_check
        verdict = heartbeat.check(now)
        if verdict != "fine":
            seen.append((now, verdict))
        if verdict == "ping":
            heartbeat.ping(now)
        if verdict == "dead":
            break
    return seen


def test_silent_link_is_pinged_after_5_s_and_dead_at_10() -> None:
    assert run(Heartbeat(0.0, TIMING), until=60.0) == [(5.0, "ping"), (10.0, "dead")]


def test_link_that_answers_lives_on() -> None:
    heartbeat = Heartbeat(0.0, TIMING)
    for round_number in range(1, 20):
        assert run(heartbeat, until=5.0 * round_number) == [(5.0 * round_number, "ping")]
        heartbeat.heard(5.0 * round_number)


def test_watched_link_is_pinged_every_half_second() -> None:
    heartbeat = Heartbeat(0.0, TIMING)
    heartbeat.num_watchers = 1
    assert run(heartbeat, until=2.0) == [(0.5, "ping"), (1.0, "ping"), (1.5, "ping"), (2.0, "ping")]
    assert heartbeat.silent_for_s(2.5) == 2.0


def test_a_link_that_carries_circuits_is_pinged_every_second() -> None:
    heartbeat = Heartbeat(0.0, TIMING)
    heartbeat.is_carrying = True
    assert run(heartbeat, until=2.0) == [(1.0, "ping"), (2.0, "ping")]
    heartbeat.is_carrying = False
    heartbeat.heard(3.0)
    assert heartbeat.check(4.5) == "fine"


def test_watching_asks_an_idle_link_at_once() -> None:
    heartbeat = Heartbeat(0.0, TIMING)
    heartbeat.num_watchers = 1
    assert heartbeat.next_check == 0.5
    assert heartbeat.check(3.0) == "ping"


def test_traffic_is_sign_of_life_enough() -> None:
    heartbeat = Heartbeat(0.0, TIMING)
    heartbeat.num_watchers = 1
    for tick in range(1, 100):
        heartbeat.heard(tick * 0.1)
        assert run(heartbeat, until=tick * 0.1 + 0.05) == []
    assert heartbeat.silent_for_s(20.0) == 0.0


def test_silence_counts_only_while_the_peer_was_asked() -> None:
    heartbeat = Heartbeat(0.0, TIMING)
    assert heartbeat.silent_for_s(4.0) == 0.0
    heartbeat.ping(4.0)
    assert heartbeat.silent_for_s(6.0) == 2.0
    heartbeat.heard(6.0)
    assert heartbeat.silent_for_s(6.0) == 0.0


def test_pong_tells_the_round_trip_and_only_of_a_ping_of_ours() -> None:
    heartbeat = Heartbeat(0.0, TIMING)
    token = heartbeat.ping(1.0)
    assert heartbeat.pong(b"not ours", 1.0) is None
    assert heartbeat.pong(token, 1.05) == heartbeat.rtt_ms
    assert heartbeat.rtt_ms is not None
    assert abs(heartbeat.rtt_ms - 50.0) < 1e-6
    assert heartbeat.pong(token, 1.06) is None


def test_peer_is_not_blamed_when_we_were_stopped_ourselves() -> None:
    heartbeat = Heartbeat(0.0, TIMING)
    assert heartbeat.check(300.0) == "ping"
    heartbeat.ping(300.0)
    assert run(heartbeat, until=400.0)[-1] == (305.0, "dead")


@given(st.lists(st.floats(0.01, 20.0), max_size=30))
def test_next_check_always_lies_ahead(gaps: list[float]) -> None:
    heartbeat, now = Heartbeat(0.0, TIMING), 0.0
    for gap in gaps:
        now += gap
        if heartbeat.check(now) == "dead":
            break
        heartbeat.ping(now)
        assert heartbeat.next_check > now
