from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing import wire
from routing.errors import ErrorCode, LocalError, ProtocolError, RemoteError, SecurityError, SettingsError
from routing.sealing import decode_entry, encode_entry
from routing.steps import HEADER_SIZE
from routing.types import (
    Answer,
    AnswerKind,
    Attach,
    Cancel,
    Capabilities,
    Describe,
    Description,
    Failure,
    HopEntry,
    HopTrace,
    Keep,
    Message,
    NodeAddress,
    NodeId,
    Open,
    Opened,
    Prefix,
    SessionId,
    SliceOffer,
    SliceSpec,
    Step,
    StepFlag,
    Want,
    WireDtype,
)

u8, u16, u32 = (st.integers(0, (1 << bits) - 1) for bits in (8, 16, 32))
session_ids = st.binary(min_size=16, max_size=16).map(SessionId)
node_ids = st.binary(min_size=32, max_size=32).map(NodeId)
digests = st.binary(min_size=32, max_size=32)
traces = st.lists(st.builds(HopTrace, u32, u32, u32), max_size=4).map(tuple)
names = st.text(max_size=40)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    rows = draw(st.integers(1, 6))
    want = draw(st.sampled_from(list(Want)))
    listed = draw(st.sets(st.integers(0, rows - 1), min_size=1)) if want is Want.LIST else set()
    is_traced = draw(st.booleans())
    is_call = want is Want.LAST and draw(st.booleans())
    flags = (StepFlag.TRACE if is_traced else StepFlag.NONE) | (StepFlag.CALL if is_call else StepFlag.NONE)
    return Step(
        session_id=draw(session_ids),
        epoch=draw(u16),
        step=draw(u32),
        position=draw(st.integers(0, 1 << 30)),
        rows=rows,
        payload=draw(st.binary(min_size=1, max_size=40)) * (1 if is_call else rows),
        want=want,
        want_rows=tuple(sorted(listed)),
        flags=flags,
        deadline_ms=draw(st.integers(0, 65_535)) * 100,
        traces=draw(traces) if is_traced else (),
    )


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    rows = draw(st.integers(1, 6))
    kind = draw(st.sampled_from(list(AnswerKind)))
    widths = {
        AnswerKind.HIDDEN_STATES: 5,
        AnswerKind.CANDIDATES: 8 * 8,
        AnswerKind.TOKEN_IDS: 4,
        AnswerKind.CALL: 3,
    }
    is_traced = draw(st.booleans())
    return Answer(
        session_id=draw(session_ids),
        epoch=draw(u16),
        step=draw(u32),
        position=draw(st.integers(0, 1 << 30)),
        rows=rows,
        payload=bytes(draw(u8) for _ in range(2)).ljust(widths[kind] * rows, b"z"),
        kind=kind,
        flags=StepFlag.TRACE if is_traced else StepFlag.NONE,
        traces=draw(traces) if is_traced else (),
    )


@st.composite
def offers(draw: st.DrawFn) -> SliceOffer:
    start = draw(st.integers(0, 50))
    end = draw(st.integers(start, 60))
    has_hashes = draw(st.booleans())
    return SliceOffer(
        model_name=draw(names),
        model_digest=draw(digests),
        num_layers=draw(st.integers(1, 100)),
        hidden_size=draw(st.integers(1, 1 << 20)),
        spec=SliceSpec(start, end),
        dtype=draw(st.sampled_from(list(WireDtype))),
        form=draw(names),
        has_opening=draw(st.booleans()),
        has_closing=draw(st.booleans()),
        layer_ms=draw(st.floats(0, 1e6)),
        layer_hashes=tuple(bytes([n] * 8) for n in range(end - start)) if has_hashes else (),
        confirms=draw(st.booleans()),
        keeps=draw(st.booleans()),
    )


