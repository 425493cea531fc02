"""What each token of a text adds to it: its bytes, and the characters that they complete. Knows no probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from app.engine.text_decoder import TextDecoder


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """A token's part of a text: joined, `data` is the UTF-8 of the joined `text`, but for broken and unfinished bytes.

    The last `num_open` bytes begin a character that other tokens must end.
    """

    data: bytes = field(repr=False)
    text: str = field(repr=False)
    num_open: int = 0


class TokenPieces:
    """Takes the tokens of one text, in their order."""

    def __init__(self, decoder: TextDecoder, token_bytes: Callable[[int], bytes] | None) -> None:
        """Without `token_bytes` a token's bytes are those of the text that is new with it."""
        self._decoder = decoder
        self._token_bytes = token_bytes

    def push(self, token_id: int) -> TokenPiece:
        """Take the next token."""
        stripped = self._decoder.num_stripped
        text = self._decoder.push(token_id)
        if self._token_bytes is None:
            return TokenPiece(text.encode("utf-8", "replace"), text, self._decoder.num_open)
        data = self._token_bytes(token_id)[self._decoder.num_stripped - stripped :]
        return TokenPiece(data, text, self._decoder.num_open)
