"""What probes prove, what liars cannot, and how often a prober lets itself be asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from routing.background import Background
from routing.errors import ErrorCode, LinkError
from routing.reach import FORGET_S, Prober, Reachability, Verdict, place_of, plain_host
from routing.reach_check import ReachCheck
from routing.types import Message, NodeAddress, NodeId, Probe, Probed

HOST, PORT = "9.9.9.9", 7000
FAILED = int(ErrorCode.TIMEOUT)


def peer(number: int) -> NodeId:
    return NodeId(bytes([number]) * 32)


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def make(*, is_strict: bool = True, num_places: int = 3, **options: Any) -> tuple[Reachability, Clock]:
    clock = Clock()
    made = Reachability(
        is_strict=is_strict, accepts=lambda host, port: host != "10.0.0.1", now=clock, **options
    )
    made.set_probers({peer(number): f"{number}.0.0.1" for number in range(1, num_places + 1)})
    return made, clock


def found(made: Reachability, number: int, code: int = 0, host: str = HOST, place: int | None = None) -> None:
    made.note(peer(number), f"{place or number}.0.0.1", Probed(b"n" * 16, host, PORT, code))


def test_two_probers_in_different_places_prove_an_address() -> None:
    made, _ = make()
    assert made.verdict is Verdict.UNKNOWN
    found(made, 1)
    assert made.verdict is Verdict.PRIVATE
    found(made, 2)
    assert made.proved == (HOST, PORT)


def test_two_probers_in_one_place_count_as_one() -> None:
    made, _ = make()
    found(made, 1, place=1)
    found(made, 2, place=1)
    assert made.verdict is Verdict.PRIVATE


def test_a_prober_that_lies_about_our_host_proves_nothing_alone() -> None:
    made, _ = make()
    found(made, 1, host="8.8.8.8")
    assert made.proved is None
    found(made, 2)
    found(made, 3)
    assert made.proved == (HOST, PORT)


def test_a_prober_that_denies_us_cannot_outweigh_two_others() -> None:
    made, _ = make()
    for number, code in ((1, 0), (2, 0), (3, FAILED)):
        found(made, number, code)
    assert made.verdict is Verdict.PUBLIC


def test_one_prober_is_enough_where_there_is_one_and_in_a_private_swarm() -> None:
    for options in ({"num_places": 1}, {"is_strict": False}):
        made, _ = make(**options)  # type: ignore[arg-type]
        found(made, 1)
        assert made.verdict is Verdict.PUBLIC


def test_an_address_that_may_not_be_announced_is_not_proved() -> None:
    made, _ = make(is_strict=False)
    found(made, 1, host="10.0.0.1")
    assert made.verdict is Verdict.PRIVATE


def test_one_failure_is_a_doubt_and_two_are_a_fact() -> None:
    made, _ = make(is_strict=False)
    found(made, 1)
    found(made, 1, FAILED)
    assert made.verdict is Verdict.PUBLIC
    assert made.is_doubted
    found(made, 1, FAILED)
    assert made.verdict is Verdict.PRIVATE


def test_a_success_clears_the_doubt() -> None:
    made, _ = make(is_strict=False)
    for code in (0, FAILED, 0, FAILED):
        found(made, 1, code)
    assert made.verdict is Verdict.PUBLIC


def test_a_prober_that_had_no_time_says_nothing() -> None:
    made, _ = make(is_strict=False)
    found(made, 1, int(ErrorCode.QUOTA))
    assert made.verdict is Verdict.UNKNOWN


def test_what_is_old_is_forgotten() -> None:
    made, clock = make(is_strict=False)
    found(made, 1)
    clock.now += FORGET_S + 1
    assert made.verdict is Verdict.UNKNOWN


def test_after_a_move_the_address_found_last_counts() -> None:
    made, clock = make(is_strict=False)
    found(made, 1, host="8.8.8.8")
    clock.now += 10
    found(made, 2)
    assert made.proved == (HOST, PORT)


def test_the_operators_host_must_be_what_strict_probers_see() -> None:
    made, _ = make(public_host="7.7.7.7")
    found(made, 1)
    found(made, 2)
    assert made.verdict is Verdict.PRIVATE
    relaxed, _ = make(is_strict=False, public_host="7.7.7.7")
    found(relaxed, 1)
    assert relaxed.proved == ("7.7.7.7", PORT)


def test_the_clock_is_compared_with_the_median_prober() -> None:
    made, _ = make()
    for number, skew_ms in ((1, 5.0), (2, -600_000.0), (3, 7.0)):
        made.note_skew(peer(number), skew_ms)
    assert made.clock_skew_ms == 5.0


def test_hosts_are_compared_in_one_form() -> None:
    assert plain_host("::ffff:9.9.9.9") == HOST
    assert plain_host("fe80::1%eth0") == "fe80::1"
    assert place_of("9.9.1.1") == place_of("::ffff:9.9.2.2") != place_of("9.8.1.1")


# --- the prober


@dataclass
class ProbedLink:
    """A link whose peer asks to be dialled back."""

    peer_id: NodeId = field(default_factory=lambda: peer(1))
    peer_host: str = "::ffff:9.9.9.9"
    is_relayed: bool = False
    is_closed: bool = False
    rtt_ms: float | None = None
    sent: list[Message] = field(default_factory=list)

    def post(self, message: Message) -> None:
        self.sent.append(message)


@dataclass
class Dialler:
    """An endpoint that can only probe."""

    error: LinkError | None = None
    addresses: list[NodeAddress] = field(default_factory=list)

    async def probe(self, address: NodeAddress, timeout_s: float) -> None:
        self.addresses.append(address)
        if self.error is not None:
            raise self.error


def prober(dialler: Dialler, clock: Callable[[], float]) -> Prober:
    return Prober(dialler, Background(), clock=lambda: 5.0, now=clock)  # type: ignore[arg-type]


async def ask(asked: Prober, link: ProbedLink, port: int = PORT) -> Probed:
    before = len(link.sent)
    asked.take(link, Probe(b"n" * 16, port))  # type: ignore[arg-type]
    while len(link.sent) == before:
        await asyncio.sleep(0)
    answer = link.sent[-1]
    assert isinstance(answer, Probed)
    return answer


async def test_a_prober_dials_the_host_it_sees_and_no_other() -> None:
    dialler = Dialler()
    answer = await ask(prober(dialler, Clock()), ProbedLink())
    assert dialler.addresses == [NodeAddress(peer(1), HOST, PORT)]
    assert answer == Probed(b"n" * 16, HOST, PORT, 0, 5000)


async def test_a_prober_that_is_only_asked_what_it_sees_dials_nobody() -> None:
    dialler = Dialler()
    answer = await ask(prober(dialler, Clock()), ProbedLink(), port=0)
    assert (answer.host, answer.code, dialler.addresses) == (HOST, 0, [])


async def test_nobody_is_dialled_for_a_peer_behind_a_sentinel() -> None:
    dialler = Dialler()
    answer = await ask(prober(dialler, Clock()), ProbedLink(is_relayed=True))
    assert (answer.code, dialler.addresses) == (ErrorCode.STATE, [])


async def test_probes_that_fail_are_three_and_then_one_in_thirty_seconds() -> None:
    dialler, clock, link = Dialler(LinkError(ErrorCode.TIMEOUT)), Clock(), ProbedLink()
    asked = prober(dialler, clock)
    codes = [(await ask(asked, link)).code for _ in range(4)]
    assert codes == [101, 101, 101, ErrorCode.QUOTA]
    clock.now += 31
    assert (await ask(asked, link)).code == 101
    assert asked.num_refused == 1


async def test_a_node_that_restarts_often_is_not_refused() -> None:
    asked, link = prober(Dialler(), Clock()), ProbedLink()
    assert {(await ask(asked, link)).code for _ in range(20)} == {0}


# --- asking


async def test_a_prober_that_answers_what_it_was_not_asked_is_not_heard() -> None:
    made, _ = make(is_strict=False)
    link, other = ProbedLink(), ProbedLink(peer(2))
    check = ReachCheck(made, lambda: [link], lambda: PORT, lambda: None)  # type: ignore[list-item,return-value]
    asking = asyncio.create_task(check.run())
    while not link.sent:
        await asyncio.sleep(0)
    probe = link.sent[0]
    assert isinstance(probe, Probe)
    check.take(other, Probed(probe.nonce, HOST, PORT, 0))  # type: ignore[arg-type]
    check.take(link, Probed(b"x" * 16, HOST, PORT, 0))  # type: ignore[arg-type]
    assert made.verdict is Verdict.UNKNOWN
    check.take(link, Probed(probe.nonce, HOST, PORT, 0))  # type: ignore[arg-type]
    assert made.verdict is Verdict.PUBLIC
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
