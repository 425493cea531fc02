"""Which of several held slices does a piece of work, and how one of them leaves."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from node.held_slice import HeldSlice
from node.slice_table import SliceTable
from node.speed import FEWEST_STEPS, TELL_EVERY_S, LayerSpeed
from routing.errors import ErrorCode, ProtocolError, WorkError
from routing.types import HopEntry, NodeId, SliceSpec, WireDtype
from tests.node.fake_runner import MAX_POSITIONS, FakeRunner
from tests.node.rig import DIGEST, fake_offer

OTHER_DIGEST = b"e" * 32


def fake_held(
    start: int, end: int, *, digest: bytes = DIGEST, layer_ms: float = 1.0, head_ms: float = 0.0
) -> HeldSlice:
    offer = replace(fake_offer(SliceSpec(start, end)), model_digest=digest, layer_ms=layer_ms)
    return HeldSlice(FakeRunner(), offer, 8, weights_bytes=100, head_ms=head_ms)


def entry(start: int, end: int, **changes: object) -> HopEntry:
    made = HopEntry(
        b"k" * 32, 0, 1, NodeId(bytes(32)), DIGEST, start, end, WireDtype.FLOAT32, WireDtype.FLOAT32, 10, 60
    )
    return replace(made, answer_key=b"a" * 32, **changes)  # type: ignore[arg-type]


def test_work_goes_to_the_slice_that_holds_it() -> None:
    first, second, other = fake_held(0, 3), fake_held(3, 6), fake_held(0, 6, digest=OTHER_DIGEST)
    slices = SliceTable((first, second, other))
    assert slices.find(entry(1, 3)) is first
    assert slices.find(entry(3, 4)) is second
    assert slices.find(entry(0, 6, model_digest=OTHER_DIGEST)) is other
    assert slices.weights_bytes == 300


def test_a_refusal_names_all_that_is_held() -> None:
    slices = SliceTable((fake_held(0, 2), fake_held(4, 6)))
    with pytest.raises(
        WorkError, match=r"layers 1:5 asked; held here: layers 0:2 of fake, layers 4:6 of fake"
    ) as error:
        slices.find(entry(1, 5))
    assert error.value.code is ErrorCode.NO_SLICE
    with pytest.raises(WorkError, match="another model is asked for"):
        slices.find(entry(0, 2, model_digest=OTHER_DIGEST))
    with pytest.raises(WorkError, match="nothing now"):
        SliceTable().find(entry(0, 2))


def test_what_no_gateway_asks_is_refused_whatever_is_held() -> None:
    with pytest.raises(ProtocolError, match="route key"):
        SliceTable().find(entry(0, 2, route_key=b"short"))
    with pytest.raises(ProtocolError, match="positions"):
        SliceTable((fake_held(0, 6),)).find(entry(0, 6, max_positions=MAX_POSITIONS + 1))


def test_a_draining_slice_keeps_its_sessions_and_takes_no_other() -> None:
    old, new = fake_held(0, 4), fake_held(2, 6)
    slices = SliceTable((old, new))
    slices.drain(old)
    assert [offer.spec for offer in slices.offers()] == [SliceSpec(2, 6)]
    assert slices.find(entry(2, 4)) is new
    assert slices.find(entry(2, 4), session_held=old) is old
    with pytest.raises(WorkError, match="held here: layers 2:6"):
        slices.find(entry(0, 2))


def test_a_removed_slice_is_told_of_and_no_session_finds_it() -> None:
    held, removed = fake_held(0, 6), []
    slices = SliceTable((held,))
    slices.on_removed = removed.append
    slices.attach(held)
    slices.remove(held)
    assert removed == [held]
    slices.detach(held)  # its sessions end afterwards
    with pytest.raises(WorkError):
        slices.find(entry(0, 6), session_held=held)


async def test_waiting_for_a_slice_to_empty_ends_with_its_last_session() -> None:
    held = fake_held(0, 6)
    slices = SliceTable((held,))
    slices.attach(held)
    slices.attach(held)
    waiting = asyncio.create_task(slices.wait_empty(held))
    slices.detach(held)
    await asyncio.sleep(0)
    assert (waiting.done(), slices.num_sessions(held)) == (False, 1)
    slices.detach(held)
    await waiting


def test_a_node_that_leaves_offers_nothing() -> None:
    held = fake_held(0, 6)
    slices = SliceTable((held,))
    slices.close_doors()
    assert slices.offers() == ()
    with pytest.raises(WorkError):
        slices.find(entry(0, 6))
    assert slices.find(entry(0, 6), session_held=held) is held


def test_the_speed_told_follows_real_decode_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.speed.TELL_EVERY_S", 0.0)
    held = fake_held(0, 6, layer_ms=1.0, head_ms=5.0)
    slices = SliceTable((held,))
    for _ in range(60):
        slices.note_compute(held, entry(0, 6), 1, 0.048)  # 8 ms a layer
        slices.note_compute(held, entry(0, 6), 32, 9.0)  # a prefill says nothing of it
    assert slices.offers()[0].layer_ms == 1.0
    assert slices.tell_speeds()
    assert slices.offers()[0].layer_ms == pytest.approx(8, rel=0.02)
    assert not slices.tell_speeds()
    for _ in range(60):
        slices.note_compute(held, entry(3, 6, run_closing=True), 1, 0.008)  # 5 ms of them in the head
    assert slices.layer_ms(held) == pytest.approx(1, rel=0.02)


def test_a_speed_is_told_when_it_has_changed_and_not_too_often() -> None:
    now = [0.0]
    speed = LayerSpeed(1.0, clock=lambda: now[0])
    for _ in range(FEWEST_STEPS):
        speed.note(1.1)
    now[0] += TELL_EVERY_S
    assert not speed.tell()  # a tenth is noise
    for _ in range(30):
        speed.note(3.0)
    assert speed.tell()
    for _ in range(30):
        speed.note(9.0)
    assert not speed.tell()
    now[0] += TELL_EVERY_S
    assert speed.tell()
