from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest
import pytest_asyncio
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from routing import wire
from routing.admission import Limits
from routing.answers import SHORT_TOKEN_BYTES
from routing.endpoint import Endpoint
from routing.errors import ErrorCode, LinkError, ProtocolError, RemoteError, SecurityError, WorkError
from routing.handshake import Handshake
from routing.heartbeat import HeartbeatTiming
from routing.identity import Identity
from routing.link import Link
from routing.mux import HEADER, FrameType
from routing.types import (
    Answer,
    AnswerKind,
    Cancel,
    Capabilities,
    Describe,
    Message,
    NodeAddress,
    NodeId,
    SessionId,
    Step,
)
from tests.routing.peers import NETWORK_ID, SESSION_ID, Inbox, Peer, Rig, dial_raw, open_rig, step

QUICK = HeartbeatTiming(idle_s=0.05, dead_s=2.0, watch_s=0.02)


async def refusal(dialler: Peer, address: NodeAddress) -> RemoteError:
    with pytest.raises(RemoteError) as caught:
        await dialler.endpoint.dial(address)
    return caught.value


# --- carrying messages


async def test_small_messages_of_one_turn_of_the_loop_arrive_in_one_read(rig: Rig) -> None:
    _, acceptor, link = await rig.pair()
    [theirs] = acceptor.endpoint.links
    websocket: Any = theirs._carrier.websocket
    reads: list[bytes] = []
    receive = websocket.data_received

    def data_received(chunk: bytes) -> None:
        reads.append(chunk)
        receive(chunk)

    websocket.data_received = data_received
    websocket._transport.set_protocol(websocket)  # which looks the method up again
    for number in range(1, 5):
        link.post(step(number=number))
    await acceptor.inbox.receive(4)
    assert len(reads) == 1


async def test_messages_arrive_in_order_both_ways(rig: Rig) -> None:
    dialler, acceptor, link = await rig.pair()
    for number in range(1, 21):
        await link.send(step(number=number))
    received = await acceptor.inbox.receive(20)
    assert [message.step for message in received if isinstance(message, Step)] == list(range(1, 21))
    back = acceptor.inbox.ups[0]
    await back.send(Answer(SESSION_ID, 1, 20, 0, 1, b"done"))
    assert (await dialler.inbox.receive(1))[0] == Answer(SESSION_ID, 1, 20, 0, 1, b"done")


async def test_arrived_payload_is_writable_and_its_own(rig: Rig) -> None:
    _, acceptor, link = await rig.pair()
    await link.send(step(b"abcd"))
    (message,) = await acceptor.inbox.receive()
    assert isinstance(message, Step)
    assert not memoryview(message.payload).readonly


async def test_decode_token_costs_one_frame_each_way_and_64_bytes(rig: Rig) -> None:
    dialler, acceptor, link = await rig.pair()
    back = acceptor.inbox.ups[0]
    before = dialler.endpoint.counters
    for number in range(1, 501):
        await link.send(step(b"x" * 2304, number=number))
        await acceptor.inbox.receive(number)
        await back.send(Answer(SESSION_ID, 1, number, 0, 1, b"c" * 64))
        await dialler.inbox.receive(number)
    after = dialler.endpoint.counters
    assert after.frames_sent - before.frames_sent == Counter(DATA=500)
    assert after.frames_received - before.frames_received == Counter(DATA=500)
    assert after.payload_bytes_sent - before.payload_bytes_sent == 500 * (2304 + 64)
    assert after.payload_bytes_received - before.payload_bytes_received == 500 * 128
    assert after.messages_sent == Counter(Step=500)
    assert acceptor.endpoint.counters.messages_received == Counter(Step=500)


async def test_a_frame_of_four_codebooks_drawn_remotely_costs_72_bytes_on_its_way_home(rig: Rig) -> None:
    dialler, acceptor, _ = await rig.pair()
    back = acceptor.inbox.ups[0]
    before = dialler.endpoint.counters
    for number in range(1, 101):
        ids = b"i" * (4 * SHORT_TOKEN_BYTES)
        await back.send(Answer(SESSION_ID, 1, number, 0, 1, ids, AnswerKind.TOKEN_IDS))
        await dialler.inbox.receive(number)
    after = dialler.endpoint.counters
    assert after.frames_received - before.frames_received == Counter(DATA=100)
    assert after.payload_bytes_received - before.payload_bytes_received == 100 * 72


