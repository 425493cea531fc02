from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.address_policy import AddressPolicy, Scope
from routing.announcement import (
    MAX_AHEAD_MS,
    MAX_LIFETIME_MS,
    Announcement,
    Contact,
    Owner,
    RecordRefused,
    Refusal,
    Voucher,
    author_of,
    check_owner,
    check_voucher,
    next_sequence,
    read_announcement,
    sign_announcement,
    sign_voucher,
)
from routing.errors import SettingsError
from routing.identity import Identity
from routing.network_wire import MAX_RECORD_SIZE
from routing.types import NodeAddress, SliceOffer, SliceSpec, WireDtype

NETWORK_ID = b"n" * 32
NOW_MS = 1_700_000_000_000
POLICY = AddressPolicy(Scope.LOOPBACK)
VECTORS = Path(__file__).parent.parent / "vectors" / "records.json"
HEAD_SIZE, SIGNATURE_SIZE = 65, 64


def identity_of(seed: int) -> Identity:
    return Identity(Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32))


NODE, SENTINEL, OWNER = identity_of(1), identity_of(2), identity_of(3)


def contact(host: str = "127.0.0.1", port: int = 9000) -> Contact:
    return Contact(NodeAddress(NODE.node_id, host, port))


def relayed(*, expires_ms: int = NOW_MS + 60_000, node: Identity = NODE) -> Contact:
    signature = sign_voucher(SENTINEL, NETWORK_ID, node.node_id, expires_ms)
    address = NodeAddress(NODE.node_id, "1.2.3.4", 4000, SENTINEL.node_id)
    return Contact(address, Voucher(SENTINEL.public_key, expires_ms, signature))


def offer(**changes: Any) -> SliceOffer:
    plain = SliceOffer(
        model_name="smollm2",
        model_digest=b"d" * 32,
        num_layers=30,
        hidden_size=576,
        spec=SliceSpec(0, 10),
        dtype=WireDtype.FLOAT32,
        form="plain/fp32/cpu",
        layer_ms=0.5,
    )
    return replace(plain, **changes)


def announcement(**changes: Any) -> Announcement:
    plain = Announcement(NODE.public_key, NOW_MS, NOW_MS, NOW_MS + 180_000, contacts=(contact(),))
    return replace(plain, **changes)


FULL = announcement(
    contacts=(contact(), relayed()),
    roles=("node", "sentinel"),
    seal_key=b"k" * 32,
    dtypes=(WireDtype.FLOAT32, WireDtype.BFLOAT16),
    offers=(offer(), offer(spec=SliceSpec(20, 30), has_closing=True)),
    load=3,
    max_sessions=64,
    free_bytes=1 << 33,
    owner=Owner.sign(OWNER, NODE.node_id),
    neighbour_ms=((b"12345678", 3.5),),
    moved=b"m" * 200,
)


def sign(told: Announcement) -> bytes:
    return sign_announcement(NODE, NETWORK_ID, told, POLICY)


def sign_raw(signed: bytes, *, network_id: bytes = NETWORK_ID) -> bytes:
    """Sign what our own signing would not."""
    return signed + NODE.sign(b"diffuse/record/1" + network_id + signed)


def with_body(fields: dict[str, Any]) -> bytes:
    """A record whose body is ours to make."""
    return sign_raw(sign(announcement())[:HEAD_SIZE] + msgpack.packb(fields))


def refusal_of(record: bytes, **changes: Any) -> Refusal:
    known: dict[str, Any] = {"now_ms": NOW_MS, **changes}
    policy = known.pop("policy", POLICY)
    with pytest.raises(RecordRefused) as caught:
        read_announcement(record, known.pop("network_id", NETWORK_ID), policy, **known)
    return caught.value.reason


# --- what an honest node signs


LINED = replace(FULL, neighbour_mbps=((b"12345678", 94.1),))


@pytest.mark.parametrize("told", [announcement(), FULL, LINED], ids=["bare", "full", "lined"])
def test_a_record_reads_as_it_was_signed(told: Announcement) -> None:
    record = sign(told)
    assert len(record) <= MAX_RECORD_SIZE
    assert read_announcement(record, NETWORK_ID, POLICY, now_ms=NOW_MS) == told
    assert author_of(record) == (NODE.node_id, told.sequence)