entries = st.builds(
    HopEntry,
    route_key=digests,
    hop=st.just(1),
    num_hops=st.integers(2, 5),
    gateway_id=node_ids,
    model_digest=digests,
    start=st.integers(0, 5),
    end=st.integers(5, 9),
    wire_in=st.sampled_from(list(WireDtype)),
    wire_out=st.sampled_from(list(WireDtype)),
    max_positions=st.integers(1, 1 << 20),
    idle_timeout_s=st.integers(1, 3600),
    next_hop=st.none() | st.builds(NodeAddress, node_ids, st.just("host.example"), st.integers(1, 65535)),
    answer_key=st.just(b"") | digests,
    run_opening=st.booleans(),
    run_closing=st.booleans(),
    sampling=st.none() | st.just({"temperature": 0.5, "logit_bias": [[1, 2.0], [3, -1.5]]}),
    tenant=st.just(b"") | st.binary(min_size=8, max_size=8),
    room=st.integers(0, 1 << 20),
    confirms=st.booleans(),
    prefixes=st.just(()) | st.just((Prefix(64, b"b" * 16), Prefix(16, b"a" * 16))),
    calls=st.booleans(),
    branches=st.integers(1, 8),
    streams=st.integers(1, 16),
    axes=st.integers(0, 4),
    memory_rows=st.integers(0, 1 << 16),
)
messages = st.one_of(
    steps(),
    answers(),
    st.builds(Open, session_ids, u16, st.integers(0, 1), st.just((b"one", b"two"))),
    st.builds(Attach, session_ids, u16, digests),
    st.builds(Cancel, session_ids, u16, digests),
    st.builds(Failure, session_ids, u16, u32, u16, st.integers(0, 9), u32, st.text(max_size=100), u32),
    st.builds(Opened, session_ids, u16, u32),
    st.builds(
        Keep,
        session_ids,
        u16,
        digests,
        st.lists(digests.map(lambda d: d[:16]), min_size=1, max_size=9).map(tuple),
    ),
    st.just(Describe()),
    st.builds(Description, st.lists(offers(), max_size=3).map(tuple), u32, u32, st.integers(0, 1 << 60)),
)


def encoded(message: Message) -> tuple[int, bytearray]:
    kind, buffers = wire.encode(message)
    return kind, bytearray(b"".join(buffers))


@given(messages)
def test_every_message_survives_the_round_trip(message: Message) -> None:
    kind, content = encoded(message)
    assert wire.decode(kind, memoryview(content)) == message


@given(messages, st.data())
def test_cut_message_is_malformed_or_another_whole_message(message: Message, data: st.DataObject) -> None:
    kind, content = encoded(message)
    size = data.draw(st.integers(0, len(content) - 1))
    try:
        decoded = wire.decode(kind, memoryview(content)[:size])
    except ProtocolError as error:
        assert error.code is ErrorCode.MALFORMED
    else:
        assert isinstance(message, Step | Answer)  # a payload carries no size of its own: the record does
        assert decoded != message


@given(st.integers(0, 255), st.binary(max_size=300))
def test_junk_is_a_protocol_error_or_a_message(kind: int, junk: bytes) -> None:
    try:
        wire.decode(kind, memoryview(junk))
    except ProtocolError as error:
        assert error.code in {ErrorCode.MALFORMED, ErrorCode.TOO_BIG}


@given(messages, st.data())
def test_flipped_byte_never_breaks_the_decoder(message: Message, data: st.DataObject) -> None:
    kind, content = encoded(message)
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        wire.decode(kind, memoryview(content))
    except ProtocolError as error:
        assert error.code in {ErrorCode.MALFORMED, ErrorCode.TOO_BIG}


def plain_step(**changes: Any) -> Step:
    return replace(Step(SessionId(b"s" * 16), 1, 7, 100, 1, b"x" * 2304), **changes)


def test_decode_step_costs_32_bytes_over_its_payload() -> None:
    _, content = encoded(plain_step())
    assert len(content) == 2304 + HEADER_SIZE == 2304 + 32


def test_greedy_thin_answer_is_a_header_and_eight_candidates() -> None:
    answer = Answer(SessionId(b"s" * 16), 1, 7, 100, 1, b"c" * 64, AnswerKind.CANDIDATES)
    assert len(encoded(answer)[1]) == 32 + 64


