from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing import records
from routing.errors import ErrorCode, ProtocolError, RemoteError, SecurityError
from routing.noise import CipherState
from routing.outbox import Outbox
from routing.records import (
    MAX_PAYLOAD,
    OVERHEAD,
    TOTAL,
    WHOLE,
    Opener,
    Quota,
    Reassembler,
    RecordFlag,
    Sealer,
)

MAX_MESSAGE = 64 << 20


def make_outbox(*, is_padded: bool = False, max_message: int = MAX_MESSAGE) -> Outbox:
    return Outbox(Sealer(CipherState(b"k" * 32), is_padded=is_padded), max_message)


def make_reassembler(max_message: int = MAX_MESSAGE, limit: int = 128 << 20) -> Reassembler:
    return Reassembler(max_message, Quota(limit))


def drain(outbox: Outbox) -> list[bytes]:
    sealed = []
    while (size := outbox.next_size()) is not None:
        out = bytearray(size)
        outbox.seal_next(memoryview(out))
        sealed.append(bytes(out))
    return sealed


def receive(sealed: list[bytes], reassembler: Reassembler | None = None) -> list[bytes]:
    """Open and join what arrives, until something is wrong; return the messages that were delivered."""
    opener, reassembler = Opener(CipherState(b"k" * 32)), reassembler or make_reassembler()
    delivered = []
    for record in sealed:
        try:
            whole = reassembler.push(opener.open(record))
        except RemoteError:
            break
        if whole is not None:
            delivered.append(bytes(whole[1]))
    return delivered


def test_small_message_is_one_record_of_24_bytes_more() -> None:
    outbox = make_outbox()
    outbox.push(1, b"", [b"head", b"x" * 2304])
    (sealed,) = drain(outbox)
    assert len(sealed) == 4 + 2304 + 24
    assert receive([sealed]) == [b"head" + b"x" * 2304]