@pytest.mark.parametrize("mbps", [0.0, -1.0, 1e9, math.inf, math.nan])
def test_a_bandwidth_that_cannot_be_is_neither_signed_nor_taken(mbps: float) -> None:
    with pytest.raises(SettingsError):
        sign(announcement(neighbour_mbps=((b"12345678", mbps),)))
    fields = msgpack.unpackb(sign(FULL)[HEAD_SIZE:-64])
    assert refusal_of(with_body({**fields, "b": [[b"12345678", mbps]]})) is Refusal.ABSURD
    assert refusal_of(with_body({**fields, "b": [[b"1234567", 9.0]]})) is Refusal.MALFORMED


def test_a_tombstone_has_no_contacts_and_says_so() -> None:
    record = sign(announcement(contacts=(), has_left=True))
    assert read_announcement(record, NETWORK_ID, POLICY, now_ms=NOW_MS).is_tombstone


def test_layer_hashes_stay_at_home() -> None:
    record = sign(announcement(offers=(offer(layer_hashes=(b"h" * 8,) * 10),)))
    assert read_announcement(record, NETWORK_ID, POLICY, now_ms=NOW_MS).offers == (offer(),)


def test_a_sequence_never_goes_back_over_a_restart_or_a_clock_set_back() -> None:
    assert next_sequence(0, NOW_MS) == NOW_MS
    assert next_sequence(NOW_MS + 5000, NOW_MS) == NOW_MS + 5001


def test_signed_bytes_are_those_of_the_frozen_vectors() -> None:
    vectors = json.loads(VECTORS.read_text())
    voucher = FULL.contacts[1].voucher
    assert voucher is not None
    assert FULL.owner is not None
    assert sign(announcement()).hex() == vectors["bare"]
    assert sign(FULL).hex() == vectors["full"]
    assert sign(announcement(contacts=(), has_left=True)).hex() == vectors["tombstone"]
    assert voucher.signature.hex() == vectors["voucher"]
    assert FULL.owner.signature.hex() == vectors["owner"]


@pytest.mark.parametrize("name", ["bare", "full", "tombstone"])
def test_frozen_records_are_still_read(name: str) -> None:
    record = bytes.fromhex(json.loads(VECTORS.read_text())[name])
    assert read_announcement(record, NETWORK_ID, POLICY, now_ms=NOW_MS).node_id == NODE.node_id


# --- what is refused, and by which name


def test_a_forged_record_is_refused() -> None:
    record = bytearray(sign(announcement()))
    for at in (HEAD_SIZE, len(record) - 1, 45):  # body, signature, sequence
        forged = bytearray(record)
        forged[at] ^= 1
        assert refusal_of(bytes(forged)) in (Refusal.FORGED, Refusal.MALFORMED)
    other = identity_of(9)
    stolen = record[:9] + other.public_key + record[41:]
    assert refusal_of(bytes(stolen)) is Refusal.FORGED


def test_a_record_of_another_network_is_refused_even_with_our_tag() -> None:
    record = sign(announcement())
    assert refusal_of(record, network_id=b"o" * 32) is Refusal.OTHER_NETWORK
    retagged = sign_raw(record[:-SIGNATURE_SIZE], network_id=b"o" * 32)
    assert refusal_of(retagged) is Refusal.FORGED


@pytest.mark.parametrize("known", [NOW_MS, NOW_MS + 1])
def test_a_replayed_or_rolled_back_record_is_refused(known: int) -> None:
    assert refusal_of(sign(announcement()), known_sequence=known) is Refusal.REPLAYED


