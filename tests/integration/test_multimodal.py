"""Chats with pictures and recordings over real node servers, against transformers' own `generate`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from app.engine.multimodal import MultimodalEngine
from app.engine.prompt_reader import PromptReader
from app.engine.request import GenerationRequest, TextDelta
from app.engine.tokenizer import ChatTokenizer
from cli.answer import Piece, Question
from cli.attachments import with_attachments
from cli.engine import Engine
from routing import switchboard
from routing.types import Answer, Message, Step
from slicing.invariant import InvariantRunner
from slicing.model_source import open_checkpoint
from slicing.multimodal import HomeEncoders, load_home, render
from slicing.sampler import Sampler, SamplingParams
from tests.integration.chats import Chat, chat
from tests.integration.test_picture_privacy import num_found, pieces
from tests.support.tiny_multimodal import FAMILIES, part_of, stock_model, write_multimodal

NUM_TOKENS = 10
PENALTY = 1.5  # answers of random models repeat themselves
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=PENALTY)
SEEDED = SamplingParams(temperature=1.2, seed=5, top_p=0.9)
PLACES = [((0, 0), 1), ((1, 0), 1), ((1, 0), 2), ((1, 1), 2), ((0, 0), 3)]
TEXT = {"type": "text", "text": "hello world, what is this? Say it in a few words."}

Conversation = list[dict[str, Any]]


@dataclass
class Sensing:
    """A tiny model whole, and what of it is at home."""

    family: str
    folder: Path
    home: HomeEncoders
    whole: PreTrainedModel
    tokenizer: ChatTokenizer
    thread: ThreadPoolExecutor = field(repr=False)

    def asking(self, *seeds: int) -> Conversation:
        """One question with a picture or recording for each seed."""
        return [{"role": "user", "content": [TEXT, *(part_of(self.family, seed) for seed in seeds), TEXT]}]

    def inputs(self, messages: Conversation) -> dict[str, Any]:
        assert self.home.processor is not None
        return dict(render(self.home.processor, messages))

    def generated(self, messages: Conversation) -> list[int]:
        """What stock transformers answers."""
        model: Any = self.whole
        made = model.generate(
            **self.inputs(messages), max_new_tokens=NUM_TOKENS, do_sample=False, repetition_penalty=PENALTY
        )
        return list(made[0, -NUM_TOKENS:].tolist())

    def sampled(self, messages: Conversation, params: SamplingParams) -> list[int]:
        """What the whole model answers under our sampler, with transformers' own cache."""
        inputs = self.inputs(messages)
        prompt = inputs["input_ids"][0].tolist()
        sampler = Sampler(params, self.whole.config.get_text_config().vocab_size, prompt)
        drawn: list[int] = []
        with torch.inference_mode():
            made = self.whole(**inputs, use_cache=True)
            while True:
                drawn.append(sampler.sample(made.logits[0, -1].float(), len(prompt) + len(drawn)))
                sampler.observe(drawn[-1])
                if len(drawn) == NUM_TOKENS:
                    return drawn
                made = self.whole(input_ids=torch.tensor([drawn[-1:]]), cache=made.cache, use_cache=True)

    @contextlib.asynccontextmanager
    async def over_nodes(
        self, *arguments: Any, **options: Any
    ) -> AsyncIterator[tuple[MultimodalEngine, Chat]]:
        options.setdefault("copies", 1)
        async with chat(self.whole, self.tokenizer, *arguments, **{"chunk": 512} | options) as here:
            reader = PromptReader(self.home, self.thread)
            yield MultimodalEngine(here.engine, reader), here


@pytest.fixture(scope="module", params=FAMILIES)
def sensing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sensing]:
    torch.set_num_threads(1)
    folder = write_multimodal(tmp_path_factory.mktemp(request.param), request.param)
    home = load_home(open_checkpoint(str(folder)), dtype=torch.float32)
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as thread:
        whole, tokenizer = stock_model(folder), ChatTokenizer.load(folder)
        yield Sensing(request.param, folder, home, whole, tokenizer, thread)


async def asked(engine: MultimodalEngine, messages: Conversation, **fields: Any) -> GenerationRequest:
    prompt = await engine.prompt_reader.read(messages)
    encoded = await engine.prompt_reader.encode(prompt)
    told = {"sampling": GREEDY, "max_tokens": NUM_TOKENS} | fields
    return GenerationRequest("r", "tiny", prompt.prompt_ids, encoded=encoded, **told)


async def answered(engine: MultimodalEngine, request: GenerationRequest) -> list[int]:
    return [
        token_id
        async for event in engine.generate(request)
        if isinstance(event, TextDelta)
        for token_id in event.token_ids
    ]


@pytest.mark.parametrize(("local", "slices"), PLACES)
async def test_greedy_tokens_are_those_of_stock_generation(
    sensing: Sensing, local: tuple[int, int], slices: int
) -> None:
    messages = sensing.asking(1, 2)
    expected = sensing.generated(messages)
    assert len(set(expected)) > 5
    async with sensing.over_nodes(local, slices=slices) as (engine, here):
        assert await answered(engine, await asked(engine, messages)) == expected
        await here.is_freed()


async def test_seeded_tokens_are_those_of_the_whole_model_under_our_sampler(sensing: Sensing) -> None:
    messages = sensing.asking(1)
    async with sensing.over_nodes((1, 0), slices=2) as (engine, _):
        tokens = await answered(engine, await asked(engine, messages, sampling=SEEDED))
    assert tokens == sensing.sampled(messages, SEEDED)


async def test_pictures_of_earlier_turns_are_seen_again(sensing: Sensing) -> None:
    later = [*sensing.asking(1), {"role": "assistant", "content": "a fox"}, *sensing.asking(2)]
    async with sensing.over_nodes((1, 0), slices=2) as (engine, _):
        assert await answered(engine, await asked(engine, later)) == sensing.generated(later)