@pytest.mark.parametrize(
    "size", [0, 1, MAX_PAYLOAD - 1, MAX_PAYLOAD, MAX_PAYLOAD + 1, 2 * MAX_PAYLOAD, 300_000]
)
@pytest.mark.parametrize("is_padded", [False, True])
def test_message_of_any_size_survives(size: int, is_padded: bool) -> None:
    outbox = make_outbox(is_padded=is_padded)
    content = bytes(range(256)) * (size // 256 + 1)
    outbox.push(1, b"", [content[: size // 3], content[size // 3 : size]])
    sealed = drain(outbox)
    assert all(len(record) <= records.MAX_SEALED for record in sealed)
    assert receive(sealed) == [content[:size]]


def test_message_beyond_one_record_announces_its_size_first() -> None:
    outbox = make_outbox()
    outbox.push(7, b"", [b"x" * (MAX_PAYLOAD + 1)])
    first = Opener(CipherState(b"k" * 32)).open(drain(outbox)[0])
    assert first.flags == RecordFlag.FIRST
    assert TOTAL.unpack_from(first.payload) == (MAX_PAYLOAD + 1,)


def test_padding_comes_in_steps_and_hides_the_size() -> None:
    sizes = set()
    for size in range(1, 257):
        outbox = make_outbox(is_padded=True)
        outbox.push(1, b"", [b"x" * size])
        sizes |= {len(record) for record in drain(outbox)}
    assert sizes == {256 + OVERHEAD}


def test_padded_bulk_shows_only_its_number_of_records() -> None:
    outbox = make_outbox(is_padded=True)
    outbox.push(1, b"", [b"x" * 100_000])
    assert {len(record) for record in drain(outbox)} == {records.MAX_SEALED}


def test_padding_that_is_not_zero_is_malformed() -> None:
    cipher = CipherState(b"k" * 32)
    plain = records.HEADER.pack(1, WHOLE, 4, 0) + b"xx" + b"\0\0\0\1"
    with pytest.raises(ProtocolError):
        Opener(CipherState(b"k" * 32)).open(cipher.encrypt(plain))


@pytest.mark.parametrize("header", [(1, 8, 0, 0), (1, 7, 0, 0), (1, 5, 0, 0), (1, 3, 3, 0), (1, 3, 65535, 0)])
def test_bad_record_header_is_malformed(header: tuple[int, int, int, int]) -> None:
    sealed = CipherState(b"k" * 32).encrypt(records.HEADER.pack(*header) + b"xx")
    with pytest.raises(ProtocolError) as caught:
        Opener(CipherState(b"k" * 32)).open(sealed)
    assert caught.value.code is ErrorCode.MALFORMED


@pytest.mark.parametrize("size", [0, 15, 23, records.MAX_SEALED + 1])
def test_record_of_an_impossible_size_is_malformed(size: int) -> None:
    with pytest.raises(ProtocolError):
        Opener(CipherState(b"k" * 32)).open(bytes(size))


def three_messages() -> tuple[list[bytes], list[bytes]]:
    outbox = make_outbox()
    contents = [b"first" * 10, b"second" * 30_000, b"third"]
    for content in contents:
        outbox.push(1, b"one lane", [content])
    return contents, drain(outbox)


def test_truncation_anywhere_delivers_a_true_prefix() -> None:
    contents, sealed = three_messages()
    for cut in range(len(sealed)):
        for size in {0, 1, len(sealed[cut]) // 2, len(sealed[cut]) - 1}:
            delivered = receive([*sealed[:cut], sealed[cut][:size]])
            assert delivered == contents[: len(delivered)]


@given(st.data())
def test_any_tampering_delivers_only_a_true_prefix(data: st.DataObject) -> None:
    contents, sealed = three_messages()
    position = data.draw(st.integers(0, len(sealed) - 1))
    match data.draw(st.sampled_from(["flip", "drop", "repeat", "swap", "truncate", "inject"])):
        case "flip":
            changed = bytearray(sealed[position])
            changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
            sealed[position] = bytes(changed)
        case "drop":
            del sealed[position]
        case "repeat":
            sealed.insert(data.draw(st.integers(position + 1, len(sealed))), sealed[position])
        case "swap":
            other = data.draw(st.integers(0, len(sealed) - 1).filter(lambda index: index != position))
            sealed[position], sealed[other] = sealed[other], sealed[position]
        case "truncate":
            sealed[position] = sealed[position][: data.draw(st.integers(0, len(sealed[position]) - 1))]
        case "inject":
            sealed.insert(position, data.draw(st.binary(max_size=200)))
    delivered = receive(sealed)
    assert delivered == contents[: len(delivered)]


def test_changed_record_is_a_decrypt_error() -> None:
    _, sealed = three_messages()
    with pytest.raises(SecurityError) as caught:
        Opener(CipherState(b"k" * 32)).open(b"\0" + sealed[0][1:])
    assert caught.value.code is ErrorCode.DECRYPT


def test_both_ends_rekey_after_the_same_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "REKEY_AFTER", 4)
    outbox = make_outbox()
    contents = [bytes([number]) for number in range(11)]
    for content in contents:
        outbox.push(1, b"", [content])
    sealed = drain(outbox)
    assert receive(sealed) == contents
    without_rekey = CipherState(b"k" * 32)
    for record in sealed[:4]:
        without_rekey.decrypt(record)
    with pytest.raises(SecurityError):
        without_rekey.decrypt(sealed[4])


def test_rekey_comes_every_65536_records() -> None:
    assert records.REKEY_AFTER == 1 << 16


def open_first(size: int) -> records.Record:
    payload = bytearray(TOTAL.pack(size) + b"x" * 100)
    return records.Record(1, RecordFlag.FIRST, 0, memoryview(payload))


def test_huge_message_is_refused_before_memory_is_taken() -> None:
    quota = Quota(128 << 20)
    reassembler = Reassembler(1 << 20, quota)
    with pytest.raises(ProtocolError) as caught:
        reassembler.push(open_first((1 << 20) + 1))
    assert caught.value.code is ErrorCode.TOO_BIG
    assert (quota.used, reassembler.num_partial) == (0, 0)


def test_bytes_in_flight_are_bounded_over_all_links_of_a_peer() -> None:
    everyone = Quota(1000)
    one, other = Quota(600, everyone), Quota(600, everyone)
    Reassembler(10_000, one).push(open_first(500))
    with pytest.raises(ProtocolError) as caught:
        Reassembler(10_000, one).push(open_first(200))
    assert caught.value.code is ErrorCode.TOO_BIG
    with pytest.raises(ProtocolError):
        Reassembler(10_000, other).push(open_first(550))
    assert (everyone.used, one.used, other.used) == (500, 500, 0)


def test_quota_comes_back_when_a_session_ends() -> None:
    quota = Quota(1000)
    reassembler = Reassembler(10_000, quota)
    reassembler.push(open_first(500))
    reassembler.close()
    assert quota.used == 0


def test_open_messages_are_bounded() -> None:
    reassembler = make_reassembler()
    for number in range(records.MAX_OPEN_MESSAGES):
        record = open_first(200)
        record.message_id = number
        reassembler.push(record)
    record = open_first(200)
    record.message_id = 1000
    with pytest.raises(ProtocolError) as caught:
        reassembler.push(record)
    assert caught.value.code is ErrorCode.TOO_BIG


@pytest.mark.parametrize(
    ("kind", "flags", "message_id", "size"),
    [
        (1, 0, 0, 101),  # more than announced
        (1, 0, 0, 100),  # all of it, but no end
        (1, RecordFlag.END, 0, 50),  # an end too early
        (1, 0, 0, 0),  # nothing
        (2, 0, 0, 50),  # another kind
        (1, 0, 9, 50),  # another message
        (1, RecordFlag.ABORT, 9, 0),
        (1, RecordFlag.FIRST, 0, 50),  # begun twice
    ],
)
def test_record_out_of_place_is_malformed(kind: int, flags: int, message_id: int, size: int) -> None:
    reassembler = make_reassembler()
    reassembler.push(open_first(200))
    payload = bytearray(TOTAL.pack(300) + b"x" * 46 if flags == RecordFlag.FIRST else b"x" * size)
    with pytest.raises(ProtocolError) as caught:
        reassembler.push(records.Record(kind, flags, message_id, memoryview(payload)))
    assert caught.value.code is ErrorCode.MALFORMED


def test_small_message_passes_a_bulk_after_one_record() -> None:
    outbox = make_outbox()
    outbox.push(1, b"bulk", [b"b" * 1_000_000])
    outbox.push(2, b"small", [b"s"])
    opener = Opener(CipherState(b"k" * 32))
    assert [opener.open(record).kind for record in drain(outbox)[:3]] == [1, 2, 1]


def test_bulks_take_turns_and_one_lane_stays_in_order() -> None:
    outbox = make_outbox()
    for kind, lane in [(1, b"a"), (2, b"a"), (3, b"b")]:
        outbox.push(kind, lane, [bytes([kind]) * 150_000])
    opener, reassembler = Opener(CipherState(b"k" * 32)), make_reassembler()
    opened = [opener.open(record) for record in drain(outbox)]
    assert [record.kind for record in opened[:4]] == [1, 3, 1, 3]
    finished = [whole[0] for record in opened if (whole := reassembler.push(record)) is not None]
    assert finished.index(1) < finished.index(2)
    assert reassembler.num_partial == 0


def test_cancelled_message_is_aborted_on_the_other_side_too() -> None:
    outbox, reassembler = make_outbox(), make_reassembler()
    bulk = outbox.push(1, b"bulk", [b"b" * 1_000_000])
    opener, out = Opener(CipherState(b"k" * 32)), bytearray(outbox.next_size() or 0)
    outbox.seal_next(memoryview(out))
    assert reassembler.push(opener.open(out)) is None
    assert reassembler.num_partial == 1
    outbox.cancel(bulk)
    (abort,) = drain(outbox)
    assert reassembler.push(opener.open(abort)) is None
    assert (reassembler.num_partial, outbox.waiting_bytes, bulk.is_done) == (0, 0, True)


def test_cancelled_message_that_was_not_begun_leaves_no_trace() -> None:
    outbox = make_outbox()
    outgoing = outbox.push(1, b"lane", [b"x"])
    outbox.cancel(outgoing)
    assert drain(outbox) == []
    assert outgoing.is_done


def test_message_the_peer_would_refuse_is_not_sent() -> None:
    outbox = make_outbox(max_message=1000)
    with pytest.raises(ProtocolError) as caught:
        outbox.push(1, b"", [b"x" * 1001])
    assert caught.value.code is ErrorCode.TOO_BIG
    assert outbox.next_size() is None


def test_sender_keeps_within_what_may_be_open_at_once() -> None:
    outbox, reassembler = make_outbox(), make_reassembler()
    payload = bytes(40 << 20)
    for number in range(3):
        outbox.push(1, bytes([number]), [payload])
    outbox.push(2, b"small", [b"s"])
    opener = Opener(CipherState(b"k" * 32))
    kinds = []
    for _ in range(4):
        out = bytearray(outbox.next_size() or 0)
        outbox.seal_next(memoryview(out))
        record = opener.open(out)
        reassembler.push(record)
        kinds.append(record.kind)
    assert reassembler.num_partial == 1
    assert kinds == [1, 2, 1, 1]


def test_what_was_cancelled_after_its_size_was_told_is_not_sealed() -> None:
    outbox, opener = make_outbox(), Opener(CipherState(b"k" * 32))
    first = outbox.push(1, b"first", [b"x" * 10])
    outbox.push(2, b"second", [b"y" * 20])
    outbox.next_size()
    outbox.cancel(first)
    out = bytearray(outbox.next_size() or 0)
    outbox.seal_next(memoryview(out))
    assert (opener.open(out).kind, outbox.next_size()) == (2, None)


def test_clearing_gives_every_message_up_once() -> None:
    outbox, gone = make_outbox(), []
    for number in range(3):
        outbox.push(1, b"lane", [b"x"], lambda number=number: gone.append(number))
    outbox.clear()
    assert gone == [0, 1, 2]
    assert (outbox.waiting_bytes, outbox.next_size()) == (0, None)


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b""]), st.integers(1, 200_000)), max_size=6))
def test_waiting_bytes_come_back_to_zero(pushes: list[tuple[bytes, int]]) -> None:
    outbox = make_outbox()
    for lane, size in pushes:
        outbox.push(1, lane, [bytes(size)])
    assert outbox.waiting_bytes == sum(size for _, size in pushes)
    sealed = drain(outbox)
    assert outbox.waiting_bytes == 0
    assert sorted(map(len, receive(sealed))) == sorted(size for _, size in pushes)
