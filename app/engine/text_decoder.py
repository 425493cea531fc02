"""Turns a growing list of token ids into text, whole characters only, at the same cost for every token.

Knows neither prompts nor stop strings. Special tokens give no text; bytes that are no UTF-8 give U+FFFD where
they stand in the middle; a last character that the model left unfinished is dropped. Joined, the text is the
tokenizer's own decoding of the same ids, but for one thing: SentencePiece throws away the valid characters
beside a broken run of byte tokens, and this keeps them.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A UTF-8 character has at most 4 bytes, hence at most 4 tokens; beyond that the bytes are simply broken.
MAX_HELD_TOKENS = 4


class TextDecoder(Protocol):
    """Text of token ids that come one at a time."""

    num_open: int  # of the last token: how many of its bytes begin a character that others must end
    num_stripped: int  # leading spaces dropped so far

    def push(self, token_id: int) -> str:
        """Return the whole characters that this token completes."""
        ...


class ByteDecoder:
    """For tokens that stand for bytes: byte-level BPE, and SentencePiece with byte fallback.

    `strip_spaces` leading spaces of the whole text are dropped, as the tokenizer's own decoder does.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], strip_spaces: int = 0) -> None:
        self._token_bytes = token_bytes
        self._strip_spaces = strip_spaces
        self.num_open = 0
        self.num_stripped = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        text = self._utf8.decode(self._token_bytes(token_id))
        self.num_open = len(self._utf8.getstate()[0])
        return self._strip_start(text) if self._strip_spaces and text else text

    def _strip_start(self, text: str) -> str:
        num_spaces = len(text) - len(text.lstrip(" "))
        cut = min(num_spaces, self._strip_spaces)
        self.num_stripped += cut
        self._strip_spaces = self._strip_spaces - cut if cut == len(text) else 0
        return text[cut:]


class WindowDecoder:
    """For any other tokenizer: decodes a short window of ids again and returns what is new in it.

    `context` ids stand before the answer; their text is not returned, but decides about leading spaces. `silent`
    ids have no text. Unlike `ByteDecoder` it may cut a character that follows on broken bytes.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        context: Sequence[int] = (),
        silent: Collection[int] = (),
    ) -> None:
        self._decode = decode
        self._silent = silent
        self._window = list(context)
        self._num_read = len(self._window)
        self.num_open = 0
        self.num_stripped = 0  # the decoding drops them
        self._prefix = decode(self._window) if self._window else ""

    def push(self, token_id: int) -> str:
        if token_id in self._silent:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        pending = self._window[self._num_read :]
        self.num_open = int(text.endswith(REPLACEMENT) and len(pending) < MAX_HELD_TOKENS)
        if self.num_open:
            return ""
        is_grown = text.startswith(self._prefix)
        new_text = text[len(self._prefix) :] if is_grown else self._decode(pending)
        if new_text:
            self._window = pending
            self._num_read = len(pending)
            self._prefix = self._decode(pending)
        return new_text
