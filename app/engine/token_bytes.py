"""What bytes each token stands for, read off a tokenizer's own decoder.

Covers the two families that nearly all language models use. Anything else, or a tokenizer whose own decoding
disagrees on a sample, is left to decoding windows of ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

SPACE_PIECE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SAMPLE = "Hello, w\u00f6rld!  \u4f60\u597d \U0001f469\u200d\U0001f469\u200d\U0001f467 <s> naïve\n\tx = 1;  "


class TokenBytes:
    """Maps a token id to its bytes; special tokens and ids without a token give none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, is_byte_level: bool, strip_spaces: int) -> None:
        self.strip_spaces = strip_spaces  # leading spaces that decoding drops from a whole text
        self._tokenizer = tokenizer
        self._to_bytes = _byte_level_bytes if is_byte_level else _piece_bytes
        self._special_ids = special_ids(tokenizer)
        self._known: dict[int, bytes] = {}  # of ids that were asked for: an entry of the vocabulary each

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> TokenBytes | None:
        """Read the decoder of `tokenizer`; None where its tokens do not simply stand for bytes."""
        steps = _decoder_steps(tokenizer)
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            token_bytes = cls(tokenizer, is_byte_level=True, strip_spaces=0)
        elif kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
            strip_spaces = steps[3]["start"] if len(steps) == 4 else 0
            token_bytes = cls(tokenizer, is_byte_level=False, strip_spaces=strip_spaces)
        else:
            return None
        return token_bytes if token_bytes._agrees_on_a_sample() else None

    def __call__(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            known = self._read(token_id)
            if known:  # ids without a token may be any number
                self._known[token_id] = known
        return known

    def _read(self, token_id: int) -> bytes:
        if token_id in self._special_ids:
            return b""
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        return self._to_bytes(piece) if isinstance(piece, str) else b""

    def _agrees_on_a_sample(self) -> bool:
        ids = self._tokenizer.encode(SAMPLE, add_special_tokens=False)
        text = b"".join(map(self, ids)).decode("utf-8", "replace")
        dropped = min(self.strip_spaces, len(text) - len(text.lstrip(" ")))
        return text[dropped:] == decode(self._tokenizer, ids)


def decode(tokenizer: PreTrainedTokenizerBase, ids: Any) -> str:
    """Decode without special tokens and without tidying up spaces."""
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids that decoding leaves out."""
    added: Mapping[int, Any] = tokenizer.added_tokens_decoder
    return frozenset(token_id for token_id, token in added.items() if token.special)


def _decoder_steps(tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return []
    described = json.loads(decoder.__getstate__())
    return list(described["decoders"]) if described["type"] == "Sequence" else [described]


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of GPT-2's byte-level BPE (Radford et al. 2019): character to byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


BYTE_ALPHABET = _byte_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes([BYTE_ALPHABET[character] for character in piece])
    except KeyError:  # an added token, written as plain text
        return piece.encode("utf-8", "replace")


def _piece_bytes(piece: str) -> bytes:
    byte = BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE_PIECE, " ").encode("utf-8", "replace")
