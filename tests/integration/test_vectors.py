"""Vectors of texts through slices: what the whole model makes, whatever is cut, lost or refused."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.engine.embedding_request import Embedded
from app.engine.request import RequestError
from routing.errors import NoRouteError, WorkError
from routing.types import Answer, Message, Step, Want
from slicing.miniature import CannotCut, check_cut
from tests.integration.vectors import SmallModel, request, texts_of, vectors
from tests.node.rig import until
from tests.support.tiny_encoders import HIDDEN_SIZE, VOCAB_SIZE, save_encoder, tiny_encoder

CLOSE = 1e-5
TEXTS = texts_of(1, 7, 23, 3, 12, 5)
ENCODERS = ["bert", "roberta", "distilbert", "modernbert", "gemma3_text"]
PLACES = [(1, 0), (0, 0), (1, 1), None]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[tuple[str, str | None], SmallModel] = {}

    def build(family: str, pooling: str | None = None) -> SmallModel:
        key = family, pooling
        if key not in made:
            folder = save_encoder(tiny_encoder(family), tmp_path_factory.mktemp(family), pooling)
            made[key] = SmallModel.open(folder)
        return made[key]

    return build


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("slices", [1, 2, 3])
async def test_an_encoder_in_slices_makes_what_it_makes_whole(small: Any, family: str, slices: int) -> None:
    model = small(family)
    async with vectors(model, slices=slices) as here:
        made, _ = await here.make(*TEXTS)
        for vector, text in zip(made, TEXTS, strict=True):
            np.testing.assert_array_equal(vector, model.uncut(text))
            np.testing.assert_allclose(vector, model.stock(text), atol=CLOSE, rtol=0)
        await here.is_freed()


@pytest.mark.parametrize("local", PLACES)
@pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token", "lasttoken", "max_tokens"])
async def test_the_ends_may_be_anywhere(small: Any, local: tuple[int, int] | None, pooling: str) -> None:
    model = small("bert", pooling)
    async with vectors(model, local) as here:
        made, finished = await here.make(*TEXTS)
        for vector, text in zip(made, TEXTS, strict=True):
            np.testing.assert_array_equal(vector, model.uncut(text))
        assert finished.replays == 0
        await here.is_freed()


@pytest.mark.parametrize("local", PLACES)
@pytest.mark.parametrize("pooling", ["lasttoken", "mean_tokens", "cls_token", None])
async def test_a_decoder_reads_a_text_in_chunks(
    small: Any, local: tuple[int, int] | None, pooling: str | None
) -> None:
    model = small("qwen3", pooling)
    async with vectors(model, local, chunk=5) as here:
        made, _ = await here.make(*TEXTS)
        for vector, text in zip(made, TEXTS, strict=True):
            np.testing.assert_allclose(vector, model.stock(text), atol=CLOSE, rtol=0)
        await here.is_freed()


async def test_a_decoder_that_names_its_head_makes_vectors_where_a_pooling_lies_beside_it(
    tmp_path: Path,
) -> None:
    folder = save_encoder(tiny_encoder("qwen3"), tmp_path, "lasttoken", architectures=["Qwen3ForCausalLM"])
    model = SmallModel.open(folder)
    async with vectors(model) as here:
        (vector,), _ = await here.make(TEXTS[2])
        np.testing.assert_allclose(vector, model.stock(TEXTS[2]), atol=CLOSE, rtol=0)


def test_layers_that_share_what_the_first_of_them_makes_are_refused_by_name(small: Any) -> None:
    with pytest.raises(CannotCut, match="position_bias"):
        check_cut(small("mpnet").checkpoint.config)


async def test_several_sessions_keep_all_stages_busy_and_no_more_are_opened(small: Any) -> None:
    async with vectors(small("bert"), slices=3) as here:
        most = 0
        async with aclosing(here.engine.embed(request(*texts_of(*[6] * 40)))) as events:
            async for event in events:
                if isinstance(event, Embedded):
                    most = max(most, here.here.switchboard.num_chains)
        assert most == 5  # three nodes, this end, and one on its way
        one = await here.make(TEXTS[0])
        assert here.here.messages_sent()["Open"] == 5 + 1
        assert len(one[0]) == 1


async def test_a_node_with_place_for_one_session_makes_all_vectors_over_it(small: Any) -> None:
    """No text is handed to a session that has no place, and nobody waits for one."""
    model, texts = small("bert"), texts_of(*[6] * 20)
    async with vectors(model, slices=2) as here:
        expected, _ = await here.make(*texts)
    async with vectors(model, slices=2, max_sessions_per_peer=1) as here:
        made, finished = await here.make(*texts)
        np.testing.assert_array_equal(np.stack(made), np.stack(expected))
        assert finished.replays == 0
        await here.is_freed()


async def test_only_the_rows_that_are_pooled_come_back(small: Any) -> None:
    seen: list[Answer] = []
    for pooling in ("cls_token", "lasttoken", "mean_tokens"):
        async with vectors(small("bert", pooling), slices=1) as here:
            seen.clear()
            here.here.rig.network.drop = lambda link, message: bool(
                isinstance(message, Answer) and seen.append(message)
            )
            await here.make(TEXTS[2])
            rows = {answer.rows for answer in seen}
            assert rows == {len(TEXTS[2]) if pooling == "mean_tokens" else 1}


@pytest.mark.parametrize("family", ["bert", "qwen3"])
@pytest.mark.parametrize("local", [(1, 0), (1, 1), None])
@pytest.mark.parametrize("stage", [0, 1])
async def test_a_node_lost_in_the_middle_changes_nothing(
    small: Any, family: str, local: tuple[int, int] | None, stage: int
) -> None:
    model, texts = small(family), texts_of(*range(3, 19))
    async with vectors(model, local, copies=2) as here:
        expected, _ = await here.make(*texts)
    async with vectors(model, local, copies=2) as here:
        seen: list[Message] = []

        def lose(link: Any, message: Message) -> bool:
            if isinstance(message, Step) and link.peer_id in {n.node_id for n in here.nodes[2 * stage :][:2]}:
                seen.append(message)
                if len(seen) == 6 and not here.lost:
                    here.lost.add(link.peer_id)
                    here.here.rig.network.cut_off(link.peer_id)
            return False

        here.here.rig.network.drop = lose
        made, finished = await here.make(*texts)
        np.testing.assert_array_equal(np.stack(made), np.stack(expected))
        assert here.lost
        assert finished.replays >= 1
        await here.is_freed()


async def test_without_a_replica_the_request_fails_and_frees_what_it_had(small: Any) -> None:
    async with vectors(small("bert"), copies=1) as here:
        seen: list[Message] = []

        def lose(link: Any, message: Message) -> bool:
            if isinstance(message, Step) and not here.lost:
                seen.append(message)
                if len(seen) == 6:
                    here.lost.add(here.nodes[1].node_id)
                    here.here.rig.network.cut_off(here.nodes[1].node_id)
            return False

        here.here.rig.network.drop = lose
        with pytest.raises((NoRouteError, WorkError)):
            await here.make(*texts_of(*[6] * 12))
        await here.is_freed()


async def test_leaving_in_the_middle_frees_every_session(small: Any) -> None:
    async with vectors(small("bert")) as here:
        async with aclosing(here.engine.embed(request(*texts_of(*[6] * 20)))) as events:
            async for event in events:
                if isinstance(event, Embedded):
                    break
        await here.is_freed()
        making = asyncio.create_task(here.make(*texts_of(*[6] * 20)))
        await until(lambda: here.here.switchboard.num_chains > 1)
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        await here.is_freed()


async def test_a_request_past_its_deadline_fails(small: Any) -> None:
    async with vectors(small("bert")) as here:
        with pytest.raises(WorkError):
            await here.make(*TEXTS, deadline_s=0.0)
        await here.is_freed()


@pytest.mark.parametrize(
    ("texts", "fields", "param", "code"),
    [
        ([], {}, "input", "invalid_value"),
        ([(5,), ()], {}, "input.1", "invalid_value"),
        ([(5,), (5, VOCAB_SIZE)], {}, "input.1", "invalid_value"),
        ([(5,) * 67], {}, "input.0", "context_length_exceeded"),
        ([(5,)], {"dimensions": HIDDEN_SIZE // 2}, "dimensions", "unsupported_parameter"),
        ([(5,)], {"dimensions": HIDDEN_SIZE * 2}, "dimensions", "unsupported_parameter"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    small: Any, texts: list[tuple[int, ...]], fields: dict[str, Any], param: str, code: str
) -> None:
    async with vectors(small("bert")) as here:
        with pytest.raises(RequestError) as caught:
            await here.make(*texts, **fields)
        assert (caught.value.param, caught.value.code) == (param, code)


async def test_the_longest_text_of_a_table_that_padding_takes_rows_of(small: Any) -> None:
    model = small("roberta")
    assert model.files.max_tokens == 64
    async with vectors(model) as here:
        (longest,), _ = await here.make(*texts_of(64))
        np.testing.assert_array_equal(longest, model.uncut(*texts_of(64)))
        with pytest.raises(RequestError, match="maximum context length is 64"):
            await here.make(*texts_of(65))


async def test_a_model_that_was_trained_for_it_makes_fewer_dimensions(tmp_path: Path) -> None:
    folder = save_encoder(tiny_encoder("bert"), tmp_path, matryoshka_dims=[8, 16])
    model = SmallModel.open(folder)
    async with vectors(model) as here:
        (whole,), _ = await here.make(TEXTS[1])
        (shorter,), _ = await here.make(TEXTS[1], dimensions=8)
        np.testing.assert_allclose(shorter, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)
        with pytest.raises(RequestError, match="8, 16, 32"):
            await here.make(TEXTS[1], dimensions=9)


@pytest.mark.parametrize("local", [(1, 0), None])
async def test_numbers_that_are_none_never_become_a_vector(small: Any, local: tuple[int, int] | None) -> None:
    async with vectors(small("bert"), local) as here:
        poisoned: list[Message] = []

        def poison(link: Any, message: Message) -> bool:
            if not isinstance(message, Answer) or link.other_side is None:
                return False
            poisoned.append(message)
            numbers = np.full(len(message.payload) // 4, np.nan, "<f4")
            here.here.switchboard.on_message(link.other_side, replace(message, payload=numbers.tobytes()))
            return True

        here.here.rig.network.drop = poison
        with pytest.raises(WorkError, match="not finite"):
            await here.make(TEXTS[1])
        assert poisoned
        await here.is_freed()


async def test_chunks_of_a_decoder_before_the_last_bring_no_rows_back(small: Any) -> None:
    seen: list[Step] = []
    async with vectors(small("qwen3"), slices=1, chunk=5) as here:
        here.here.rig.network.drop = lambda link, message: bool(
            isinstance(message, Step) and seen.append(message)
        )
        await here.make(TEXTS[4])  # 12 tokens, of which the last counts
    assert [(step.position, step.rows, step.want, step.want_rows) for step in seen] == [
        (0, 5, Want.LIST, ()),
        (5, 5, Want.LIST, ()),
        (10, 2, Want.LAST, ()),
    ]