def test_payload_is_neither_copied_out_nor_in() -> None:
    payload = bytearray(b"x" * 2304)
    _, buffers = wire.encode(plain_step(payload=payload))
    assert buffers[1] is payload
    content = bytearray(b"".join(buffers))
    decoded = wire.decode(1, memoryview(content))
    assert isinstance(decoded, Step)
    content[32] = ord("y")
    assert decoded.payload[0] == ord("y")


def test_deadline_is_rounded_up_and_bounded() -> None:
    for given_ms, read_ms in [(0, 0), (1, 100), (100, 100), (101, 200), (10**9, 6_553_500)]:
        _, content = encoded(plain_step(deadline_ms=given_ms))
        decoded = wire.decode(1, memoryview(content))
        assert isinstance(decoded, Step)
        assert decoded.deadline_ms == read_ms


def test_trace_trailer_keeps_32_bytes_per_hop_for_later() -> None:
    traced = plain_step(flags=StepFlag.TRACE, traces=(HopTrace(1, 2, 3),))
    assert len(encoded(traced)[1]) - len(encoded(plain_step())[1]) == 12 + 32 + 4


BAD_HEADERS = {
    "unknown want": (19, 9),
    "unknown flag": (18, 0x80),
    "sealed step": (18, StepFlag.SEALED),
    "no rows": (29, 0),
    "rows that do not divide the payload": (29, 7),
    "token ids of another size": (18, StepFlag.TOKEN_IDS),
    "a list that is not there": (19, Want.LIST),
    "a trace that is not there": (18, StepFlag.TRACE),
    "rows beyond the last position": (20 + 4, 0xFF),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_step_header_is_malformed(case: str) -> None:
    offset, value = BAD_HEADERS[case]
    _, content = encoded(plain_step(position=0xFFFFFF, payload=bytes([255]) * 2304))
    content[offset] = value
    if case == "rows beyond the last position":
        content[24:28] = b"\xff\xff\xff\xff"
    with pytest.raises(ProtocolError) as caught:
        wire.decode(1, memoryview(content))
    assert caught.value.code is ErrorCode.MALFORMED


@pytest.mark.parametrize("rows", [(0, 0), (1, 0), (2, 3), (5,)])
def test_bad_list_of_wanted_rows_is_malformed(rows: tuple[int, ...]) -> None:
    _, content = encoded(plain_step(rows=3, payload=b"x" * 30, want=Want.LIST, want_rows=rows))
    with pytest.raises(ProtocolError):
        wire.decode(1, memoryview(content))


def test_empty_list_of_wanted_rows_asks_for_an_answer_without_rows() -> None:
    asked = plain_step(want=Want.LIST, want_rows=())
    kind, content = encoded(asked)
    assert wire.decode(kind, memoryview(content)) == asked
    answer = Answer(SessionId(b"s" * 16), 1, 7, 100, 0, b"")
    kind, content = encoded(answer)
    assert wire.decode(kind, memoryview(content)) == answer


@pytest.mark.parametrize(
    ("kind", "size"), [(AnswerKind.TOKEN_IDS, 14), (AnswerKind.CANDIDATES, 12), (AnswerKind.HIDDEN_STATES, 7)]
)
def test_answer_that_does_not_fit_its_kind_is_malformed(kind: AnswerKind, size: int) -> None:
    _, content = encoded(Answer(SessionId(b"s" * 16), 1, 7, 100, 2, b"x" * size, kind))
    with pytest.raises(ProtocolError):
        wire.decode(2, memoryview(content))


def test_trailing_junk_after_a_map_is_malformed() -> None:
    kind, content = encoded(Describe())
    with pytest.raises(ProtocolError):
        wire.decode(kind, memoryview(content + b"\0"))


@pytest.mark.parametrize(
    "value",
    [
        msgpack.ExtType(5, b"x"),
        msgpack.Timestamp(1),
        [[[[1]]]],
        {"a": {"b": {"c": {"d": 1}}}},
    ],
)
def test_extension_types_and_deep_nesting_are_malformed(value: object) -> None:
    packed = msgpack.packb({"unknown": value})
    with pytest.raises(ProtocolError):
        wire.decode(wire.DESCRIBE, memoryview(packed))


@pytest.mark.parametrize("key", [1, None, b"k", 1.5])
def test_map_keys_must_be_text(key: object) -> None:
    packed = msgpack.packb({key: 1})
    with pytest.raises(ProtocolError):
        wire.decode(wire.DESCRIBE, memoryview(packed))


def test_unknown_fields_are_ignored() -> None:
    assert wire.decode(wire.DESCRIBE, memoryview(msgpack.packb({"later": 1}))) == Describe()


@pytest.mark.parametrize(
    "changes",
    [
        {"e": -1},
        {"e": 1 << 16},
        {"e": True},
        {"e": "1"},
        {"e": None},
        {"s": b"short"},
        {"s": "x" * 16},
        {"p": b""},
    ],
)
def test_fields_of_a_wrong_type_or_range_are_malformed(changes: dict[str, object]) -> None:
    fields: dict[str, object] = {"s": b"s" * 16, "e": 1, "p": b"p" * 32}
    assert isinstance(wire.decode(wire.CANCEL, memoryview(msgpack.packb(fields))), Cancel)
    with pytest.raises(ProtocolError) as caught:
        wire.decode(wire.CANCEL, memoryview(msgpack.packb(fields | changes)))
    assert caught.value.code is ErrorCode.MALFORMED


def test_large_map_is_too_big_before_it_is_read() -> None:
    packed = msgpack.packb({"x": b"x" * wire.MAX_MAP_SIZE})
    with pytest.raises(ProtocolError) as caught:
        wire.decode(wire.DESCRIBE, memoryview(packed))
    assert caught.value.code is ErrorCode.TOO_BIG


def test_msgpack_bombs_are_malformed() -> None:
    for bomb in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 5000):
        with pytest.raises(ProtocolError):
            wire.decode(wire.DESCRIBE, memoryview(bomb))