def test_times_out_of_bounds_are_refused() -> None:
    record = sign(announcement())
    assert refusal_of(record, now_ms=NOW_MS + 180_000) is Refusal.EXPIRED
    assert refusal_of(record, now_ms=NOW_MS - MAX_AHEAD_MS - 1) is Refusal.FUTURE_DATED
    read_announcement(record, NETWORK_ID, POLICY, now_ms=NOW_MS - MAX_AHEAD_MS)
    eternal = sign(announcement(expires_ms=NOW_MS + MAX_LIFETIME_MS + 1))
    assert refusal_of(eternal) is Refusal.TOO_LONG_LIVED
    assert refusal_of(sign(announcement(expires_ms=NOW_MS))) is Refusal.EXPIRED


def test_an_oversized_record_is_refused_before_anything_else() -> None:
    assert refusal_of(bytes(MAX_RECORD_SIZE + 1)) is Refusal.OVERSIZED
    assert refusal_of(b"") is Refusal.MALFORMED
    with pytest.raises(SettingsError, match="2048 B"):
        sign(announcement(offers=(offer(model_name="m" * 200),) * 8))


def test_cheap_checks_come_before_the_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    record = sign(announcement())

    def fail(*_: object) -> bool:
        raise AssertionError("a signature was checked")

    monkeypatch.setattr("routing.announcement._is_signed", fail)
    assert refusal_of(record, network_id=b"o" * 32) is Refusal.OTHER_NETWORK
    assert refusal_of(record, known_sequence=NOW_MS) is Refusal.REPLAYED
    assert refusal_of(record, now_ms=NOW_MS + 180_000) is Refusal.EXPIRED


@pytest.mark.parametrize("layer_ms", [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e-9, 1e9])
def test_an_absurd_speed_is_refused_at_signing_and_at_reading(layer_ms: float) -> None:
    told = announcement(offers=(offer(layer_ms=layer_ms),))
    with pytest.raises(SettingsError, match="ms per layer"):
        sign(told)
    fields = {"c": [["127.0.0.1", 9000]], "o": [offer_map(layer_ms)]}
    assert refusal_of(with_body(fields)) in (Refusal.ABSURD, Refusal.MALFORMED)


def offer_map(layer_ms: float = 0.5, start: int = 0, end: int = 10) -> dict[str, Any]:
    fields = {"n": "m", "d": b"d" * 32, "N": 30, "w": 8, "a": start, "b": end, "t": 1, "f": "f"}
    return {**fields, "o": False, "c": False, "ms": layer_ms, "h": b""}


@pytest.mark.parametrize(("start", "end"), [(0, 31), (10, 10), (25, 40), (9, 3), (-1, 3)])
def test_layers_that_the_model_does_not_have_are_refused(start: int, end: int) -> None:
    with pytest.raises(SettingsError, match="layers"):
        sign(announcement(offers=(offer(spec=SliceSpec(start, end)),)))
    fields = {"c": [["127.0.0.1", 9000]], "o": [offer_map(start=start, end=end)]}
    assert refusal_of(with_body(fields)) in (Refusal.ABSURD, Refusal.MALFORMED)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "169.254.0.1", "example.com", "::ffff:1.1.1.1", "localhost"]
)
def test_an_address_that_leads_nowhere_is_refused_at_signing_and_at_reading(host: str) -> None:
    with pytest.raises(SettingsError, match="cannot announce"):
        sign(announcement(contacts=(contact(host),)))
    assert refusal_of(with_body({"c": [[host, 9000]]})) is Refusal.BAD_ADDRESS


@pytest.mark.parametrize("scope", [Scope.LAN, Scope.PUBLIC])
def test_a_loopback_address_is_refused_beyond_this_machine(scope: Scope) -> None:
    assert refusal_of(sign(announcement()), policy=AddressPolicy(scope)) is Refusal.BAD_ADDRESS


def test_a_record_without_contacts_must_say_that_its_node_left() -> None:
    with pytest.raises(SettingsError, match="left"):
        sign(announcement(contacts=()))
    assert refusal_of(with_body({})) is Refusal.MALFORMED
    assert refusal_of(with_body({"c": [["127.0.0.1", 9000]], "x": True})) is Refusal.MALFORMED


