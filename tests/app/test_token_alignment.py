"""Tokens and text of real tokenizers, told together: joined bytes are the text, wherever a stop string cuts it."""

from __future__ import annotations

import random

import pytest

from app.api.echo import echo_of
from app.api.token_alignment import TokenAligner, ToldToken
from app.engine.tokenizer import ChatTokenizer
from slicing.model_source import open_checkpoint
from slicing.token_scores import TokenScore

TEXTS = [
    " hello  world",
    "né e\u0301 \U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 fox \U0001f1e9\U0001f1ea",
    "你好，世界。今日は",
    "\tx = 1;\n\n  y",
]


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m"])
def tokenizer(request: pytest.FixtureRequest) -> ChatTokenizer:
    return ChatTokenizer.load(open_checkpoint(request.param).folder)


def told(
    tokenizer: ChatTokenizer, ids: list[int], stop: str, *, is_continued: bool
) -> tuple[str, list[ToldToken]]:
    """An answer of these ids, as the engine and the API make it."""
    context = (ids[0],) if is_continued else ()
    text = tokenizer.answer_text([stop] if stop else (), continued_ids=context)
    aligner = TokenAligner(tokenizer.pieces(context), frozenset())
    final, tokens = "", []
    for token_id in ids:
        new = text.push(token_id)
        tokens += aligner.take(new, [TokenScore(token_id, -1.0)])
        final += new
        if text.is_stopped:
            break
    rest = text.finish()
    return final + rest, [*tokens, *aligner.take(rest, ()), *aligner.finish()]


@pytest.mark.parametrize("is_continued", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_joined_bytes_are_the_text(tokenizer: ChatTokenizer, text: str, is_continued: bool) -> None:
    ids = tokenizer.encode(text)
    final, tokens = told(tokenizer, ids, "", is_continued=is_continued)
    assert b"".join(one.data for one in tokens).decode() == final
    assert [one.score.token_id for one in tokens] == ids
    for one in tokens:
        assert final[one.begin :].encode().startswith(one.data[:1]) or not one.data[:1].isascii()


@pytest.mark.parametrize("text", TEXTS)
def test_wherever_a_stop_string_cuts(tokenizer: ChatTokenizer, text: str) -> None:
    draw = random.Random(3)
    ids = tokenizer.encode(text)
    for _ in range(60):
        begin = draw.randrange(len(text))
        stop = text[begin : begin + draw.randint(1, 6)]
        final, tokens = told(tokenizer, ids, stop, is_continued=True)
        assert final == text[: text.index(stop)]
        assert b"".join(one.data for one in tokens).decode() == final


def test_random_ids_tell_every_token_once(tokenizer: ChatTokenizer) -> None:
    draw = random.Random(5)
    for _ in range(50):
        ids = [draw.randrange(3, 40_000) for _ in range(20)]
        final, tokens = told(tokenizer, ids, "", is_continued=False)
        assert [one.score.token_id for one in tokens] == ids
        data = b"".join(one.data for one in tokens).decode("utf-8", "replace")
        assert data.rstrip("\ufffd") == final.rstrip("\ufffd")


@pytest.mark.parametrize("text", TEXTS)
def test_a_prompt_is_told_back_with_its_tokens_in_their_places(tokenizer: ChatTokenizer, text: str) -> None:
    ids = tokenizer.encode_whole(text)
    echo = echo_of(tokenizer, text, ids)
    assert echo.text == text
    assert len(echo.shown) == len(echo.offsets) == len(ids)
    for shown, offset, token_id in zip(echo.shown, echo.offsets, ids, strict=True):
        if not shown.startswith("bytes:") and not tokenizer.is_special(token_id):
            assert text[offset:].startswith(shown)
    assert echo_of(tokenizer, tuple(tokenizer.encode(text)), tokenizer.encode(text)).text == text
