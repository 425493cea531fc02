from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.text_decoder import REPLACEMENT, ByteDecoder, WindowDecoder
from app.engine.token_bytes import TokenBytes
from app.engine.tokenizer import ChatTokenizer
from slicing.model_source import open_checkpoint
from tests.app.conftest import patient

PIECES = [
    "\u4f60",
    "\u597d",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467",
    "e\u0301",
    "\u0635",
    " x",
    "\n",
    "\u00e9",
]
SPECIAL = 2  # of the tiny tokenizer
WHOLE_TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@pytest.fixture(scope="module")
def smollm2() -> ChatTokenizer:
    return ChatTokenizer.load(open_checkpoint("smollm2").folder)


@pytest.fixture(scope="module")
def gemma3() -> ChatTokenizer:
    return ChatTokenizer.load(open_checkpoint("gemma3-270m").folder)


def joined(tokenizer: ChatTokenizer, ids: Sequence[int]) -> str:
    text = tokenizer.answer_text()
    return "".join(map(text.push, ids)) + text.finish()


def assert_equals_whole_decoding(tokenizer: ChatTokenizer, num_ids: int, num_lists: int) -> None:
    """Random ids: the streamed text is the decoded one, but for an unfinished last character."""
    draw = random.Random(7)
    for _ in range(num_lists):
        ids = [draw.randrange(num_ids) for _ in range(24)]
        streamed, whole = joined(tokenizer, ids), tokenizer.decode(ids)
        assert whole.startswith(streamed)
        assert whole[len(streamed) :].strip(REPLACEMENT) == ""
        assert len(whole) - len(streamed) <= 3


@patient
@given(WHOLE_TEXTS)
def test_text_cut_into_bytes_comes_back_whole(tokenizer: ChatTokenizer, text: str) -> None:
    assert joined(tokenizer, tokenizer.encode(text)) == text


@patient
@given(st.lists(st.integers(0, 300), max_size=40))
def test_any_ids_give_what_decoding_them_at_once_gives(tokenizer: ChatTokenizer, ids: list[int]) -> None:
    streamed, whole = joined(tokenizer, ids), tokenizer.decode(ids)
    assert whole.startswith(streamed)
    assert whole[len(streamed) :] in ("", REPLACEMENT)


def test_every_delta_holds_whole_characters(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode("a\U0001f469\u200d\U0001f467b")
    text = tokenizer.answer_text()
    deltas = [text.push(token_id) for token_id in ids]
    assert [delta for delta in deltas if delta] == ["a", "\U0001f469", "\u200d", "\U0001f467", "b"]


def test_a_character_the_model_left_unfinished_is_dropped(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode("a\u4f60")[:-1]
    assert joined(tokenizer, ids) == "a"


def test_broken_bytes_in_the_middle_become_a_replacement_character(tokenizer: ChatTokenizer) -> None:
    ids = [*tokenizer.encode("\u4f60")[:2], *tokenizer.encode("b")]
    assert joined(tokenizer, ids) == f"{REPLACEMENT}b" == tokenizer.decode(ids)


def test_special_tokens_and_unknown_ids_give_no_text(tokenizer: ChatTokenizer) -> None:
    assert joined(tokenizer, [1, *tokenizer.encode("a"), 2, 10**6]) == "a"


def test_a_token_is_looked_up_once(smollm2: ChatTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    own = smollm2._tokenizer
    token_bytes, look_up = TokenBytes.of(own), own.convert_ids_to_tokens
    assert token_bytes is not None
    asked: list[int] = []

    def ask(number: int) -> object:
        asked.append(number)
        return look_up(number)

    monkeypatch.setattr(own, "convert_ids_to_tokens", ask)
    token_id = own.encode("lighthouse", add_special_tokens=False)[0]
    assert len({token_bytes(token_id) for _ in range(5)}) == 1
    assert asked == [token_id]


def test_only_the_first_leading_space_is_dropped_where_decoding_drops_it() -> None:
    spaced: Callable[[int], bytes] = [b"", b"  ", b" a"].__getitem__
    decoder = ByteDecoder(spaced, strip_spaces=1)
    assert "".join(map(decoder.push, (0, 1, 2))) == "  a"


def test_a_leading_space_stays_when_text_is_continued() -> None:
    decoder = ByteDecoder([b" Paris"].__getitem__, strip_spaces=0)
    assert decoder.push(0) == " Paris"


@patient
@given(WHOLE_TEXTS, st.data())
def test_the_window_decoder_streams_whole_characters_too(
    tokenizer: ChatTokenizer, text: str, data: st.DataObject
) -> None:
    ids = tokenizer.encode(text)
    for place in data.draw(st.lists(st.integers(0, len(ids)), max_size=5)):
        ids.insert(place, SPECIAL)
    decoder = WindowDecoder(tokenizer.decode, silent={SPECIAL})
    deltas = [decoder.push(token_id) for token_id in ids]
    assert "".join(deltas) == text
    assert not any(REPLACEMENT in delta for delta in deltas)


def test_the_window_decoder_keeps_its_window_short(tokenizer: ChatTokenizer) -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return tokenizer.decode(ids)

    decoder = WindowDecoder(decode)
    for token_id in tokenizer.encode("hello world" * 50):
        decoder.push(token_id)
    assert longest <= 4


@pytest.mark.real
def test_smollm2_streams_what_it_decodes(smollm2: ChatTokenizer) -> None:
    assert_equals_whole_decoding(smollm2, 49_152, 400)


@pytest.mark.real
def test_gemma3_streams_what_it_decodes(gemma3: ChatTokenizer) -> None:
    assert_equals_whole_decoding(gemma3, 262_144, 400)


@pytest.mark.real
def test_gemma3_joins_characters_made_of_byte_tokens(gemma3: ChatTokenizer) -> None:
    text = "\U000130b8\U00013000 \u4f60"  # hieroglyphs are in no vocabulary: four byte tokens each
    ids = gemma3.encode(text)
    assert len(ids) > 8
    assert joined(gemma3, ids) == text == gemma3.decode(ids)


@pytest.mark.real
def test_gemma3_keeps_a_whole_character_beside_broken_bytes(gemma3: ChatTokenizer) -> None:
    ids = [*gemma3.encode("\U000130b8"), gemma3.encode("\U000130b8")[0], *gemma3.encode("b")]
    assert joined(gemma3, ids) == f"\U000130b8{REPLACEMENT}b"