@pytest.mark.parametrize(
    "fields",
    [
        {"c": "no list"},
        {"c": [[1, 2]]},
        {"c": [["127.0.0.1", True]]},
        {"c": [["127.0.0.1", 9000]] * 9},
        {"c": [["127.0.0.1", 9000]], "k": b"short"},
        {"c": [["127.0.0.1", 9000]], "w": b"short"},
        {"c": [["127.0.0.1", 9000]], "n": [[b"short", 1.0]]},
        {"c": [["127.0.0.1", 9000]], "l": -1},
        {"c": [["127.0.0.1", 9000]], "v": b"v" * 257},
    ],
)
def test_a_signed_body_that_breaks_a_rule_is_malformed(fields: dict[str, Any]) -> None:
    assert refusal_of(with_body(fields)) is Refusal.MALFORMED


@pytest.mark.parametrize("rtt_ms", [math.nan, math.inf, -1.0, 1e9])
def test_an_absurd_round_trip_time_is_refused(rtt_ms: float) -> None:
    record = with_body({"c": [["127.0.0.1", 9000]], "n": [[b"12345678", rtt_ms]]})
    assert refusal_of(record) is Refusal.ABSURD


# --- vouchers and owners


def test_a_relayed_contact_needs_a_voucher_of_that_sentinel_for_this_node() -> None:
    told = announcement(contacts=(relayed(),))
    assert refusal_of(sign(told), now_ms=NOW_MS + 60_000) is Refusal.BAD_VOUCHER  # run out
    of_another = announcement(contacts=(relayed(node=OWNER),))
    assert refusal_of(sign(of_another)) is Refusal.BAD_VOUCHER
    bare = Contact(NodeAddress(NODE.node_id, "1.2.3.4", 4000, SENTINEL.node_id))
    with pytest.raises(SettingsError, match="voucher"):
        sign(announcement(contacts=(bare,)))


def test_a_voucher_holds_for_one_sentinel_one_node_one_network_and_a_while() -> None:
    voucher = relayed().voucher
    assert voucher is not None
    good = (voucher, NETWORK_ID, NODE.node_id, SENTINEL.node_id, NOW_MS)
    assert check_voucher(*good)
    assert not check_voucher(voucher, b"o" * 32, NODE.node_id, SENTINEL.node_id, NOW_MS)
    assert not check_voucher(voucher, NETWORK_ID, OWNER.node_id, SENTINEL.node_id, NOW_MS)
    assert not check_voucher(voucher, NETWORK_ID, NODE.node_id, OWNER.node_id, NOW_MS)
    assert not check_voucher(voucher, NETWORK_ID, NODE.node_id, None, NOW_MS)
    assert not check_voucher(voucher, NETWORK_ID, NODE.node_id, SENTINEL.node_id, voucher.expires_ms)
    longer = replace(voucher, expires_ms=voucher.expires_ms + 1)
    assert not check_voucher(longer, NETWORK_ID, NODE.node_id, SENTINEL.node_id, NOW_MS)


def test_an_owner_label_cannot_be_taken_by_another_node() -> None:
    label = Owner.sign(OWNER, NODE.node_id)
    assert check_owner(label, NODE.node_id)
    assert not check_owner(label, SENTINEL.node_id)
    stolen = announcement(owner=Owner.sign(OWNER, SENTINEL.node_id))
    assert refusal_of(sign(stolen)) is Refusal.BAD_OWNER


def test_nothing_secret_is_in_a_repr() -> None:
    assert "signature" not in repr(FULL)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_junk_is_refused_and_nothing_else(junk: bytes) -> None:
    with pytest.raises(RecordRefused):
        read_announcement(junk, NETWORK_ID, POLICY, now_ms=NOW_MS)


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("ckrtolmfwnvx"), inner),
        max_leaves=12,
    )
)
def test_a_signed_body_of_anything_is_read_or_refused(body: Any) -> None:
    record = sign_raw(sign(announcement())[:HEAD_SIZE] + msgpack.packb(body))
    try:
        told = read_announcement(record, NETWORK_ID, POLICY, now_ms=NOW_MS)
    except RecordRefused:
        return
    assert told.node_id == NODE.node_id
