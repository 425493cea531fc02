"""What peers, sentinels and probers can do to us over real links, and what it comes to."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from routing.admission import Admission, Limits
from routing.background import Background
from routing.dispatcher import Dispatcher
from routing.endpoint import Endpoint
from routing.errors import ErrorCode, RemoteError, SecurityError
from routing.guest_token import GuestScope, sign_guest_token
from routing.identity import Identity
from routing.link import Link
from routing.outbox import MAX_QUEUED
from routing.reach import HOST_BURST, Prober
from routing.reach_check import ReachCheck
from routing.relay import RelayServer
from routing.reservations import Reservations
from routing.types import (
    Capabilities,
    GoAway,
    Incoming,
    Message,
    NodeAddress,
    NodeId,
    Probe,
    Probed,
    Refused,
    RelayOpen,
    Reserve,
    Reserved,
)
from tests.routing.peers import NETWORK_ID, Peer, Rig, cancelled
from tests.routing.test_reach import HOST, PORT, Clock, Dialler, ProbedLink, ask, make, prober


def stop_reading(link: Link) -> None:
    """Go on sending, and take nothing any more."""
    link._carrier.websocket._transport.pause_reading()  # type: ignore[attr-defined]


async def until(is_true: Any) -> None:
    async with asyncio.timeout(10.0):
        while not is_true():
            await asyncio.sleep(0.01)


# --- one that asks and does not read


@pytest.fixture
async def background() -> Any:
    background = Background()
    yield background
    await background.close()


def probes() -> Iterator[Message]:
    while True:
        yield Probe(b"n" * 16, 0)


def circuits() -> Iterator[Message]:
    number = 3  # the dialler's, rising
    while True:
        yield RelayOpen(number, NodeId(b"t" * 32), b"f" * 40)
        number += 2


@pytest.mark.parametrize("asked", [probes, circuits])
async def test_a_peer_that_asks_and_takes_no_answer_is_given_up(
    rig: Rig, background: Background, asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, dispatcher = Identity.generate(), Dispatcher()
    endpoint = Endpoint(victim, NETWORK_ID, Capabilities, dispatcher)
    dispatcher.add(Prober(endpoint, background), (Probe,))
    rig._stack.push_async_callback(endpoint.close)
    host, port = await endpoint.listen("127.0.0.1", 0)
    attacker = await rig.peer()
    link = await attacker.endpoint.dial(NodeAddress(victim.node_id, host, port))
    stop_reading(link)
    [theirs] = endpoint.links
    monkeypatch.setattr("routing.link.OVERRUN_S", 0.05)
    most = 0
    questions = asked()
    async with asyncio.timeout(60.0):
        while not theirs.is_closed:
            for _ in range(200 * (not link.is_closed)):
                link.post(next(questions))
            most = max(most, theirs.num_waiting)
            await asyncio.sleep(0)
    ended = await theirs.wait_closed()
    assert ended is not None
    assert ended.code is ErrorCode.FLOW
    assert most < 16 * MAX_QUEUED


# --- lying sentinels


class Liar(RelayServer):
    """A sentinel whose vouchers do not hold."""

    def _post(self, link: Link, message: Message) -> None:
        if isinstance(message, Reserved):
            message = Reserved(0, message.expires_ms, message.max_bytes, message.max_s, b"v" * 64)
        super()._post(link, message)


async def liar(rig: Rig) -> Peer:
    identity, dispatcher = Identity.generate(), Dispatcher()
    endpoint = Endpoint(identity, NETWORK_ID, Capabilities, dispatcher)
    dispatcher.add(Liar(identity, NETWORK_ID, endpoint), RelayServer.KINDS)
    rig._stack.push_async_callback(endpoint.close)
    host, port = await endpoint.listen("127.0.0.1", 0)
    return Peer(endpoint, None, NodeAddress(identity.node_id, host, port))  # type: ignore[arg-type]


async def test_a_sentinel_with_wrong_vouchers_is_left_for_one_whose_hold(rig: Rig) -> None:
    bad, good = await liar(rig), await rig.sentinel()
    node = await rig.hidden(good, places=[bad.address, good.address])
    await until(lambda: bad.address in node.reservations.last_errors)
    assert node.reservations.sentinels == (good.endpoint.node_id,)
    assert [it.address.relay_id for it in node.reservations.contacts] == [good.endpoint.node_id]
    assert "voucher" in node.reservations.last_errors[bad.address]


class Swapper:
    """A sentinel that opens every circuit to one node, whomever it was asked for."""

    def __init__(self) -> None:
        self.way: Link | None = None
        self.passed: list[bytes] = []

    def on_message(self, link: Link, message: Message) -> None:
        if isinstance(message, Reserve):
            self.way = link
            link.post(Reserved(int(ErrorCode.RELAY_FULL)))
        elif isinstance(message, RelayOpen):
            assert self.way is not None
            near, far = _Pipe(link, self), _Pipe(self.way, self)
            near.other, far.other = far, near
            near.attach(link.side.claim(message.channel, near))
            first = message.first
            far.attach(self.way.side.open(lambda number: Incoming(number, link.peer_id, first), far))
            self.way.pump()

    def on_link_up(self, link: Link) -> None: ...

    def on_link_closed(self, link: Link, error: RemoteError | None) -> None: ...


class _Pipe:
    """One side of a swapped circuit; keeps what the dialler says after its first message."""

    def __init__(self, link: Link, swapper: Swapper) -> None:
        self.link, self.swapper = link, swapper
        self.other: _Pipe | None = None
        self.queue: list[bytes] = []

    def attach(self, channel: Any) -> None:
        self.channel, channel.source = channel, self

    def on_body(self, body: memoryview) -> None:
        if self.link is not self.swapper.way:
            self.swapper.passed.append(bytes(body))
        assert self.other is not None
        self.other.queue.append(bytes(body))
        self.other.link.pump()

    def on_channel_over(self, code: int | None) -> None: ...

    def next_size(self) -> int | None:
        return len(self.queue[0]) if self.queue else None

    def seal_next(self, out: memoryview) -> None:
        out[:] = self.queue.pop(0)


async def test_a_sentinel_that_swaps_circuits_is_noticed_before_anything_is_shown(rig: Rig) -> None:
    swapper, identity = Swapper(), Identity.generate()
    endpoint = Endpoint(identity, NETWORK_ID, Capabilities, swapper)
    rig._stack.push_async_callback(endpoint.close)
    host, port = await endpoint.listen("127.0.0.1", 0)
    place = NodeAddress(identity.node_id, host, port)
    accomplice, victim = await rig.peer(), await rig.peer()
    way = await accomplice.endpoint.dial(place)
    way.accepts_circuits = True
    await way.send(Reserve(60))
    await until(lambda: swapper.way is not None)
    with pytest.raises(SecurityError) as caught:
        await victim.endpoint.dial(NodeAddress(NodeId(b"t" * 32), host, port, identity.node_id))
    assert caught.value.code in (ErrorCode.ID_MISMATCH, ErrorCode.HANDSHAKE)
    assert swapper.passed == []  # its identity and capabilities travel in the third message
    assert accomplice.endpoint.links == [way]


async def test_alternatives_at_places_that_may_not_be_dialled_are_not(rig: Rig) -> None:
    first, trap = await rig.sentinel(), await rig.peer()
    dispatcher = Dispatcher()
    endpoint = Endpoint(Identity.generate(), NETWORK_ID, Capabilities, dispatcher)
    asked: list[NodeAddress] = []

    def may_dial(address: NodeAddress) -> bool:
        asked.append(address)
        return False

    kept = Reservations(endpoint, lambda: [first.address], count=1, may_dial=may_dial)
    dispatcher.add(kept, Reservations.KINDS)
    keeping = asyncio.create_task(kept.run())
    await until(lambda: kept.contacts)
    [theirs] = first.endpoint.links
    theirs.post(GoAway(int(ErrorCode.GOING_AWAY), 0, (trap.address,)))
    await until(lambda: asked)
    await until(lambda: not kept.contacts)
    assert asked == [trap.address]
    assert kept._known() == [first.address]
    await cancelled(keeping)
    await endpoint.close()


async def test_a_refusal_of_a_circuit_that_is_not_ours_changes_nothing(rig: Rig) -> None:
    _, acceptor, link = await rig.pair()
    [theirs] = acceptor.endpoint.links
    await theirs.send(Refused(99, int(ErrorCode.PEER_GONE)))
    await theirs.send(Refused(1, int(ErrorCode.PEER_GONE)))  # the link's own session
    await link.ping()
    assert not link.is_closed


# --- probes


async def test_a_prober_that_names_another_port_does_not_move_us(rig: Rig) -> None:
    made, _ = make(is_strict=False)
    link = ProbedLink()
    check = ReachCheck(made, lambda: [link], lambda: PORT, lambda: None)  # type: ignore[list-item,return-value]
    asking = asyncio.create_task(check.run())
    await until(lambda: link.sent)
    check.take(link, Probed(link.sent[0].nonce, HOST, PORT + 1, 0))  # type: ignore[arg-type,union-attr]
    assert made.proved is None
    await cancelled(asking)


async def test_new_identities_at_one_address_do_not_make_a_prober_a_port_scanner() -> None:
    clock = Clock()
    asked = prober(Dialler(), clock)
    peers = [ProbedLink(NodeId(number.to_bytes(32, "big"))) for number in range(100)]
    codes = [(await ask(asked, link, port=1000 + at)).code for at, link in enumerate(peers)]
    assert codes.count(0) == HOST_BURST
    elsewhere = ProbedLink(NodeId(b"e" * 32), peer_host="8.8.8.8")
    assert (await ask(asked, elsewhere)).code == 0


# --- before a peer is known


def test_one_address_never_holds_every_place_of_those_who_have_not_said_who_they_are() -> None:
    clock = Clock()
    gate, half_open = Admission(Limits(), clock), 0
    for _ in range(1000):  # each holds its place for five seconds
        clock.now += 0.1
        half_open += gate.admit("192.0.2.1", half_open, half_open)
    assert half_open == Limits().max_half_open_per_ip
    assert gate.admit("192.0.2.2", half_open, 0)


async def test_silent_connections_are_counted_by_party(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("routing.admission.is_this_machine", lambda host: False)
    node = await rig.peer(limits=Limits(max_half_open_per_ip=4))
    silent = [await asyncio.open_connection(node.address.host, node.address.port) for _ in range(4)]
    await until(lambda: len(node.endpoint._half_open) == 4)
    refused, other = await asyncio.open_connection(node.address.host, node.address.port)
    assert await refused.read() == b""
    for _, writer in (*silent, (refused, other)):
        writer.close()


@pytest.mark.parametrize("is_bound", [False, True])
async def test_a_token_for_anybody_is_not_told_to_whoever_dials(rig: Rig, is_bound: bool) -> None:
    issuer, guest = Identity.generate(), Identity.generate()
    token = sign_guest_token(
        issuer,
        NETWORK_ID,
        client_id=guest.node_id if is_bound else None,
        scope=GuestScope.SERVE,
        now_s=1e9,
        lifetime_s=60,
        quota=1,
    )
    endpoint = Endpoint(guest, NETWORK_ID, lambda: Capabilities(token=token), Dispatcher())
    rig._stack.push_async_callback(endpoint.close)
    host, port = await endpoint.listen("127.0.0.1", 0)
    stranger = await rig.peer()
    link = await stranger.endpoint.dial(NodeAddress(guest.node_id, host, port))
    assert link.capabilities.token == (token if is_bound else b"")


async def test_pings_of_the_websocket_from_one_that_does_not_read_do_not_fill_our_memory(rig: Rig) -> None:
    _, acceptor, link = await rig.pair()
    [theirs] = acceptor.endpoint.links
    stop_reading(link)
    theirs._carrier.websocket._transport.get_extra_info("socket").setsockopt(  # type: ignore[attr-defined]
        socket.SOL_SOCKET, socket.SO_SNDBUF, 4096
    )
    websocket: Any = link._carrier.websocket
    async with asyncio.timeout(30.0):
        while not theirs.is_closed:
            if not websocket._is_over:
                for _ in range(100):
                    websocket._protocol.send_ping(b"p" * 125)
                websocket._flush()
            assert theirs._carrier.websocket._transport.get_write_buffer_size() < 2 << 20  # type: ignore[attr-defined]
            await asyncio.sleep(0)


async def test_a_flood_of_small_frames_leaves_others_their_turn(rig: Rig) -> None:
    _, acceptor, link = await rig.pair()
    took: list[float] = []
    inbox_take = acceptor.inbox.on_message

    def on_message(link: Link, message: Message) -> None:
        inbox_take(link, message)
        time.sleep(0.0005)

    acceptor.inbox.on_message = on_message  # type: ignore[method-assign]
    for _ in range(2000):
        link.post(Probe(b"n" * 16, 0))
    while len(acceptor.inbox.messages) < 2000:
        began = time.thread_time()
        await asyncio.sleep(0)
        took.append(time.thread_time() - began)
    assert len(took) > 100  # a turn is four of them, however many one read brought


async def test_a_burst_of_our_own_does_not_cost_the_link(rig: Rig) -> None:
    _, acceptor, link = await rig.pair()
    for _ in range(20 * MAX_QUEUED):
        link.post(Probe(b"n" * 16, 0))
    assert link.num_waiting > MAX_QUEUED
    await acceptor.inbox.until(lambda: len(acceptor.inbox.messages) == 20 * MAX_QUEUED, timeout_s=60)
    assert not link.is_closed