def test_unknown_kind_is_ignored_unless_it_is_critical() -> None:
    assert wire.decode(100, memoryview(b"anything")) is None
    with pytest.raises(ProtocolError):
        wire.decode(200, memoryview(b"anything"))


def test_unknown_dtype_in_an_entry_is_malformed() -> None:
    fields = msgpack.unpackb(encode_entry(_entry())) | {"i": 77}
    with pytest.raises(ProtocolError, match="dtype"):
        decode_entry(msgpack.packb(fields))


def test_error_texts_hold_nothing_of_the_content() -> None:
    secret = b"the prompt of a user"
    packed = msgpack.packb({"s": secret, "e": 1, "p": secret})
    with pytest.raises(ProtocolError) as caught:
        wire.decode(wire.CANCEL, memoryview(packed))
    assert "prompt" not in str(caught.value)


def _entry(**changes: Any) -> HopEntry:
    entry = HopEntry(
        route_key=b"k" * 32,
        hop=0,
        num_hops=2,
        gateway_id=NodeId(b"g" * 32),
        model_digest=b"d" * 32,
        start=0,
        end=4,
        wire_in=WireDtype.FLOAT32,
        wire_out=WireDtype.FLOAT32,
        max_positions=100,
        idle_timeout_s=60,
    )
    return replace(entry, **changes)


@given(entries)
def test_entry_survives_the_round_trip(entry: HopEntry) -> None:
    assert decode_entry(encode_entry(entry)) == entry


def test_sealed_entry_opens_only_with_its_key_and_place() -> None:
    node, other = wire.SealKey.generate(), wire.SealKey.generate()
    aad = wire.entry_aad(SessionId(b"s" * 16), 1, 0)
    sealed = wire.seal_entry(_entry(), node.public, aad)
    assert wire.open_entry(sealed, node, aad) == _entry()
    for key, place in [(other, aad), (node, wire.entry_aad(SessionId(b"s" * 16), 2, 0)), (node, b"")]:
        with pytest.raises(SecurityError) as caught:
            wire.open_entry(sealed, key, place)
        assert caught.value.code is ErrorCode.DECRYPT


