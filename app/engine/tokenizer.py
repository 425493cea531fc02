"""One model's tokenizer, as the gateway uses it: messages to prompt ids, generated ids to text.

Knows the tokenizer files of a model folder; knows no weights, no HTTP and no network. Safe to use from
several threads (a tokenizer keeps settings between calls, so encoding takes a lock).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from app.engine.chat_template import ChatTemplate, Message, text_of
from app.engine.defaults import GenerationDefaults
from app.engine.grammar import GrammarCompiler
from app.engine.reasoning import Part, ReasoningStyle, Thoughts
from app.engine.request import RequestError
from app.engine.stop_scanner import StopScanner
from app.engine.text_decoder import ByteDecoder, TextDecoder, WindowDecoder
from app.engine.token_bytes import TokenBytes, decode, special_ids
from app.engine.token_pieces import TokenPieces
from app.engine.tool_style import MARKERS, ToolStyle

OPENED_IDS = 32  # of the prompt's last ids: far more than the mark of a thought and whitespace take
CONTEXT_IDS = 8  # ids of the prompt that decide about the first characters of a continued text


class ChatTokenizer:
    """Encodes prompts and decodes answers of one model."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, folder: Path, *, takes_plain_text: bool = False
    ) -> None:
        """`takes_plain_text`: a prompt is text as the tokenizer frames it, for an encoder; there are no turns."""
        self.folder = folder
        self._takes_plain_text = takes_plain_text
        self.created = age_of(folder)
        self.defaults = GenerationDefaults.read(folder)
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._token_bytes = TokenBytes.of(tokenizer)
        self._special_ids = special_ids(tokenizer)
        self._template = ChatTemplate(tokenizer)
        self.stop_token_ids = self._find_stop_token_ids()
        self.max_token_chars = max(map(len, tokenizer.get_vocab()))
        self.grammars = GrammarCompiler(tokenizer, self.stop_token_ids)

    @classmethod
    def load(cls, folder: Path, *, takes_plain_text: bool = False) -> ChatTokenizer:
        """Read tokenizer, chat template and generation defaults of a model folder; runs no code from it."""
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        return cls(tokenizer, folder, takes_plain_text=takes_plain_text)

    @property
    def _joins_contents(self) -> bool:
        return self._takes_plain_text and not self._template.exists

    def render(
        self,
        messages: Sequence[Message],
        *,
        continue_final: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Return the prompt ids of a chat; see `ChatTemplate.render`. Slow for long chats: use a thread.

        Without a template an encoder reads the contents, line by line.
        """
        if self._joins_contents:
            if continue_final:
                text = "the model reads all of the messages: it cannot go on with the last"
                raise RequestError("messages", "unsupported_parameter", text)
            return tuple(
                self.encode_whole("\n".join(text_of(message.get("content")) for message in messages))
            )
        with self._lock:
            return self._template.render(messages, continue_final=continue_final, variables=variables)

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text, without special tokens added, but for those that an encoder reads."""
        if self._takes_plain_text:
            return self.encode_whole(text)
        with self._lock:
            return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_whole(self, text: str) -> list[int]:
        """Return the ids of a text as encoders read it: with the special tokens that belong around it."""
        with self._lock:
            return list(self._tokenizer.encode(text, add_special_tokens=True, verbose=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids in one go, special tokens left out."""
        return decode(self._tokenizer, list(ids))

    def decode_all(self, ids: Sequence[int]) -> str:
        """Return the text of ids in one go, special tokens by their names."""
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    def pieces(self, continued_ids: Sequence[int] = ()) -> TokenPieces:
        """Begin to take an answer's text apart, token by token; `continued_ids` are as in `answer_text`."""
        return TokenPieces(self._new_decoder(continued_ids), self._token_bytes)

    def bytes_of(self, token_id: int) -> bytes:
        """Return what a token stands for by itself: nothing for a special one."""
        if self._token_bytes is not None:
            return self._token_bytes(token_id)
        return self.decode((token_id,)).encode("utf-8", "replace")

    def name_of(self, token_id: int) -> str:
        """Return how the vocabulary writes a token, "" for an id that has none."""
        with self._lock:
            name = self._tokenizer.convert_ids_to_tokens(token_id)
        return name if isinstance(name, str) else ""

    def is_special(self, token_id: int) -> bool:
        """Whether a token has a name and no text."""
        return token_id in self._special_ids

    @property
    def reasoning_style(self) -> ReasoningStyle | None:
        """The marks around the model's thoughts; None: it has none."""
        return self._template.reasoning_style

    @property
    def tool_style(self) -> ToolStyle:
        """The form in which the model writes tool calls."""
        return self._template.tool_style

    def thoughts(
        self, prompt_ids: Sequence[int], *, continued: str | None = None, is_raw: bool = False
    ) -> Thoughts | None:
        """Say how thoughts are told apart in the answer to a prompt; None: there can be none.

        `continued` is the text that the answer carries on: thoughts stand before it, unless it ends inside one.
        """
        style = self._template.reasoning_style
        if style is None:
            return None
        added = {token.content: token_id for token_id, token in self._tokenizer.added_tokens_decoder.items()}
        shown = frozenset(
            added[mark] for mark in style.marks if mark in added and self.is_special(added[mark])
        )
        if continued is not None:
            is_inside = continued.rfind(style.opener) > continued.rfind(style.closer)
            return Thoughts(style, True, shown, is_raw) if is_inside and not style.is_harmony else None
        if style.is_harmony:
            return Thoughts(style, False, shown, is_raw)
        end = self.decode_all(prompt_ids[-OPENED_IDS:]).rstrip()
        if end.endswith(style.closer):
            return None
        return Thoughts(style, end.endswith(style.opener), shown, is_raw)

    @property
    def marker_ids(self) -> Mapping[str, int]:
        """Tokens that are the marks around tool calls and thoughts, by their text."""
        added = {token.content: token_id for token_id, token in self._tokenizer.added_tokens_decoder.items()}
        style = self._template.reasoning_style
        marks = (*MARKERS, *(style.marks if style is not None else ()))
        return {text: added[text] for text in marks if text in added}

    def answer_text(
        self,
        stops: Sequence[str] = (),
        *,
        continued_ids: Sequence[int] = (),
        shown_ids: Collection[int] = (),
        thoughts: Thoughts | None = None,
    ) -> AnswerText:
        """Begin the text of an answer. `shown_ids` are special tokens whose names are part of it.

        Give the prompt's ids as `continued_ids` when the answer carries on their text: then a leading space
        is part of it, while a fresh answer drops the one that SentencePiece decoding drops.
        """
        shown = {token_id: self.name_of(token_id) for token_id in shown_ids}
        return AnswerText(self._new_decoder(continued_ids), stops, shown, thoughts)

    def _new_decoder(self, context: Sequence[int]) -> TextDecoder:
        if self._token_bytes is not None:
            return ByteDecoder(self._token_bytes, 0 if context else self._token_bytes.strip_spaces)
        silent = special_ids(self._tokenizer)
        return WindowDecoder(partial(decode, self._tokenizer), context[-CONTEXT_IDS:], silent)

    def _find_stop_token_ids(self) -> frozenset[int]:
        own = self._tokenizer.eos_token_id
        stated = self.defaults.stop_token_ids | (frozenset() if own is None else {own})
        return frozenset(stated) | self._template.end_of_turn_ids()


class AnswerText:
    """The text of one answer, as its token ids come: whole characters, up to the first stop string.

    Thoughts before it are told apart; stop strings are not looked for in them.
    """

    def __init__(
        self,
        decoder: TextDecoder,
        stops: Sequence[str] = (),
        shown: Mapping[int, str] | None = None,
        thoughts: Thoughts | None = None,
    ) -> None:
        """`shown`: tokens that the decoder leaves out, with what is their text all the same."""
        self._decoder = decoder
        self._shown = shown or {}
        self._scanner = StopScanner(stops)
        self._splitter = None if thoughts is None else thoughts.splitter()
        self._is_raw = thoughts is not None and thoughts.is_raw
        self._thought: list[str] = []
        self._num_unsure = 0  # tokens that may turn out to belong to a mark before a thought
        self.num_thinking = 0  # tokens of thoughts, their marks included

    @property
    def is_stopped(self) -> bool:
        """True once a stop string was found: the answer ends here, with reason "stop"."""
        return self._scanner.is_stopped

    def push(self, token_id: int) -> str:
        """Take the next generated id and return the text that is final because of it, perhaps ""."""
        text = self._shown.get(token_id) or self._decoder.push(token_id)
        if self._splitter is None:
            return self._scanner.push(text)
        was_thinking = self._splitter.is_thinking
        parts = self._splitter.push(text)
        self._num_unsure += 1
        if was_thinking or self._splitter.is_thinking or any(kind == "thought" for kind, _ in parts):
            self.num_thinking += self._num_unsure
            self._num_unsure = 0
        elif not self._splitter.is_undecided:
            self._num_unsure = 0
        return self._told(parts)

    def finish(self) -> str:
        """Return the text still held back, when the answer ends for another reason than a stop string."""
        rest = "" if self._splitter is None else self._told(self._splitter.finish())
        return rest + self._scanner.finish()

    def take_thought(self) -> str:
        """Return what was thought since this was asked last."""
        thought, self._thought = "".join(self._thought), []
        return thought

    def _told(self, parts: Sequence[Part]) -> str:
        """Keep what is thought, and return what is said; of a raw text all is said."""
        said: list[str] = []
        for kind, text in parts:
            if kind == "answer":
                said.append(self._scanner.push(text))
            elif self._is_raw and not self._scanner.is_stopped:
                said.append(text)
            elif kind == "thought":
                self._thought.append(text)
        return "".join(said)


def age_of(folder: Path) -> int:
    """When the model's files were written, in Unix seconds: what `created` of a model means to clients."""
    config = folder / "config.json"
    return int((config if config.exists() else folder).stat().st_mtime)
