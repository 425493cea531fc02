"""Makes prompts of chats that hold pictures and recordings, with the parts of a model that are at home.

Its pictures and samples are decoded already; it knows no HTTP, no nodes and no answers.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import jinja2

from app.engine.chat_template import MEDIA_PARTS, ChatTemplate, Message, complaint
from app.engine.request import EncodedPrompt, Modality, RequestError
from slicing.block_slice import Cancelled
from slicing.multimodal import HomeEncoders, render
from slicing.processors import recording_part

USUAL_RATE = 16_000  # Hz, where no recordings are taken
WHY_NOT: Mapping[str, str] = {
    "image": "it has no encoder of pictures",
    "audio": "it has no encoder of sounds",
}

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A chat as the model's processor reads it; `inputs` is what its encoders take, None for text alone."""

    prompt_ids: tuple[int, ...] = field(repr=False)
    inputs: Mapping[str, Any] | None = field(default=None, repr=False)


class PromptReader:
    """Makes prompts of chats with the parts of a model that are at home. `encoding` is one thread."""

    def __init__(self, home: HomeEncoders, encoding: Executor, *, is_thin: bool = False) -> None:
        self._home = home
        self._encoding = encoding
        self._is_thin = is_thin
        self._lock = threading.Lock()  # tokenizers keep settings between calls
        self._template: ChatTemplate | None = None
        self.sampling_rate = USUAL_RATE
        self.max_recording_s = home.max_recording_s
        if home.processor is not None:
            home.processor.tokenizer.chat_template = home.processor.chat_template
            self._template = ChatTemplate(home.processor.tokenizer)
            self.sampling_rate = int(getattr(recording_part(home.processor), "sampling_rate", USUAL_RATE))

    @property
    def renders(self) -> bool:
        """Whether it reads chats at all; otherwise the tokenizer does."""
        return self._template is not None

    def why_not(self, sense: Modality) -> str:
        """Return why the model takes no such part; "": it does."""
        if sense not in self._home.reasons:
            return WHY_NOT[sense]
        if self._is_thin:
            return "that needs its first layers at home (--ends local)"
        return self._home.reasons[sense]

    async def read(
        self,
        messages: Sequence[Message],
        *,
        continue_final: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> ReadPrompt:
        """Render messages, with pictures (RGB) and samples in their parts, to token ids and encoder inputs.

        Raises `RequestError` when the template or the processor refuses them.
        """
        run = partial(self._read, messages, continue_final, variables)
        if not any(map(_has_media, messages)):
            return await asyncio.to_thread(run)
        return await self._run(lambda stop: run())

    async def encode(self, prompt: ReadPrompt) -> EncodedPrompt | None:
        """Run the encoders over what `read` made; None for text alone. A cancelled caller stops them."""
        if prompt.inputs is None:
            return None
        return await self._run(partial(self._encode, prompt.inputs))

    async def _run(self, job: Callable[[threading.Event], Made]) -> Made:
        """Run a job in the thread for encoders; one whose caller has left ends early, or is not begun."""
        stop = threading.Event()

        def unless_stopped() -> Made:
            if stop.is_set():
                raise Cancelled
            return job(stop)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._encoding, unless_stopped)
        except asyncio.CancelledError:
            stop.set()
            raise

    def _read(
        self, messages: Sequence[Message], continue_final: bool, variables: Mapping[str, Any] | None
    ) -> ReadPrompt:
        assert self._template is not None
        assert self._home.processor is not None
        prepared, variables = self._template.told(
            [self._template.prepare(message) for message in messages], variables or {}
        )
        if not self._home.sanitizes:
            self._refuse_control_tokens([prepared, variables])
        try:
            with self._lock:
                made = render(
                    self._home.processor,
                    prepared,
                    continue_final=continue_final,
                    variables=variables,
                    sanitizes=self._home.sanitizes,
                )
        except jinja2.TemplateError as error:
            raise RequestError("messages", "invalid_messages", complaint(error)) from None
        except Exception as error:  # foreign code over foreign messages: whatever it does is a refusal
            has_media = any(map(_has_media, messages))
            text = "the model's processor cannot take these pictures or recordings"
            raise RequestError(
                "messages", "invalid_messages", text if has_media else complaint(error)
            ) from None
        inputs = dict(made) if any(map(_has_media, messages)) else None
        return ReadPrompt(tuple(made["input_ids"][0].tolist()), inputs)

    def _refuse_control_tokens(self, told: Any) -> None:
        """Refuse what the processor cannot write as plain text. Raises `RequestError`."""
        assert self._home.processor is not None
        tokens = {token.content for token in self._home.processor.tokenizer.added_tokens_decoder.values()}
        if any(token in text for text in _texts(told) for token in tokens if token.strip()):
            text = "a message holds a control token of the model, which cannot be written as plain text"
            raise RequestError("messages", "invalid_messages", text)

    def _encode(self, inputs: Mapping[str, Any], stop: threading.Event) -> EncodedPrompt:
        assert self._home.merger is not None
        merged = self._home.merger.merge(inputs, stop.is_set)
        return EncodedPrompt(
            embeds=merged.embeds,
            places=merged.places,
            next_place=merged.next_place if merged.places is not None else None,
            digests=merged.digests(),
        )


def _has_media(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(part.get("type") in MEDIA_PARTS for part in content)


def _texts(told: Any) -> Iterator[str]:
    """Yield every text in messages, wherever it stands."""
    match told:
        case str():
            yield told
        case Mapping():
            for key, value in told.items():
                yield from _texts(key)
                yield from _texts(value)
        case list() | tuple():
            for value in told:
                yield from _texts(value)