def test_any_changed_or_missing_byte_of_a_sealed_entry_is_noticed() -> None:
    node = wire.SealKey.generate()
    sealed = wire.seal_entry(_entry(), node.public)
    for position in range(0, len(sealed), 7):
        changed = bytearray(sealed)
        changed[position] ^= 1
        for bad in (bytes(changed), sealed[:position]):
            with pytest.raises(SecurityError):
                wire.open_entry(bad, node)


def test_bad_sealing_key_is_a_security_error() -> None:
    with pytest.raises(SecurityError):
        wire.seal_entry(_entry(), b"short")


def test_sealed_answer_opens_to_itself_with_writable_memory() -> None:
    answer = Answer(
        SessionId(b"s" * 16), 3, 7, 100, 2, b"x" * 64, traces=(HopTrace(1, 2, 3),), flags=StepFlag.TRACE
    )
    sealed = wire.seal_answer(b"a" * 32, answer)
    assert sealed.flags == StepFlag.TRACE | StepFlag.SEALED
    assert b"xxxx" not in bytes(sealed.payload)
    _, content = encoded(sealed)
    arrived = wire.decode(2, memoryview(content))
    assert isinstance(arrived, Answer)
    opened = wire.open_answer(b"a" * 32, arrived)
    assert opened == answer
    assert not memoryview(opened.payload).readonly


@pytest.mark.parametrize("field", ["epoch", "step", "position", "rows", "session_id", "kind"])
def test_sealed_answer_is_bound_to_its_header(field: str) -> None:
    answer = Answer(SessionId(b"s" * 16), 3, 7, 100, 2, b"x" * 64)
    sealed = wire.seal_answer(b"a" * 32, answer)
    other = {"session_id": SessionId(b"t" * 16), "kind": AnswerKind.CANDIDATES}.get(field, 9)
    with pytest.raises(SecurityError):
        wire.open_answer(b"a" * 32, replace(sealed, **{field: other}))


def test_unsealed_answer_is_refused_where_a_sealed_one_is_due() -> None:
    answer = Answer(SessionId(b"s" * 16), 3, 7, 100, 2, b"x" * 64)
    with pytest.raises(SecurityError):
        wire.open_answer(b"a" * 32, answer)


def test_proofs_differ_by_key_purpose_session_and_epoch() -> None:
    sid, other = SessionId(b"s" * 16), SessionId(b"t" * 16)
    proofs = {
        wire.proof(b"k" * 32, b"cancel", sid, 1),
        wire.proof(b"l" * 32, b"cancel", sid, 1),
        wire.proof(b"k" * 32, b"attach", sid, 1),
        wire.proof(b"k" * 32, b"cancel", other, 1),
        wire.proof(b"k" * 32, b"cancel", sid, 2),
    }
    assert len(proofs) == 5
    assert wire.is_proof(wire.proof(b"k" * 32, b"cancel", sid, 1), b"k" * 32, b"cancel", sid, 1)
    assert not wire.is_proof(b"", b"k" * 32, b"cancel", sid, 1)


def test_capabilities_survive_the_round_trip() -> None:
    capabilities = Capabilities(
        dtypes=(WireDtype.BFLOAT16, WireDtype.FLOAT32), seal_key=b"k" * 32, slices=((b"d" * 8, 0, 10),)
    )
    assert wire.decode_capabilities(wire.encode_capabilities(capabilities)) == capabilities


def test_capabilities_drop_slices_that_do_not_fit_and_stay_small() -> None:
    capabilities = Capabilities(slices=tuple((bytes([n] * 8), n, n + 1) for n in range(60)))
    packed = wire.encode_capabilities(capabilities)
    assert len(packed) <= wire.MAX_CAPABILITIES_SIZE
    kept = wire.decode_capabilities(packed).slices
    assert 10 < len(kept) < 60
    assert kept == capabilities.slices[: len(kept)]


