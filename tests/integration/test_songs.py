"""Songs over real node servers: the samples of the uncut model, whatever is cut where and whoever is lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from app.engine.diffusion.request import Decoding, Loading, Made, Started, StepDone
from app.engine.request import RequestError
from routing import mux, records, wire
from routing.errors import ErrorCode, ProtocolError, WorkError
from routing.types import Answer, AnswerKind, Message, Step, StepFlag
from slicing.ends import Parts
from slicing.errors import LogitsError
from slicing.invariant import InvariantRunner
from slicing.sampler import SamplingParams
from tests.integration.songs import (
    GREEDY,
    NUM_FRAMES,
    PROMPT,
    SECONDS,
    SEEDED,
    Songs,
    TinyMusic,
    request,
    songs,
)
from tests.node.rig import until
from tests.support.decrypted import num_found, pieces
from tests.support.tiny_sound import DEPTH, FRAME_RATE, FRAME_SAMPLES, HIDDEN_SIZE, RATE, VOCAB_SIZE

Local = tuple[int, int] | None
PLACES: list[Local] = [(0, 0), (1, 0), (1, 1), (0, 2), None]
TEXT_ROWS = len(PROMPT) + 1
NUM_STEPS = NUM_FRAMES + DEPTH - 1


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def music(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> TinyMusic:
    return TinyMusic.build(tmp_path_factory.mktemp("mono"))


@pytest.fixture(scope="module")
def stereo(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> TinyMusic:
    return TinyMusic.build(tmp_path_factory.mktemp("stereo"), channels=2)


@pytest.mark.parametrize("local", PLACES)
@pytest.mark.parametrize("slices", [1, 2])
async def test_greedy_songs_are_those_of_stock_generate(music: TinyMusic, local: Local, slices: int) -> None:
    async with songs(music, local, slices=slices) as here:
        made = await here.song(**GREEDY)
        np.testing.assert_array_equal(made.samples, music.greedy())
        assert (made.rate, made.replays) == (RATE, 0)
        await here.is_freed()


@pytest.mark.parametrize("local", PLACES)
async def test_seeded_songs_are_those_of_the_whole_model(music: TinyMusic, local: Local) -> None:
    expected = music.drawn(SamplingParams(**SEEDED))
    async with songs(music, local) as here:
        for _ in range(2):
            np.testing.assert_array_equal((await here.song(**SEEDED)).samples, expected)
        other = await here.song(**SEEDED | {"seed": 6})
    assert other.samples is not None
    assert not np.array_equal(other.samples, expected)


@pytest.mark.parametrize("local", [(1, 1), None])
async def test_three_slices_make_the_same_song(music: TinyMusic, local: Local) -> None:
    async with songs(music, local, slices=3 if local is None else 2) as here:
        made = await here.song(**SEEDED)
    np.testing.assert_array_equal(made.samples, music.drawn(SamplingParams(**SEEDED)))


@pytest.mark.parametrize("local", [(1, 0), None])
async def test_two_channels_are_two_songs_of_the_codec(stereo: TinyMusic, local: Local) -> None:
    async with songs(stereo, local) as here:
        greedy, seeded = await here.song(**GREEDY), await here.song(**SEEDED)
    assert greedy.samples is not None
    assert greedy.samples.shape == (2, NUM_FRAMES * FRAME_SAMPLES)
    np.testing.assert_array_equal(greedy.samples, stereo.greedy())
    np.testing.assert_array_equal(seeded.samples, stereo.drawn(SamplingParams(**SEEDED)))


@pytest.mark.parametrize("local", [(1, 1), None])
async def test_without_guidance_one_branch_runs(music: TinyMusic, local: Local) -> None:
    async with songs(music, local) as here:
        rows = watched_rows(here)
        greedy = await here.song(**GREEDY, guidance_scale=1.0)
        seeded = await here.song(**SEEDED, guidance_scale=0.0)
    assert set(rows) == {1, TEXT_ROWS}
    np.testing.assert_array_equal(greedy.samples, music.greedy(scale=1.0))
    np.testing.assert_array_equal(seeded.samples, music.drawn(SamplingParams(**SEEDED), scale=1.0))


def watched_rows(here: Songs) -> Counter[int]:
    """How many of the steps that are sent have so many rows."""
    rows: Counter[int] = Counter()

    def look(link: Any, message: Message) -> bool:
        rows.update([message.rows] if isinstance(message, Step) else [])
        return False

    here.here.rig.network.drop = look
    return rows


async def test_events_tell_of_every_frame_and_come_in_order(music: TinyMusic) -> None:
    async with songs(music, (1, 0)) as here:
        events = await here.events(**SEEDED)
    kinds = [type(event) for event in events]
    assert kinds == [Loading, Started, *[StepDone] * NUM_STEPS, Decoding, Made]
    assert [event.number for event in events if isinstance(event, StepDone)] == list(range(1, NUM_STEPS + 1))
    assert {event.of for event in events if isinstance(event, StepDone)} == {NUM_STEPS}
    started, made = events[1], events[-1]
    assert isinstance(started, Started)
    assert isinstance(made, Made)
    assert (started.text_tokens, started.picture_tokens) == (TEXT_ROWS, NUM_FRAMES * DEPTH)
    assert [(hop.start, hop.end) for hop in made.route] == [(1, 2), (2, 4)]
    timings = made.timings
    assert timings.steps == NUM_STEPS
    assert timings.encode_s + timings.steps_s + timings.decode_s == pytest.approx(timings.total_s)
    assert timings.compute_s > 0


@pytest.mark.parametrize("local", [(1, 1), None])
@pytest.mark.parametrize("after", [2, 5, 9, 25])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_a_node_lost_at_any_step_changes_nothing(
    music: TinyMusic, local: Local, after: int, sampling: dict[str, Any]
) -> None:
    async with songs(music, local) as unbroken:
        expected = (await unbroken.song(**sampling)).samples
    async with songs(music, local, copies=2) as broken:
        seen: list[Message] = []

        def lose(link: Any, message: Message) -> bool:
            is_end = link.peer_id in {node.node_id for node in broken.nodes[2 * (after % 2) :][:2]}
            if isinstance(message, Step) and is_end:
                seen.append(message)
                if len(seen) == after // 2:
                    broken.lost.add(link.peer_id)
                    broken.here.rig.network.cut_off(link.peer_id)
            return False

        broken.here.rig.network.drop = lose
        made = await broken.song(**sampling)
        np.testing.assert_array_equal(made.samples, expected)
        assert made.replays >= 1
        await broken.is_freed()


async def test_encoder_states_travel_once_over_each_link(music: TinyMusic) -> None:
    sizes: Counter[str] = Counter()
    async with songs(music, (1, 0)) as here:

        def look(link: Any, message: Message) -> bool:
            if isinstance(message, Step) and message.flags & StepFlag.MEMORY:
                sizes[link.peer_id.hex()] += len(message.payload)
            return False

        here.here.rig.network.drop = look
        await here.song(**SEEDED)
        assert set(sizes) == {node.node_id.hex() for node in here.nodes}
    assert set(sizes.values()) == {2 * TEXT_ROWS * HIDDEN_SIZE * 4}


@pytest.mark.parametrize("local", [(1, 1), None])
async def test_nodes_decrypt_neither_the_prompt_nor_a_sample(music: TinyMusic, local: Local) -> None:
    heard: list[bytes] = []
    async with songs(music, local) as here:

        def listen(link: Any, message: Message) -> bool:
            heard.append(b"".join(wire.encode(message)[1]))
            return False

        here.here.rig.network.drop = listen
        made = await here.song(**SEEDED)
    decrypted = b"".join(heard)
    ids = torch.tensor(music.parts.token_ids(PROMPT))
    assert PROMPT.encode() not in decrypted
    for dtype in (torch.int16, torch.int32, torch.int64):
        assert ids.to(dtype).numpy().tobytes() not in decrypted
    assert made.samples is not None
    whole = np.rint(made.samples * 32_767).astype("<i2")
    assert num_found(pieces([made.samples, whole]), decrypted) == 0
    # The same search finds what nodes do get: what their blocks attend to.
    states = pieces([music.parts.encode(music.parts.token_ids(PROMPT), branches=2)])
    assert len(states) > 20
    assert num_found(states, decrypted) == len(states)


async def test_a_thin_sampling_answer_is_74_bytes_on_the_wire(music: TinyMusic) -> None:
    sizes: Counter[int] = Counter()
    async with songs(music, None) as here:

        def look(link: Any, message: Message) -> bool:
            if isinstance(message, Answer):
                assert message.kind is AnswerKind.TOKEN_IDS
                assert not message.flags & StepFlag.SEALED  # it came over the gateway's own link
                content = sum(map(len, wire.encode(message)[1]))
                sizes[content + records.OVERHEAD + mux.HEADER.size] += 1
            return False

        here.here.rig.network.drop = look
        await here.song(**SEEDED)
    assert sizes == {72: NUM_STEPS}  # and 2 for the websocket frame


async def test_songs_of_different_lengths_run_side_by_side(music: TinyMusic) -> None:
    lengths = [4, 9, 14, 20]
    for local in ((1, 0), None):
        async with songs(music, local) as here:
            asked = [{**GREEDY, "seconds": frames / FRAME_RATE} for frames in lengths]
            made = await asyncio.gather(*(here.song(**fields) for fields in asked))
            for song, frames in zip(made, lengths, strict=True):
                np.testing.assert_array_equal(song.samples, music.greedy(frames))
            await here.is_freed()


@pytest.mark.parametrize("local", [(1, 1), None])
async def test_a_caller_that_leaves_at_any_moment_leaves_nothing(music: TinyMusic, local: Local) -> None:
    async with songs(music, local) as here:
        for ms in range(0, 60, 4):
            task = asyncio.create_task(here.song(**SEEDED))
            await asyncio.sleep(ms / 1000)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert (here.here.switchboard.num_chains, here.engine.num_running) == (0, 0)
        await here.is_freed()


async def test_a_deadline_holds_from_the_first_dial_on(music: TinyMusic) -> None:
    async with songs(music, (1, 0)) as here:
        here.here.rig.network.delay_s = 0.05
        with pytest.raises(WorkError) as caught:
            await here.song(**SEEDED, deadline_s=0.3)
        assert caught.value.code is ErrorCode.DEADLINE
        here.here.rig.network.delay_s = 0.0
        await here.is_freed()


def poisoned(answer: Answer) -> Answer:
    """Not a number everywhere; an id outside the vocabulary in a drawn one."""
    if answer.kind is AnswerKind.TOKEN_IDS:
        return replace(answer, payload=VOCAB_SIZE.to_bytes(2, "little") * DEPTH)
    if answer.kind is AnswerKind.CANDIDATES:
        pairs = np.frombuffer(answer.payload, np.dtype([("id", "<u4"), ("logit", "<f4")])).copy()
        pairs["logit"] = np.nan
        return replace(answer, payload=pairs.tobytes())
    return replace(answer, payload=np.full(len(answer.payload) // 4, np.nan, "<f4").tobytes())


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("local", [(1, 0), (1, 1), None])
async def test_poison_from_a_node_fails_that_song_only(
    music: TinyMusic, local: Local, sampling: dict[str, Any]
) -> None:
    async with songs(music, local) as here:
        expected = (await here.song(**sampling)).samples
        victims: set[bytes] = set()

        def poison(link: Any, message: Message) -> bool:
            if not isinstance(message, Answer) or not message.rows:
                return False
            if not victims:
                victims.add(message.session_id)
            if message.session_id in victims:
                here.here.switchboard.on_message(link.other_side, poisoned(message))
                return True
            return False

        here.here.rig.network.drop = poison
        bad = asyncio.create_task(here.song(**sampling))
        await until(lambda: bool(victims))
        np.testing.assert_array_equal((await here.song(**sampling)).samples, expected)
        with pytest.raises((WorkError, ProtocolError, LogitsError)):
            await bad
        await here.is_freed()


async def test_a_song_that_nodes_have_no_room_for_is_refused_by_its_length(music: TinyMusic) -> None:
    async with songs(music, (1, 0), kv_budget_bytes=30_000) as here:
        with pytest.raises(RequestError) as caught:
            await here.song(**SEEDED, seconds=1.2)
        assert (caught.value.param, caught.value.code) == ("seconds", "context_length_exceeded")
        await here.is_freed()


async def test_what_cannot_be_made_is_refused_before_anything_is_sent(music: TinyMusic) -> None:
    async with songs(music, None) as here:
        with pytest.raises(RequestError):
            here.engine.check(request(seconds=2.0))
        with pytest.raises(RequestError):
            await here.song(seconds=2.0)
        assert here.here.messages_sent()["Open"] == 0
        assert here.engine.defaults.max_seconds == pytest.approx(60 / FRAME_RATE)
        here.engine.check(request(seconds=SECONDS))


async def test_songs_share_calls_where_company_changes_no_bits(music: TinyMusic) -> None:
    def invariant(parts: Parts, copy: int) -> InvariantRunner:
        return InvariantRunner.from_model(music.whole, parts)

    lengths = [9, 10, 12, 14, 15, 16]  # three for each of two stages
    for local in ((1, 1), None):
        async with songs(music, local, runners=invariant) as here:
            asked = [{**SEEDED, "seconds": frames / FRAME_RATE, "seed": frames} for frames in lengths]
            alone = [await here.song(**fields) for fields in asked]
            before = [replace(node.stats.batches) for node in here.nodes]
            together = await asyncio.gather(*(here.song(**fields) for fields in asked))
            for one, other in zip(alone, together, strict=True):
                np.testing.assert_array_equal(one.samples, other.samples)
            for node, was in zip(here.nodes, before, strict=True):
                works = node.stats.batches.works - was.works
                assert works == sum(
                    frames + DEPTH for frames in lengths
                )  # a step a place, and the text's states
                assert node.stats.batches.batches - was.batches <= 0.6 * works
