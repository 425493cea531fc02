"""Text to text with the encoder at home: the engine a client asks, over real node servers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PretrainedConfig

from app.engine.request import Admitted, Finished, RequestError, TextDelta
from app.engine.seq2seq import Seq2SeqEngine, start_ids_of
from app.engine.tokenizer import ChatTokenizer
from routing.errors import ErrorCode, WorkError
from routing.types import Message, Step
from slicing.encoder import load_home
from slicing.errors import ModelError
from slicing.model_source import open_checkpoint
from tests.integration.chats import Chat, chat, request
from tests.integration.test_encoder_decoder import GREEDY, NUM_TOKENS
from tests.support.nursery import Nursery
from tests.support.processes import Processes, client_of
from tests.support.tiny_encoder_decoders import MAX_POSITIONS, PENALTY, VOCAB_SIZE, TinyPair, tiny_pair
from tests.support.tiny_tokenizer import write_tiny_tokenizer


@pytest.fixture(scope="module", params=["t5", "bart"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(family: str) -> TinyPair:
    return tiny_pair(family)


@contextlib.asynccontextmanager
async def engine_of(
    pair: TinyPair, folder: Path, local: tuple[int, int] | None = (1, 0), start: tuple[int, ...] = ()
) -> AsyncIterator[tuple[Seq2SeqEngine, Chat]]:
    """An engine over a folder's encoder and nodes with the model's decoder."""
    pair.model.save_pretrained(write_tiny_tokenizer(folder, template=None))
    checkpoint = open_checkpoint(str(folder))
    encoder = load_home(checkpoint, dtype=torch.float32)
    tokenizer = ChatTokenizer.load(folder, takes_plain_text=True)
    start = start or start_ids_of(folder, checkpoint.config)
    with ThreadPoolExecutor(1) as encoding:
        async with chat(pair.model, tokenizer, local, copies=1) as here:
            yield Seq2SeqEngine(here.engine, encoder, encoding, start), here


def asked(pair: TinyPair, **fields: Any) -> Any:
    ids = tuple(pair.inputs["input_ids"][0].tolist())
    return request(**{"prompt_ids": ids, "sampling": GREEDY, "max_tokens": NUM_TOKENS} | fields)


async def answer(engine: Seq2SeqEngine, asked: Any) -> tuple[list[int], Admitted, Finished]:
    events = [event async for event in engine.generate(asked)]
    tokens = [token_id for event in events if isinstance(event, TextDelta) for token_id in event.token_ids]
    assert isinstance(events[0], Admitted)
    assert isinstance(events[-1], Finished)
    return tokens, events[0], events[-1]


@pytest.mark.parametrize("local", [(1, 0), None])
async def test_an_answer_is_that_of_stock_generation(
    pair: TinyPair, tmp_path: Path, local: tuple[int, int] | None
) -> None:
    async with engine_of(pair, tmp_path, local) as (engine, here):
        tokens, admitted, finished = await answer(engine, asked(pair))
        assert tokens == pair.generated(NUM_TOKENS)
        assert (admitted.prompt_tokens, finished.prompt_tokens) == (9, 9)
        assert finished.completion_tokens == NUM_TOKENS
        assert engine.num_running == 0
        await here.is_freed()


async def test_messages_are_read_line_by_line(tmp_path: Path) -> None:
    folder = write_tiny_tokenizer(tmp_path, template=None)
    tokenizer = ChatTokenizer.load(folder, takes_plain_text=True)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "hello"},
        {"role": "user", "content": [{"type": "text", "text": " world"}]},
    ]
    assert tokenizer.decode(tokenizer.render(messages)) == "hello\n world"
    with pytest.raises(RequestError) as refused:
        tokenizer.render(messages, continue_final=True)
    assert refused.value.code == "unsupported_parameter"


async def test_what_the_encoder_read_stays_at_home(tmp_path: Path) -> None:
    pair = tiny_pair("t5")
    ids = pair.inputs["input_ids"][0].numpy()
    embedded = pair.model.get_input_embeddings()(torch.tensor(ids)).detach().numpy()
    told = pair.memory().numpy()
    payloads: list[bytes] = []
    async with engine_of(pair, tmp_path, None) as (engine, here):

        def note(link: Any, message: Message) -> bool:
            if isinstance(message, Step):
                payloads.append(bytes(message.payload))
            return False

        here.here.rig.network.drop = note
        await answer(engine, asked(pair))
    arrived = b"".join(payloads)
    for dtype in ("<i4", "<i8", "<f4"):
        assert not any(ids[at : at + 3].astype(dtype).tobytes() in arrived for at in range(7))
    assert not any(row.tobytes() in arrived for row in embedded)
    assert told.tobytes() in arrived, "the search finds what did travel"


async def test_a_prompt_takes_no_room_in_the_decoder(pair: TinyPair, tmp_path: Path) -> None:
    async with engine_of(pair, tmp_path) as (engine, here):
        full = tuple(range(3, 3 + MAX_POSITIONS))
        room = MAX_POSITIONS - 1
        assert engine.answer_room(len(full)) == room
        _, _, finished = await answer(engine, asked(pair, prompt_ids=full, max_tokens=room))
        assert (finished.reason, finished.completion_tokens) == ("length", room)
        assert engine.answer_room(len(full) + 1) < 1
        await here.is_freed()


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt_ids": ()}, "invalid_value"),
        ({"prompt_ids": (VOCAB_SIZE,)}, "invalid_value"),
        ({"prompt_ids": (-1,)}, "invalid_value"),
        ({"prompt_ids": (3,) * (MAX_POSITIONS + 1)}, "context_length_exceeded"),
    ],
)
async def test_what_cannot_be_read_is_refused(tmp_path: Path, fields: dict[str, Any], code: str) -> None:
    pair = tiny_pair("bart")
    async with engine_of(pair, tmp_path) as (engine, here):
        with pytest.raises(RequestError) as refused:
            await answer(engine, asked(pair, **fields))
        assert (refused.value.param, refused.value.code) == ("messages", code)
        await here.is_freed()


async def test_a_deadline_holds_while_the_prompt_is_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = tiny_pair("t5")
    async with engine_of(pair, tmp_path) as (engine, here):
        blocked = asyncio.get_running_loop().run_in_executor(
            engine._encoding, lambda: asyncio.run(asyncio.sleep(0.3))
        )
        with pytest.raises(WorkError) as late:
            await answer(engine, asked(pair, deadline_s=0.1))
        assert late.value.code is ErrorCode.DEADLINE
        assert engine.num_running == 0
        await blocked
        await here.is_freed()


async def test_answers_of_different_prompts_do_not_mix(pair: TinyPair, tmp_path: Path) -> None:
    prompts = [tuple(3 + (n * k) % 250 for n in range(k, k + 6)) for k in (5, 7, 11)]
    async with engine_of(pair, tmp_path) as (engine, _):
        alone = [(await answer(engine, asked(pair, prompt_ids=ids)))[0] for ids in prompts]
        together = await asyncio.gather(*(answer(engine, asked(pair, prompt_ids=ids)) for ids in prompts))
    assert [tokens for tokens, _, _ in together] == alone


# How an answer begins -----------------------------------------------------------------------------------------


def test_an_answer_begins_with_the_start_token_and_what_is_forced_behind_it(tmp_path: Path) -> None:
    assert start_ids_of(tmp_path, tiny_pair("t5").model.config) == (0,)
    config = tiny_pair("bart").model.config
    assert start_ids_of(tmp_path, config) == (2,)
    stated = tiny_pair("bart").model.generation_config
    assert stated is not None
    stated.decoder_start_token_id, stated.forced_bos_token_id = 7, 0
    stated.save_pretrained(tmp_path)
    assert start_ids_of(tmp_path, config) == (7, 0)


def test_a_model_that_does_not_say_how_answers_begin_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="which token an answer begins with"):
        start_ids_of(tmp_path, PretrainedConfig())


async def test_a_forced_first_token_is_part_of_what_the_decoder_is_fed(tmp_path: Path) -> None:
    pair = tiny_pair("bart")
    forced = replace(pair, start_ids=(2, 0))
    async with engine_of(pair, tmp_path, start=(2, 0)) as (engine, _):
        tokens, _, _ = await answer(engine, asked(pair))
    assert tokens == forced.generated(NUM_TOKENS)
    assert np.any(np.array(tokens) != pair.generated(NUM_TOKENS))


# As users start it ---------------------------------------------------------------------------------------------


def test_a_served_model_answers_chats_and_is_told_of(
    family: str, pair: TinyPair, tmp_path: Path, nursery: Nursery
) -> None:
    folder = write_tiny_tokenizer(tmp_path / family, template=None)
    pair.model.save_pretrained(folder)
    prompt = "the quick brown fox"
    tokenizer = ChatTokenizer.load(folder, takes_plain_text=True)
    asked = replace(pair, inputs={"input_ids": torch.tensor([tokenizer.encode(prompt)])})
    with Processes(nursery) as processes:
        nodes = processes.hosts(str(folder), "1:3", "3:4")
        gateway = processes.serve(str(folder), nodes)
        client = client_of(gateway)
        (model,) = client.models.list().data
        assert model.architecture == {"input_modalities": ["text"], "output_modalities": ["text"]}  # type: ignore[attr-defined]
        answered = client.chat.completions.create(
            model=model.id,
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            max_tokens=NUM_TOKENS,
            extra_body={"repetition_penalty": PENALTY},
        )
    text = tokenizer.answer_text()
    expected = "".join(map(text.push, asked.generated(NUM_TOKENS))) + text.finish()
    assert answered.choices[0].message.content == expected
    assert answered.usage is not None
    assert answered.usage.prompt_tokens == asked.inputs["input_ids"].shape[1]