async def test_padding_hides_the_size_of_an_answer(rig: Rig) -> None:
    dialler, acceptor, link = await rig.pair(pad=True)
    sizes = set()
    for number, size in enumerate([4, 64, 200], start=1):
        before = dialler.endpoint.counters.payload_bytes_sent
        await link.send(Answer(SESSION_ID, 1, number, 0, 1, b"x" * size))
        sizes.add(dialler.endpoint.counters.payload_bytes_sent - before)
        await acceptor.inbox.receive(number)
    assert sizes == {256 + 32}


@pytest.mark.parametrize("size", [65_511 - 32, 65_512 - 32, 300_000, 8 << 20])
async def test_bulk_arrives_whole(rig: Rig, size: int) -> None:
    _, acceptor, link = await rig.pair()
    payload = os.urandom(size)
    await link.send(step(payload))
    (message,) = await acceptor.inbox.receive()
    assert isinstance(message, Step)
    assert message.payload == payload


async def test_small_message_passes_a_bulk_that_is_on_its_way(rig: Rig) -> None:
    _, acceptor, link = await rig.pair()
    bulk = asyncio.create_task(link.send(step(bytes(16 << 20))))
    await asyncio.sleep(0)
    for number in range(1, 6):
        await link.send(step(number=number, session_id=SessionId(b"t" * 16)))
    await bulk
    received = await acceptor.inbox.receive(6)
    assert [len(m.payload) for m in received if isinstance(m, Step)] == [64] * 5 + [16 << 20]


async def test_cancel_passes_the_prefill_of_its_own_session_and_steps_do_not(rig: Rig) -> None:
    _, acceptor, link = await rig.pair()
    link.post(step(bytes(4 << 20)))
    link.post(step(number=2))
    link.post(Cancel(SESSION_ID, 1, b"p" * 32))
    received = await acceptor.inbox.receive(3)
    assert [type(message).__name__ for message in received] == ["Cancel", "Step", "Step"]
    assert isinstance(received[1], Step)
    assert received[1].step == 1


async def test_posting_never_waits_and_tells_when_it_has_left(rig: Rig) -> None:
    _, acceptor, link = await rig.pair()
    gone = asyncio.Event()
    link.post(step(bytes(8 << 20)), gone.set)
    assert not gone.is_set()
    assert link.waiting_bytes > 4 << 20
    await gone.wait()
    assert link.waiting_bytes == 0
    await acceptor.inbox.receive()


async def test_what_leaves_at_once_is_told_without_another_turn_of_the_loop(rig: Rig) -> None:
    _, acceptor, link = await rig.pair()
    left: list[bool] = []
    link.post(step(), lambda: left.append(True))
    assert left == [True]
    await acceptor.inbox.receive()


async def test_cancelled_send_frees_the_receiver_and_the_link_goes_on(rig: Rig) -> None:
    _, acceptor, link = await rig.pair()
    bulk = asyncio.create_task(link.send(step(bytes(32 << 20))))
    await asyncio.sleep(0.01)
    bulk.cancel()
    with pytest.raises(asyncio.CancelledError):
        await bulk
    await link.send(step(b"after"))
    (message,) = await acceptor.inbox.receive()
    assert isinstance(message, Step)
    assert message.payload == b"after"
    assert acceptor.inbox.ups[0]._reassembler.num_partial == 0


async def test_message_over_the_peers_limit_is_refused_here(rig: Rig) -> None:
    _, acceptor, link = await rig.pair()
    with pytest.raises(ProtocolError) as caught:
        await link.send(step(bytes((64 << 20) + 1)))
    assert caught.value.code is ErrorCode.TOO_BIG
    await link.send(Describe())
    assert await acceptor.inbox.receive() == [Describe()]


async def test_peer_that_does_not_read_holds_the_sender_back(rig: Rig) -> None:
    _, acceptor, link = await rig.pair()
    transport: Any = acceptor.inbox.ups[0]._carrier.websocket._transport
    transport.pause_reading()
    sending = asyncio.create_task(link.send(step(bytes(32 << 20))))
    await asyncio.sleep(0.2)
    assert not sending.done()
    assert link.waiting_bytes > 24 << 20
    transport.resume_reading()
    await sending
    await acceptor.inbox.receive()


