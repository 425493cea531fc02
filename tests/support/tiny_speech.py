"""A tiny random Whisper with the files that a speech engine reads, and the uncut model as a decoder of windows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from app.engine.speech import Segment, WindowDone
from app.engine.speech_features import SpeechFeatures
from app.engine.speech_tokens import SpeechTokens
from app.engine.speech_windows import Decoded, Windows, Wishes
from app.engine.tokenizer import ChatTokenizer
from slicing.sampler import Sampler, SamplingParams, raw_logprobs
from tests.support.tiny_tokenizer import write_tiny_tokenizer

NUM_LAYERS = 4
RATE = 16_000
WINDOW_S = 1
NUM_PLACES = 50  # of the encoder, 20 ms each
MAX_POSITIONS = 28
NUM_MELS = 8
END, START, FIRST_LANGUAGE, TRANSLATE, TRANSCRIBE, BEFORE, NO_SPEECH, NO_TIMES = (
    300,
    301,
    302,
    *range(306, 311),
)
FIRST_TIME = NO_TIMES + 1
VOCAB_SIZE = FIRST_TIME + NUM_PLACES + 1
LANGUAGES = ("en", "fr", "de", "es")


def tiny_whisper(seed: int = 1) -> WhisperForConditionalGeneration:
    """The same at each call; its answers end by themselves, repeat themselves, and are doubted."""
    torch.manual_seed(seed)
    config = WhisperConfig(
        vocab_size=VOCAB_SIZE,
        d_model=32,
        encoder_layers=2,
        decoder_layers=NUM_LAYERS,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=NUM_MELS,
        max_source_positions=NUM_PLACES,
        max_target_positions=MAX_POSITIONS,
        pad_token_id=END,
        bos_token_id=END,
        eos_token_id=END,
        decoder_start_token_id=START,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.5 if "embed" in name else 0.3)
    return model


def save_speech(
    model: WhisperForConditionalGeneration, folder: Path, *, is_multilingual: bool = False
) -> Path:
    """Write a folder that loads as a speech model."""
    write_tiny_tokenizer(folder, template=None)
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=NUM_MELS, chunk_length=WINDOW_S).save_pretrained(folder)
    stated: dict[str, Any] = {
        "decoder_start_token_id": START,
        "eos_token_id": END,
        "prev_sot_token_id": BEFORE,
        "no_timestamps_token_id": NO_TIMES,
        "suppress_tokens": [1, 2, 5, START, BEFORE, NO_SPEECH, *range(FIRST_LANGUAGE, BEFORE)],
        "begin_suppress_tokens": [9, END],
        "max_initial_timestamp_index": 10,
        "is_multilingual": is_multilingual,
    }
    if is_multilingual:
        stated["lang_to_id"] = {f"<|{code}|>": FIRST_LANGUAGE + place for place, code in enumerate(LANGUAGES)}
        stated["task_to_id"] = {"translate": TRANSLATE, "transcribe": TRANSCRIBE}
    (folder / "generation_config.json").write_text(json.dumps(stated))
    return folder


def noise(seconds: float, seed: int = 0) -> np.ndarray:
    """Samples that change from moment to moment."""
    generator = np.random.default_rng(seed)
    length = round(seconds * RATE)
    loudness = np.repeat(generator.random(-(-length // 1600)), 1600)[:length]
    return (generator.standard_normal(length) * loudness * 0.1).astype(np.float32)


@dataclass
class WholeDecoder:
    """A `WindowDecoder` over the uncut stock model with its own cache."""

    model: WhisperForConditionalGeneration
    end: int = END
    knows_logprobs: bool = True
    num_windows: int = 0

    @torch.inference_mode()
    async def encode(self, features: torch.Tensor) -> torch.Tensor:
        self.num_windows += 1
        states: torch.Tensor = self.model.model.encoder(features).last_hidden_state[0]
        return states

    @torch.inference_mode()
    async def decode(
        self,
        memory: torch.Tensor,
        prompt_ids: tuple[int, ...],
        sampling: SamplingParams,
        max_tokens: int,
        watched_ids: tuple[int, ...],
    ) -> Decoded:
        sampler = Sampler(sampling, self.model.config.vocab_size, prompt_ids)
        states, told = BaseModelOutput(memory[None]), list(prompt_ids)
        ids: list[int] = []
        logprobs: list[float] = []
        watched: tuple[float, ...] = ()
        cache = None
        while len(ids) < max_tokens and (not ids or ids[-1] != self.end):
            made = self.model.model(
                encoder_outputs=states, decoder_input_ids=torch.tensor([told]), cache=cache, use_cache=True
            )
            cache, last = made.cache, made.last_hidden_state[:, -1:]  # the head takes one row, as over nodes
            logits = self.model.proj_out(last)[0, 0]
            watched = watched or raw_logprobs(logits, watched_ids)
            drawn = sampler.sample(logits, len(prompt_ids) + len(ids))
            logprobs.append(sampler.logprob(logits, drawn))
            sampler.observe(drawn)
            ids.append(drawn)
            told = [drawn]
        return Decoded(tuple(ids), *((tuple(logprobs), watched) if self.knows_logprobs else ()))


@dataclass
class WholeSpeech:
    """The uncut model under the algorithm of windows, from a folder."""

    folder: Path
    model: WhisperForConditionalGeneration

    def __post_init__(self) -> None:
        self.features = SpeechFeatures.load(self.folder)
        self.tokens = SpeechTokens.read(self.folder)
        self.tokenizer = ChatTokenizer.load(self.folder)

    async def windows(
        self, samples: np.ndarray, *, knows_logprobs: bool = True, prompt: str = "", **wishes: Any
    ) -> list[WindowDone]:
        """What it makes of a recording."""
        config = self.model.config
        prompt_ids = tuple(self.tokenizer.encode(" " + prompt)) if prompt else ()
        heard = Windows(
            samples,
            Wishes(prompt_ids=prompt_ids, **wishes),
            self.tokens,
            self.features,
            WholeDecoder(self.model, self.tokens.end, knows_logprobs),
            read=self.tokenizer.decode,
            max_positions=config.max_target_positions,
            stride=self.features.window_frames // config.max_source_positions,
        )
        return [window async for window in heard.heard()]

    async def segments(self, samples: np.ndarray, **wishes: Any) -> tuple[Segment, ...]:
        windows = await self.windows(samples, **wishes)
        return tuple(segment for window in windows for segment in window.segments)