def test_capabilities_we_do_not_know_are_dropped() -> None:
    fields = msgpack.unpackb(wire.encode_capabilities(Capabilities())) | {"t": [1, 99], "new": 1}
    assert wire.decode_capabilities(msgpack.packb(fields)).dtypes == (WireDtype.FLOAT32,)


@given(st.binary(max_size=100))
def test_junk_capabilities_are_a_protocol_error(junk: bytes) -> None:
    with pytest.raises(RemoteError):
        wire.decode_capabilities(junk)


def test_open_that_would_not_fit_a_record_is_our_own_error() -> None:
    with pytest.raises(LocalError):
        wire.encode(Open(SessionId(b"s" * 16), 1, 0, (b"x" * wire.MAX_OPEN_SIZE,)))


def test_cancel_has_a_lane_of_its_own() -> None:
    sid = SessionId(b"s" * 16)
    assert wire.lane(Cancel(sid, 1, b"p" * 32)) != wire.lane(plain_step())
    assert wire.lane(Open(sid, 1, 0, ())) == wire.lane(plain_step())


@pytest.mark.parametrize("host", ["127.0.0.1", "node.example", "::1", "fe80::1%eth0"])
def test_address_survives_the_round_trip(host: str) -> None:
    address = NodeAddress(NodeId(bytes(range(32))), host, 9000)
    assert wire.parse_address(str(address)) == address


ID = "ab" * 32


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("127.0.0.1:9000", "no '@'"),
        (f"{ID[:-1]}@h:1", "63"),
        (f"{ID[:-1]}g@h:1", "no hex digit"),
        (f"{ID}@h", "not host:port"),
        (f"{ID}@:9000", "not host:port"),
        (f"{ID}@::1:9000", "brackets"),
        (f"{ID}@h:0", "port"),
        (f"{ID}@h:65536", "port"),
        (f"{ID}@h:٣", "port"),
        (f"{ID}@h:+1", "port"),
        (f"{ID}@a b:1", "host name"),
        (f"{ID}@[]:1", "host name"),
    ],
)
def test_bad_address_is_a_settings_error_that_names_the_part(text: str, complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        wire.parse_address(text)


@pytest.mark.parametrize("size", [0, 15, 17, 16 * (wire.MAX_HASHES + 1)])
def test_a_keep_holds_whole_hashes_and_not_too_many(size: int) -> None:
    fields = {"s": bytes(16), "e": 1, "p": bytes(32), "b": bytes(size)}
    with pytest.raises(ProtocolError):
        wire.decode(wire.KEEP, memoryview(msgpack.packb(fields)))


def test_the_largest_keep_travels() -> None:
    keep = Keep(SessionId(bytes(16)), 1, bytes(32), (bytes(16),) * wire.MAX_HASHES)
    kind, content = encoded(keep)
    assert wire.decode(kind, memoryview(content)) == keep


@pytest.mark.parametrize(
    "prefixes",
    [
        [[16, b"a" * 16]] * 9,
        [[16, b"a" * 16], [32, b"b" * 16]],
        [[16, b"a" * 16], [16, b"b" * 16]],
        [[16, b"a" * 15]],
        [[0, b"a" * 16]],
        [[1 << 40, b"a" * 16]],
        [[True, b"a" * 16]],
        [[16]],
    ],
)
def test_prefixes_of_an_entry_are_few_in_order_and_whole(prefixes: list[list[Any]]) -> None:
    plain = msgpack.unpackb(encode_entry(_entry()))
    with pytest.raises(ProtocolError):
        decode_entry(msgpack.packb(plain | {"pf": prefixes}))


def test_an_entry_of_an_older_gateway_asks_for_nothing_new() -> None:
    plain = msgpack.unpackb(encode_entry(_entry()))
    assert not plain.keys() & {"rm", "cf", "pf", "br", "st", "ax", "me"}


def _entry() -> HopEntry:
    return HopEntry(
        bytes(32), 0, 1, NodeId(bytes(32)), bytes(32), 0, 1, WireDtype.FLOAT32, WireDtype.FLOAT32, 10, 60
    )