async def test_receiver_that_raises_keeps_the_link_and_shows_no_content(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    class Clumsy(Inbox):
        def on_message(self, link: Link, message: Message) -> None:
            super().on_message(link, message)
            raise ValueError("the prompt of a user")

    inbox = Clumsy()
    endpoint = Endpoint(Identity.generate(), NETWORK_ID, Capabilities, inbox)
    host, port = await endpoint.listen("127.0.0.1", 0)
    dialler = await rig.peer()
    link = await dialler.endpoint.dial(NodeAddress(endpoint.node_id, host, port))
    with caplog.at_level(logging.ERROR):
        await link.send(step())
        await link.send(Describe())
        await inbox.receive(2)
    assert not link.is_closed
    assert "ValueError" in caplog.text
    assert "prompt" not in caplog.text
    await endpoint.close()


async def test_trace_times_are_measured(rig: Rig) -> None:
    _, acceptor, link = await rig.pair()
    await link.send(step())
    await acceptor.inbox.receive()
    assert 0 < link.last_seal_us < 1e6
    assert 0 < acceptor.inbox.ups[0].last_open_us < 1e6


async def test_capabilities_and_ids_are_known_on_both_sides(rig: Rig) -> None:
    dialler, acceptor, link = await rig.pair()
    assert link.peer_id == acceptor.endpoint.node_id
    assert acceptor.inbox.ups[0].peer_id == dialler.endpoint.node_id
    assert link.capabilities == Capabilities()
    assert link.is_dialler
    assert not acceptor.inbox.ups[0].is_dialler


# --- dialling


async def test_live_link_is_used_again(rig: Rig) -> None:
    dialler, acceptor, link = await rig.pair()
    assert await dialler.endpoint.dial(acceptor.address) is link
    assert acceptor.endpoint.counters.handshakes_done == 1
    assert dialler.endpoint.links_to(acceptor.endpoint.node_id) == [link]


async def test_accepted_link_is_used_for_dialling_back(rig: Rig) -> None:
    dialler, acceptor, _ = await rig.pair()
    assert await acceptor.endpoint.dial(dialler.address) is acceptor.inbox.ups[0]


async def test_simultaneous_dials_share_one_handshake(rig: Rig) -> None:
    dialler, acceptor = await rig.peer(), await rig.peer()
    links = await asyncio.gather(*(dialler.endpoint.dial(acceptor.address) for _ in range(20)))
    assert len(set(links)) == 1
    assert dialler.endpoint.counters.handshakes_done == acceptor.endpoint.counters.handshakes_done == 1


async def test_one_caller_that_gives_up_does_not_spoil_the_others_dial(rig: Rig) -> None:
    dialler, acceptor = await rig.peer(), await rig.peer()
    dials = [asyncio.create_task(dialler.endpoint.dial(acceptor.address)) for _ in range(3)]
    await asyncio.sleep(0)
    dials[0].cancel()
    assert await dials[1] is await dials[2]
    assert dials[0].cancelled()


async def test_closed_link_is_dialled_again(rig: Rig) -> None:
    dialler, acceptor, link = await rig.pair()
    await link.close()
    again = await dialler.endpoint.dial(acceptor.address)
    assert again is not link
    assert not again.is_closed


async def test_failed_dial_can_be_tried_again(rig: Rig) -> None:
    dialler, acceptor = await rig.peer(), await rig.peer()
    dead = NodeAddress(acceptor.endpoint.node_id, "127.0.0.1", 1)
    for _ in range(2):
        assert (await refusal(dialler, dead)).code is ErrorCode.LINK_LOST
    assert dialler.endpoint.counters.handshakes_failed == Counter(LINK_LOST=2)
    assert await dialler.endpoint.dial(acceptor.address)


async def test_two_links_of_one_identity_stand_side_by_side(rig: Rig) -> None:
    identity, acceptor = Identity.generate(), await rig.peer()
    endpoints = [Endpoint(identity, NETWORK_ID, Capabilities, Inbox()) for _ in range(2)]
    for endpoint in endpoints:
        await endpoint.dial(acceptor.address)
    links = acceptor.endpoint.links_to(identity.node_id)
    assert links == list(reversed(acceptor.inbox.ups))
    await endpoints[1].close()
    await acceptor.inbox.until(lambda: len(acceptor.inbox.ends) == 1)
    assert acceptor.endpoint.links_to(identity.node_id) == [links[1]]
    await endpoints[0].close()


async def test_link_too_many_of_one_identity_is_told_busy_and_nobody_is_kicked(rig: Rig) -> None:
    identity, acceptor = Identity.generate(), await rig.peer(limits=Limits(max_links_per_identity=2))
    endpoints = [Endpoint(identity, NETWORK_ID, Capabilities, Inbox()) for _ in range(3)]
    for endpoint in endpoints[:2]:
        await endpoint.dial(acceptor.address)
    with pytest.raises(WorkError) as caught:
        await endpoints[2].dial(acceptor.address)
    assert caught.value.code is ErrorCode.BUSY
    assert len(acceptor.endpoint.links_to(identity.node_id)) == 2
    assert acceptor.inbox.ends == []
    for endpoint in endpoints:
        await endpoint.close()


async def test_peer_that_is_not_allowed_is_told_so(rig: Rig) -> None:
    acceptor = await rig.peer(allow=lambda *_: False)
    assert (await refusal(await rig.peer(), acceptor.address)).code is ErrorCode.NOT_ALLOWED
    assert acceptor.inbox.ups == []


async def test_wrong_node_id_is_a_mismatch(rig: Rig) -> None:
    dialler, acceptor = await rig.peer(), await rig.peer()
    wrong = NodeAddress(NodeId(b"x" * 32), acceptor.address.host, acceptor.address.port)
    error = await refusal(dialler, wrong)
    assert isinstance(error, SecurityError)
    assert error.code is ErrorCode.ID_MISMATCH
    assert dialler.endpoint.counters.handshakes_failed == Counter(ID_MISMATCH=1)
    assert acceptor.inbox.ups == []


async def test_wrong_swarm_is_a_network_error(rig: Rig) -> None:
    acceptor = await rig.peer(network_id=b"m" * 32)
    assert (await refusal(await rig.peer(), acceptor.address)).code is ErrorCode.NETWORK


@pytest.mark.parametrize(("near", "far"), [(b"p" * 32, b"q" * 32), (b"p" * 32, None), (None, b"q" * 32)])
async def test_wrong_swarm_secret_is_a_failed_handshake(
    rig: Rig, near: bytes | None, far: bytes | None
) -> None:
    dialler, acceptor = await rig.peer(psk=near), await rig.peer(psk=far)
    error = await refusal(dialler, acceptor.address)
    assert error.code is ErrorCode.HANDSHAKE
    assert "secret" in error.text
    assert dialler.inbox.ups == acceptor.inbox.ups == []


async def test_same_swarm_secret_lets_in(rig: Rig) -> None:
    _, acceptor, link = await rig.pair(psk=b"p" * 32)
    await link.send(Describe())
    assert await acceptor.inbox.receive() == [Describe()]


async def test_server_that_is_no_node_is_a_link_error(rig: Rig) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    error = await refusal(await rig.peer(), NodeAddress(NodeId(b"x" * 32), host, port))
    assert error.code is ErrorCode.LINK_LOST
    assert "404" in error.text
    server.close()


async def test_server_that_says_nothing_is_a_timeout(rig: Rig) -> None:
    done = asyncio.Event()

    async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        done.set()

    server = await asyncio.start_server(ignore, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    dialler = await rig.peer(limits=Limits(handshake_timeout_s=0.2))
    error = await refusal(dialler, NodeAddress(NodeId(b"x" * 32), host, port))
    assert error.code is ErrorCode.TIMEOUT
    server.close()
    await done.wait()


async def test_closing_an_endpoint_ends_a_dial_in_progress(rig: Rig) -> None:
    dialler, acceptor = await rig.peer(), await rig.peer()
    dial = asyncio.create_task(dialler.endpoint.dial(acceptor.address))
    await asyncio.sleep(0)
    await dialler.endpoint.close()
    with pytest.raises(LinkError):
        await dial
    assert (await refusal(dialler, acceptor.address)).code is ErrorCode.LINK_LOST


async def test_port_in_use_is_a_link_error_that_says_so(rig: Rig) -> None:
    first, second = await rig.peer(), await rig.peer()
    with pytest.raises(LinkError, match="in use"):
        await second.endpoint.listen("127.0.0.1", first.address.port)


# --- ends


async def test_proper_close_is_no_error_on_either_side(rig: Rig) -> None:
    dialler, acceptor, link = await rig.pair()
    await link.close()
    await acceptor.inbox.until(lambda: acceptor.inbox.ends == [None])
    assert dialler.inbox.ends == [None]
    assert await link.wait_closed() is None
    with pytest.raises(LinkError):
        await link.send(Describe())


async def test_close_with_a_code_tells_the_peer(rig: Rig) -> None:
    _, acceptor, link = await rig.pair()
    await link.close(ErrorCode.BUSY)
    await acceptor.inbox.until(lambda: len(acceptor.inbox.ends) == 1)
    error = acceptor.inbox.ends[0]
    assert isinstance(error, WorkError)
    assert error.code is ErrorCode.BUSY


async def test_connection_cut_without_a_sealed_end_is_a_lost_link(rig: Rig) -> None:
    for cut in ("abort", "close"):
        dialler, acceptor, link = await rig.pair()
        getattr(link._carrier.websocket, cut)()
        await acceptor.inbox.until(lambda inbox=acceptor.inbox: len(inbox.ends) == 1)
        error = acceptor.inbox.ends[0]
        assert isinstance(error, LinkError)
        assert error.code is ErrorCode.LINK_LOST
        await dialler.inbox.until(lambda inbox=dialler.inbox: len(inbox.ends) == 1)


async def test_waiting_senders_and_pingers_hear_of_the_end(rig: Rig) -> None:
    _, acceptor, link = await rig.pair()
    transport: Any = acceptor.inbox.ups[0]._carrier.websocket._transport
    transport.pause_reading()
    waiting = [asyncio.create_task(link.send(step(bytes(32 << 20)))), asyncio.create_task(link.ping())]
    await asyncio.sleep(0.05)
    link._carrier.websocket.abort()
    for task in waiting:
        with pytest.raises(LinkError):
            await task
    transport.resume_reading()


@pytest.mark.parametrize(
    "frame",
    [
        HEADER.pack(FrameType.DATA, 0, 0, 1) + bytes(100),
        HEADER.pack(FrameType.DATA, 2, 0, 1) + bytes(100),
        HEADER.pack(0x90, 0, 0, 1),
        HEADER.pack(FrameType.HS, 0, 0, 1) + b"again",
        HEADER.pack(FrameType.DATA, 0, 0, 7) + bytes(100),
        b"",
    ],
    ids=["forged record", "reserved flag", "critical type", "handshake again", "other channel", "empty"],
)
async def test_bad_frame_ends_the_link_with_a_typed_error_on_both_sides(rig: Rig, frame: bytes) -> None:
    dialler, acceptor, link = await rig.pair()
    link._carrier.websocket.write(frame)
    await dialler.inbox.until(lambda: len(dialler.inbox.ends) == 1)
    near, far = dialler.inbox.ends[0], acceptor.inbox.ends[0]
    assert isinstance(far, ProtocolError | SecurityError)
    assert near is not None
    assert near.code is far.code


async def test_malformed_message_ends_the_link_with_its_code(rig: Rig) -> None:
    dialler, acceptor, link = await rig.pair()
    link._outbox.push(wire.STEP, b"lane", [b"no step"])
    link._pump()
    await dialler.inbox.until(lambda: len(dialler.inbox.ends) == 1)
    codes = [inbox.ends[0].code for inbox in (dialler.inbox, acceptor.inbox) if inbox.ends[0]]
    assert codes == [ErrorCode.MALFORMED, ErrorCode.MALFORMED]
    assert acceptor.endpoint.links == []


async def test_replayed_record_ends_the_link_and_is_not_delivered_twice(rig: Rig) -> None:
    _, acceptor, link = await rig.pair()
    frames: list[bytes] = []
    write = link._carrier.websocket.write

    def keep(frame: Any) -> None:
        frames.append(bytes(frame))
        write(frame)

    link._carrier.websocket.write = keep  # type: ignore[method-assign]
    await link.send(step())
    write(frames[0])
    await acceptor.inbox.until(lambda: len(acceptor.inbox.ends) == 1)
    error = acceptor.inbox.ends[0]
    assert error is not None
    assert error.code is ErrorCode.DECRYPT
    assert len(acceptor.inbox.messages) == 1


async def test_cut_record_ends_the_link_and_harms_no_other(rig: Rig) -> None:
    dialler, acceptor, link = await rig.pair()
    bystander = await (await rig.peer()).endpoint.dial(acceptor.address)
    write = link._carrier.websocket.write
    link._carrier.websocket.write = lambda frame: write(frame[:-1])  # type: ignore[method-assign]
    await link.send(step())
    await acceptor.inbox.until(lambda: len(acceptor.inbox.ends) == 1)
    error = acceptor.inbox.ends[0]
    assert error is not None
    assert error.code is ErrorCode.DECRYPT
    assert acceptor.inbox.messages == []
    await bystander.send(Describe())
    await acceptor.inbox.receive()
    await dialler.inbox.until(lambda: len(dialler.inbox.ends) == 1)


async def test_huge_frame_and_text_frame_end_the_link(rig: Rig) -> None:
    for code in (ErrorCode.TOO_BIG, ErrorCode.MALFORMED):
        _, acceptor, link = await rig.pair()
        websocket = link._carrier.websocket
        if code is ErrorCode.TOO_BIG:
            websocket.write(bytes(1 << 20))
        else:
            websocket._protocol.send_text(b"hello")
            websocket._flush()
        await acceptor.inbox.until(lambda inbox=acceptor.inbox: len(inbox.ends) == 1)
        error = acceptor.inbox.ends[0]
        assert isinstance(error, ProtocolError)
        assert error.code is code
        await link.wait_closed()


async def test_fragmented_websocket_message_is_put_together(rig: Rig) -> None:
    _, acceptor, link = await rig.pair()
    protocol = link._carrier.websocket._protocol

    def in_fragments(frame: Any) -> None:
        protocol.send_binary(frame[:5], fin=False)
        protocol.send_continuation(frame[5:20], fin=False)
        protocol.send_continuation(frame[20:], fin=True)
        link._carrier.websocket._flush()

    link._carrier.websocket.write = in_fragments  # type: ignore[method-assign]
    await link.send(Describe())
    assert await acceptor.inbox.receive() == [Describe()]


async def test_announced_size_over_the_limit_ends_the_link_before_memory_is_taken(rig: Rig) -> None:
    _, acceptor, link = await rig.pair()
    link._outbox._max_message = 1 << 40
    link.post(step(bytes((64 << 20) + 1)))
    await acceptor.inbox.until(lambda: len(acceptor.inbox.ends) == 1)
    error = acceptor.inbox.ends[0]
    assert error is not None
    assert error.code is ErrorCode.TOO_BIG
    assert acceptor.endpoint._in_flight.used == 0


# --- before a peer is known


def junk_messages() -> list[bytes]:
    source = Random(1)
    junk = [source.randbytes(source.randrange(60)) for _ in range(150)]
    for kind in (
        FrameType.DATA,
        FrameType.FIN,
        FrameType.RESET,
        FrameType.CREDIT,
        FrameType.PING,
        0x7F,
        0xFF,
    ):
        junk += [HEADER.pack(kind, 0, 0, 1) + source.randbytes(source.randrange(50)) for _ in range(20)]
    junk += [HEADER.pack(FrameType.HS, 0, 0, 1) + source.randbytes(source.randrange(32)) for _ in range(70)]
    junk += [HEADER.pack(FrameType.HS, 0, 0, number) + bytes(32) for number in range(40)]
    return junk


@pytest.mark.long
async def test_400_junk_first_messages_get_no_word_back_and_harm_nobody(rig: Rig) -> None:
    acceptor = await rig.peer(limits=Limits(handshakes_per_s=1e6))
    junk = junk_messages()
    assert len(junk) == 400
    for message in junk:
        raw = await dial_raw(acceptor.address)
        raw.websocket.write(message)
        await raw.lost.wait()
        assert raw.frames == []
    assert sum(acceptor.endpoint.counters.handshakes_failed.values()) == 400
    link = await (await rig.peer()).endpoint.dial(acceptor.address)
    await link.send(Describe())
    assert await acceptor.inbox.receive() == [Describe()]


async def test_junk_instead_of_a_websocket_harms_nobody(rig: Rig) -> None:
    acceptor = await rig.peer(limits=Limits(handshake_timeout_s=0.3))
    for junk in (b"", b"\0" * 100, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"GET " + b"x" * 100_000):
        reader, writer = await asyncio.open_connection(acceptor.address.host, acceptor.address.port)
        writer.write(junk)
        if not junk:
            writer.write_eof()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
    await (await rig.peer()).endpoint.dial(acceptor.address)


async def test_browser_page_is_not_let_in(rig: Rig) -> None:
    acceptor = await rig.peer()
    reader, writer = await asyncio.open_connection(acceptor.address.host, acceptor.address.port)
    key = base64.b64encode(bytes(16)).decode()
    lines = (
        "GET / HTTP/1.1",
        "Host: x",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
    )
    request = "\r\n".join((*lines, f"Sec-WebSocket-Key: {key}", "Origin: http://evil.example", "", ""))
    writer.write(request.encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 403")
    writer.close()


async def test_dawdler_is_cut_after_the_handshake_time(rig: Rig) -> None:
    acceptor = await rig.peer(limits=Limits(handshake_timeout_s=0.1))
    raw = await dial_raw(acceptor.address)
    handshake = Handshake(acceptor.endpoint.membership, Capabilities(), acceptor.endpoint.node_id)
    raw.websocket.write(HEADER.pack(FrameType.HS, 0, 0, 1) + handshake.start())
    await raw.lost.wait()
    assert [frame[0] for frame in raw.frames] == [FrameType.HS]
    reader, writer = await asyncio.open_connection(acceptor.address.host, acceptor.address.port)
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()
    assert acceptor.endpoint.counters.handshakes_failed == Counter(TIMEOUT=1)


async def test_half_open_connections_are_bounded_and_room_comes_back(rig: Rig) -> None:
    acceptor = await rig.peer(limits=Limits(max_half_open=3))
    waiting = [await dial_raw(acceptor.address) for _ in range(3)]
    dialler = await rig.peer()
    assert (await refusal(dialler, acceptor.address)).code is ErrorCode.LINK_LOST
    assert acceptor.endpoint.counters.connections_refused == 1
    waiting[0].websocket.abort()
    await waiting[0].lost.wait()
    while acceptor.endpoint.counters.handshakes_failed != Counter(LINK_LOST=1):
        await asyncio.sleep(0.01)
    await dialler.endpoint.dial(acceptor.address)


# --- silence


async def test_idle_link_pings_and_lives(rig: Rig) -> None:
    dialler, _, link = await rig.pair(timing=QUICK)
    while (counters := dialler.endpoint.counters).frames_received["PONG"] < 4:
        await asyncio.sleep(0.02)
    assert not link.is_closed
    assert counters.messages_sent == Counter()
    assert link.rtt_ms is not None
    assert link.rtt_ms < 100


async def test_ping_measures_the_round_trip(rig: Rig) -> None:
    _, _, link = await rig.pair()
    assert link.rtt_ms is None
    rtt_ms = await link.ping()
    assert link.rtt_ms == rtt_ms
    assert 0 < rtt_ms < 1000
    assert len(await asyncio.gather(*(link.ping() for _ in range(50)))) == 50


async def test_pings_behind_a_full_buffer_are_all_answered(rig: Rig) -> None:
    _, acceptor, link = await rig.pair()
    transport: Any = acceptor.inbox.ups[0]._carrier.websocket._transport
    transport.pause_reading()
    link.post(step(bytes(32 << 20)))
    await asyncio.sleep(0.05)
    pings = [asyncio.create_task(link.ping()) for _ in range(10)]
    await asyncio.sleep(0.05)
    transport.resume_reading()
    await asyncio.gather(*pings)


@pytest_asyncio.fixture
async def frozen(rig: Rig) -> AsyncIterator[tuple[Peer, Link, asyncio.subprocess.Process]]:
    """A link to a process that is stopped, and goes on when the test is over."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.routing.stopped_peer", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    address = wire.parse_address((await process.stdout.readline()).decode())
    dialler = await rig.peer(timing=HeartbeatTiming(idle_s=0.2, dead_s=2.0, watch_s=0.05))
    link = await dialler.endpoint.dial(address)
    await link.ping()
    process.send_signal(signal.SIGSTOP)
    yield dialler, link, process
    process.kill()
    await process.communicate()


async def test_stopped_peer_is_noticed_and_holds_no_sender(
    frozen: tuple[Peer, Link, asyncio.subprocess.Process],
) -> None:
    dialler, link, _ = frozen
    with pytest.raises(LinkError) as caught:
        await link.send(step(bytes(32 << 20)))
    assert caught.value.code is ErrorCode.KEEPALIVE
    assert [error.code for error in dialler.inbox.ends if error] == [ErrorCode.KEEPALIVE]
    assert dialler.endpoint.links == []


async def test_watched_peer_that_stops_falls_silent_long_before_it_is_dead(
    frozen: tuple[Peer, Link, asyncio.subprocess.Process],
) -> None:
    _, link, process = frozen
    with link.watch():
        while link.silent_for_s < 0.3:
            assert not link.is_closed
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGCONT)
        while link.silent_for_s > 0.3:
            await asyncio.sleep(0.01)
    assert not link.is_closed


async def test_dial_goes_around_a_link_that_fell_silent(
    rig: Rig, frozen: tuple[Peer, Link, asyncio.subprocess.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    dialler, link, process = frozen
    monkeypatch.setattr("routing.endpoint.STALE_AFTER_S", 0.2)
    with link.watch():
        while link.silent_for_s < 0.2:
            await asyncio.sleep(0.01)
    host, port = link._carrier.websocket._transport.get_extra_info("peername")  # type: ignore[union-attr]
    dial = asyncio.create_task(dialler.endpoint.dial(NodeAddress(link.peer_id, host, port)))
    await asyncio.sleep(0.05)
    process.send_signal(signal.SIGCONT)
    assert await dial is not link


# --- nothing is left


async def test_closing_leaves_no_task_and_no_connection() -> None:
    before = asyncio.all_tasks()
    async with open_rig() as rig:
        dialler, acceptor, link = await rig.pair()
        with link.watch():
            await link.send(step(bytes(1 << 20)))
        await dial_raw(acceptor.address)
    assert asyncio.all_tasks() == before
    assert dialler.endpoint.links == acceptor.endpoint.links == []
    assert link.is_closed


async def test_counters_keep_what_closed_links_did(rig: Rig) -> None:
    dialler, acceptor, link = await rig.pair()
    await link.send(step())
    await acceptor.inbox.receive()
    before = dialler.endpoint.counters
    assert before.frames_sent == Counter(HS=2, DATA=1)
    await link.close()
    after = dialler.endpoint.counters
    assert after.messages_sent == Counter(Step=1)
    assert after.frames_sent == Counter(HS=2, DATA=2)


def test_all_of_it_runs_on_uvloop() -> None:
    async def main() -> None:
        async with open_rig() as rig:
            dialler, acceptor, link = await rig.pair()
            await link.send(step(bytes(2 << 20)))
            await acceptor.inbox.receive()
            assert 0 < await link.ping() < 1000
            assert (
                await refusal(await rig.peer(psk=b"p" * 32), acceptor.address)
            ).code is ErrorCode.HANDSHAKE
            await link.close()
            assert dialler.inbox.ends == [None]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_whatever_happens_to_frames_only_a_true_prefix_arrives(data: st.DataObject) -> None:
    asyncio.run(_tamper(data))


async def _tamper(data: st.DataObject) -> None:
    async with open_rig() as rig:
        _, acceptor, link = await rig.pair()
        websocket = link._carrier.websocket
        write, held = websocket.write, list[bytes]()
        websocket.write = lambda frame: held.append(bytes(frame))  # type: ignore[method-assign]
        for number in range(1, 6):
            link.post(step(bytes([number]) * (100 if number != 3 else 100_000), number=number))
        position = data.draw(st.integers(0, len(held) - 1))
        frame = bytearray(held[position])
        match data.draw(st.sampled_from(["flip", "drop", "repeat", "swap", "cut"])):
            case "flip":
                frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
                held[position] = bytes(frame)
            case "drop":
                del held[position]
            case "repeat":
                held.insert(position, held[position])
            case "swap":
                held[position], held[position - 1] = held[position - 1], held[position]
            case "cut":
                held[position] = bytes(frame[: data.draw(st.integers(0, len(frame) - 1))])
        for message in held:
            write(message)
        websocket.write = write  # type: ignore[method-assign]
        await link.close()
        await acceptor.inbox.until(lambda: len(acceptor.inbox.ends) == 1)
        numbers = [message.step for message in acceptor.inbox.messages if isinstance(message, Step)]
        assert numbers == list(range(1, len(numbers) + 1))
