"""Text to text with an encoder and a decoder (T5, Bart): the prompt is encoded at home, the decoder writes the answer.

The encoder's states go to the nodes with the session, once; from there on it is an answer like any other (`text`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig

from app.engine.at_home import run_at_home
from app.engine.opened import Opened
from app.engine.over_text import OverText
from app.engine.request import (
    Admitted,
    EncodedPrompt,
    Finished,
    GenerationEvent,
    GenerationRequest,
    PrefillProgress,
    RequestError,
)
from app.engine.text import ChainTextEngine
from slicing.encoder import Encoder
from slicing.errors import ModelError

# Every token sees every other at once: 4096 of them take 0.5 GB a layer with the 8 heads of a small T5, in float32.
MAX_SOURCE = 4096


def new_engine(opened: Opened) -> Seq2SeqEngine:
    """The engine of an opened model. Raises ModelError where nothing says how an answer begins."""
    checkpoint = opened.found.checkpoint
    start_ids = start_ids_of(checkpoint.folder, checkpoint.config)
    return Seq2SeqEngine(opened.new_text_engine(), opened.home, opened.encoding, start_ids)


class Seq2SeqEngine(OverText):
    """A TextEngine whose prompts an encoder reads. `start_ids` are what every answer of the decoder begins with."""

    def __init__(
        self, text: ChainTextEngine, encoder: Encoder, encoding: Executor, start_ids: tuple[int, ...]
    ) -> None:
        super().__init__(text)
        self._encoder = encoder
        self._encoding = encoding
        self._start_ids = start_ids
        self._max_source = min(text.max_positions, MAX_SOURCE)
        self.num_running = 0  # answers

    @property
    def max_positions(self) -> int:
        """Of a prompt."""
        return self._max_source

    def answer_room(self, prompt_tokens: int) -> int:
        """A prompt takes no room in the decoder."""
        fits = prompt_tokens <= self._max_source
        return self._text.answer_room(len(self._start_ids)) if fits else 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        self._check(request)
        self.num_running += 1
        try:
            inner = await self._encoded(request)
            num_tokens = len(request.prompt_ids)
            async with aclosing(self._text.generate(inner)) as events:
                async for event in events:
                    match event:
                        case Admitted() | Finished():
                            yield replace(event, prompt_tokens=num_tokens)
                        case PrefillProgress():
                            yield PrefillProgress(num_tokens, num_tokens)
                        case _:
                            yield event
        finally:
            self.num_running -= 1

    async def _encoded(self, request: GenerationRequest) -> GenerationRequest:
        """The request as the decoder takes it. Raises WorkError DEADLINE."""
        began = time.perf_counter()
        run = partial(self._encoder.run, input_ids=torch.tensor([request.prompt_ids]))
        memory = await run_at_home(self._encoding, run, deadline_s=request.deadline_s)
        left_s = None
        if request.deadline_s is not None:
            left_s = max(0.0, request.deadline_s - (time.perf_counter() - began))
        return replace(
            request,
            prompt_ids=self._start_ids,
            encoded=EncodedPrompt(memory=memory),
            continues_text=False,
            deadline_s=left_s,
        )

    def _check(self, request: GenerationRequest) -> None:
        """Refuse what the encoder cannot read. Raises RequestError."""
        if not request.prompt_ids:
            raise RequestError("messages", "invalid_value", "the prompt holds no tokens")
        if request.scores_prompt:
            text = "the prompt is read by an encoder, which predicts none of its tokens"
            raise RequestError("echo", "unsupported_parameter", text)
        if len(request.prompt_ids) > self._max_source:
            text = f"the prompt has {len(request.prompt_ids)} tokens, the model takes {self._max_source}"
            raise RequestError("messages", "context_length_exceeded", text)
        if max(request.prompt_ids) >= self.vocab_size or min(request.prompt_ids) < 0:
            text = "the prompt holds a token that the model does not know"
            raise RequestError("messages", "invalid_value", text)


def start_ids_of(folder: Path, config: PretrainedConfig) -> tuple[int, ...]:
    """What an answer begins with: the start token, and the one that some models force behind it. Raises ModelError."""
    try:
        stated = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    except OSError:
        stated = GenerationConfig.from_model_config(config)
    start = _first(stated.decoder_start_token_id, config, "decoder_start_token_id", stated.bos_token_id)
    forced = _first(stated.forced_bos_token_id, config, "forced_bos_token_id")
    if start is None:
        raise ModelError(
            "neither config.json nor generation_config.json says which token an answer begins with"
        )
    return (start,) if forced is None else (start, forced)


def _first(stated: Any, config: PretrainedConfig, name: str, default: Any = None) -> int | None:
    """The first of them that is a token's id."""
    values = (stated, getattr(config, name, None), default)
    return next((value for value in values if isinstance(value, int)), None)
