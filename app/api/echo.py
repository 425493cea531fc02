"""A prompt as it is told back: its text, and where each of its tokens begins in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from app.api.completion_protocol import Prompt
from app.api.logprobs import shown_as
from app.engine.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """`shown[i]` is token i as text, `offsets[i]` the character of `text` where it begins."""

    text: str = field(repr=False)
    shown: tuple[str, ...] = field(repr=False)
    offsets: tuple[int, ...] = field(repr=False)


def echo_of(tokenizer: ChatTokenizer, prompt: Prompt, token_ids: Sequence[int]) -> Echo:
    """Tell a prompt back: a string as it was sent, token ids as their text, special ones by their names.

    Special tokens that were put around a string are no part of it: they take no place.
    """
    front, back = _added(tokenizer, prompt, token_ids)
    pieces = tokenizer.pieces()
    texts, shown = [], []
    for number, token_id in enumerate(token_ids):
        if tokenizer.is_special(token_id):
            name = tokenizer.name_of(token_id)
            shown.append(name)
            texts.append("" if number < front or number >= back else name)
        else:
            piece = pieces.push(token_id)
            shown.append(legacy_shown(tokenizer, token_id, piece.data))
            texts.append(piece.text)
    text = prompt if isinstance(prompt, str) else "".join(texts)
    offsets, place = [], 0
    for part in texts:
        offsets.append(min(place, len(text)))
        place += len(part)
    return Echo(text, tuple(shown), tuple(offsets))


def legacy_shown(tokenizer: ChatTokenizer, token_id: int, data: bytes) -> str:
    r"""A token as completions show it: bytes that are no whole characters as `bytes:\xe4\xbd`."""
    shown = shown_as(tokenizer, token_id, data)
    is_whole = shown.encode("utf-8", "replace") == data or not data
    return shown if is_whole else f"bytes:{shown}"


def _added(tokenizer: ChatTokenizer, prompt: Prompt, token_ids: Sequence[int]) -> tuple[int, int]:
    """The range of ids that the prompt itself is made of."""
    if not isinstance(prompt, str):
        return 0, len(token_ids)
    own = len(tokenizer.encode(prompt))
    front = next(
        (number for number, token_id in enumerate(token_ids) if not tokenizer.is_special(token_id)),
        len(token_ids) - own,
    )
    front = min(front, len(token_ids) - own)
    return front, front + own