async def test_another_picture_is_another_answer(sensing: Sensing) -> None:
    async with sensing.over_nodes((1, 0)) as (engine, _):
        one, two = [await answered(engine, await asked(engine, sensing.asking(seed))) for seed in (1, 7)]
    assert one != two


async def test_prompts_in_small_pieces_and_text_alone_say_the_same(sensing: Sensing) -> None:
    messages, plain = sensing.asking(1), [{"role": "user", "content": "hello fox"}]
    async with sensing.over_nodes((1, 0), slices=2, chunk=5) as (engine, _):
        assert await answered(engine, await asked(engine, messages)) == sensing.generated(messages)
        assert await answered(engine, await asked(engine, plain)) == sensing.generated(plain)


@pytest.mark.parametrize("after", [1, 4, 9])
async def test_a_node_lost_midway_changes_nothing(sensing: Sensing, after: int) -> None:
    messages = sensing.asking(1, 2)
    expected = sensing.generated(messages)
    async with sensing.over_nodes((1, 0), slices=2, copies=2) as (engine, here):
        here.lose_at(after, here.nodes[:2])
        assert await answered(engine, await asked(engine, messages)) == expected
        assert here.lost
        await here.is_freed()


async def test_two_chats_at_once_do_not_mix(sensing: Sensing) -> None:
    questions = [sensing.asking(1), sensing.asking(7), sensing.asking(2, 3)]
    async with sensing.over_nodes((1, 0), slices=2) as (engine, _):
        requests = [await asked(engine, messages) for messages in questions]
        answers = await asyncio.gather(*(answered(engine, request) for request in requests))
    assert answers == [sensing.generated(messages) for messages in questions]


async def test_equal_text_with_another_picture_never_goes_on_from_it(
    sensing: Sensing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switchboard, "prefers_holders", lambda *_ms, num_held, **_others: num_held > 0)
    one, other = sensing.asking(1, 2), sensing.asking(7, 2)
    options: dict[str, Any] = {"runners": InvariantRunner, "chunk": 16, "secret": b"s" * 32}
    async with sensing.over_nodes((1, 0), **options) as (engine, here):
        first = await answered(engine, await asked(engine, one))
        again, told = await here.tokens(**_fields(await asked(engine, one)))
        assert again == first
        assert told.cached_tokens > 32  # the same picture is not computed again
        tokens, told = await here.tokens(**_fields(await asked(engine, other)))
        begins = min(place for place, _ in (await asked(engine, other)).encoded.digests)  # type: ignore[union-attr]
        assert told.cached_tokens <= begins
    async with sensing.over_nodes((1, 0), runners=InvariantRunner, chunk=16) as (engine, _):
        assert await answered(engine, await asked(engine, other)) == tokens


async def test_the_command_line_asks_with_files(sensing: Sensing, tmp_path: Path) -> None:
    """Through the very parts that it would send to a gateway; a lossless file is the picture."""
    if sensing.family == "qwen2_audio":
        pytest.skip("samples of a file are rounded")
    part_of(sensing.family, 1)["image"].save(tmp_path / "a.png")
    content = with_attachments("what is it?", [tmp_path / "a.png"], [])
    question = Question(({"role": "user", "content": content},), max_tokens=NUM_TOKENS, temperature=0.0)
    own = [{"role": "user", "content": [part_of(sensing.family, 1), {"type": "text", "text": "what is it?"}]}]
    async with sensing.over_nodes((1, 0)) as (engine, here):
        pieces_of_text = [piece async for piece in Engine(engine).answer(question)]
        expected, _ = await here.text(
            **_fields(await asked(engine, own, sampling=SamplingParams(temperature=0.0)))
        )
    assert "".join(piece.text for piece in pieces_of_text if isinstance(piece, Piece)) == expected


async def test_nodes_decrypt_nothing_that_an_encoder_took(
    sensing: Sensing, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = sensing.asking(1, 2)
    sent = [part[part["type"]] for part in messages[0]["content"] if part["type"] != "text"]
    raw = [np.asarray(item) for item in sent]
    scaled = [item.astype(np.float32) / 255 for item in raw if item.dtype == np.uint8]
    inputs = [
        tensor for name, tensor in sensing.inputs(messages).items() if tensor.is_floating_point() and name
    ]
    heard: list[bytes] = []

    def listen(link: Any, message: Message) -> bool:
        if isinstance(message, Step | Answer):
            heard.append(bytes(message.payload))
        return False

    async with sensing.over_nodes((1, 0), slices=2) as (engine, here):
        request = await asked(engine, messages)
        here.here.rig.network.drop = listen
        await answered(engine, request)
    decrypted = b"".join(heard)
    assert request.encoded is not None
    merged = request.encoded.embeds
    assert merged is not None
    assert num_found(pieces([*raw, *scaled, *inputs], in_both_orders=True), decrypted) == 0
    assert num_found(pieces([merged], in_both_orders=False), decrypted) == 0
    ids = np.asarray(request.prompt_ids)
    assert not any(ids.astype(kind).tobytes()[:24] in decrypted for kind in ("<i8", "<i4", "<i2"))
    # The same search finds what nodes do get: hidden states behind the first layer.
    with torch.inference_mode():
        states = sensing.whole(**sensing.inputs(messages), output_hidden_states=True).hidden_states[1]
    wanted = pieces([states], in_both_orders=False)
    assert len(wanted) > 50
    assert num_found(wanted, decrypted) > len(wanted) // 2


def _fields(request: GenerationRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in ("prompt_ids", "sampling", "max_tokens", "encoded")}
