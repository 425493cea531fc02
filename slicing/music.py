"""What of a music model is no block of its decoder: the text's encoder before it, and the codec behind it.

Both are the stock model's own, loaded without its decoder. Knows no chain, no tokenizer and no song.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutput

from slicing.checkpoint import Checkpoint
from slicing.delay_pattern import Ids, frames_of, places_of
from slicing.errors import ModelError
from slicing.model_kind import ModelKind, kind_of, shape_of
from slicing.model_source import HUB_ID, open_checkpoint
from slicing.progress import Progress, no_progress
from slicing.stacks import CannotCut, build_weightless
from slicing.weights import load_parameters

# Copet et al. 2023, section 3.1: songs of 30 seconds are what the models were trained on. No configuration says so.
TRAINED_S = 30.0
DEFAULT_S = 10.0  # of models that state no length of their own
MAX_TEXT = 512  # tokens, where the tokenizer does not say what its encoder takes: T5's own


@dataclass(frozen=True)
class SongForm:
    """The sizes of a model's songs: frames of codes, places of the delay pattern, samples."""

    num_streams: int
    channels: int
    vocab_size: int  # of a stream; drawn ids lie below it
    pad_id: int  # stands first, and where the delay pattern leaves nothing to draw
    eos_ids: frozenset[int]  # usually none: a song ends where it was told to
    max_places: int
    default_places: int
    max_text: int  # tokens of a prompt
    frame_rate: float  # frames per second
    rate: int  # samples per second

    def max_frames_in(self, max_places: int) -> int:
        """The longest song over so many places: as long as those the model knows, where places reach so far."""
        most = frames_of(min(max_places, self.max_places), self.num_streams, self.channels)
        return min(most, round(TRAINED_S * self.frame_rate))

    def frames_in(self, seconds: float) -> int:
        """Frames of a song of this length, at least one."""
        return max(1, round(seconds * self.frame_rate))

    def places_in(self, num_frames: int) -> int:
        """Places that so many frames take."""
        return places_of(num_frames, self.num_streams, self.channels)

    @property
    def default_frames(self) -> int:
        """Frames of a song whose length nobody says."""
        return max(1, frames_of(self.default_places, self.num_streams, self.channels))


class MusicHome:
    """A music model without its decoder, ready to run; one thread at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        form: SongForm,
        defaults: GenerationConfig,
    ) -> None:
        """Take over a model of which all but decoder and sound encoder holds weights."""
        self.form = form
        self.defaults = defaults
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # a tokenizer keeps settings between calls
        self._model = cast("Any", model)  # its parts are modules by name
        self._model.decoder = _Catcher(self._model.decoder.config)
        self._codec = self._model.audio_encoder
        self._codec.encoder = None
        _renew_flat_weights(model)

    def token_ids(self, text: str) -> list[int]:
        """A prompt as its encoder reads it, from any thread."""
        with self._lock:
            return list(self._tokenizer(text)["input_ids"])

    @torch.inference_mode()
    def encode(self, token_ids: Sequence[int], *, branches: int) -> torch.Tensor:
        """What the decoder's blocks attend to for a text. [tokens * branches, hidden], branch-minor.

        With two branches the second is guidance's unconditional one: what stock `generate` makes of no text at all.
        """
        ids = torch.tensor([list(token_ids)], device=self._model.device)
        mask = torch.ones_like(ids)
        read = self._model.text_encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        if branches == 2:
            read = torch.cat([read, torch.zeros_like(read)])
            mask = torch.cat([mask, torch.zeros_like(mask)])
        states = self._states(BaseModelOutput(last_hidden_state=read), mask)
        return states.transpose(0, 1).reshape(-1, states.shape[-1])

    @torch.inference_mode()
    def decode(self, codes: Ids) -> npt.NDArray[np.float32]:
        """The samples of codes [streams, frames]. [channels, samples]"""
        batch = torch.from_numpy(codes).to(self._model.device)[None, None]  # [chunks, songs, streams, frames]
        channels = self.form.channels
        sides = [
            self._codec.decode(batch[:, :, side::channels], audio_scales=[None]).audio_values
            for side in range(channels)
        ]
        samples: npt.NDArray[np.float32] = torch.cat(sides, dim=1)[0].float().cpu().numpy()
        return samples

    def _states(self, read: BaseModelOutput, mask: torch.Tensor) -> torch.Tensor:
        """Run the stock forward up to its decoder. [branches, tokens, hidden]"""
        first = torch.full((len(mask) * self.form.num_streams, 1), self.form.pad_id, device=mask.device)
        try:
            self._model(encoder_outputs=read, attention_mask=mask, decoder_input_ids=first)
        except _Caught as caught:
            return caught.states
        raise AssertionError("the forward ended without its decoder")


def load_home(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress = no_progress,
) -> MusicHome:
    """Load text encoder, projection and the codec's decoder, nothing else. Raises CannotCut and ModelError."""
    defaults = _generation_config(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(
        str(checkpoint.folder), local_files_only=True, trust_remote_code=False
    )
    form = song_form(checkpoint, defaults, tokenizer)
    model = build_weightless(checkpoint.config, dtype)
    load_parameters(checkpoint, model, _is_at_home, dtype=dtype, device=device, progress=progress)
    for name, buffer in list(model.named_non_persistent_buffers()):
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path)._buffers[leaf] = buffer.to(device)
    return MusicHome(model, tokenizer, form, defaults)


def is_music(model: str) -> bool:
    """Whether what the user named makes music of tokens; false where it cannot be told. May fetch a configuration."""
    folder = Path(model).expanduser()
    if not ((folder / "config.json").is_file() or HUB_ID.fullmatch(model)):
        return False
    try:
        return kind_of(open_checkpoint(model).config) is ModelKind.MUSIC
    except (ModelError, AttributeError, TypeError):
        return False


def song_form(checkpoint: Checkpoint, own: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> SongForm:
    """Read the sizes of a model's songs. Raises CannotCut for one whose decoder is conditioned otherwise."""
    config, shape = checkpoint.config, shape_of(checkpoint.config)
    if hasattr(config, "chroma_length"):
        raise CannotCut(
            f"{config.model_type} puts its conditions before the song instead of attending to them, "
            "which is not supported; MusicGen models without melody are"
        )
    decoder, codec = config.decoder, config.audio_encoder
    channels = int(getattr(decoder, "audio_channels", 1))
    pad_id = own.decoder_start_token_id if own.decoder_start_token_id is not None else decoder.pad_token_id
    eos = own.eos_token_id
    frame_rate = codec.sampling_rate / codec.hop_length
    stated = own.max_length
    return SongForm(
        num_streams=shape.num_streams,
        channels=channels,
        vocab_size=shape.vocab_size,
        pad_id=int(pad_id),
        eos_ids=frozenset([eos] if isinstance(eos, int) else eos or ()),
        max_places=shape.max_positions,
        default_places=int(stated) if stated else int(DEFAULT_S * frame_rate),
        max_text=min(tokenizer.model_max_length, MAX_TEXT),
        frame_rate=frame_rate,
        rate=int(codec.sampling_rate),
    )


def _generation_config(checkpoint: Checkpoint) -> GenerationConfig:
    if (checkpoint.folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(str(checkpoint.folder), local_files_only=True)
    return GenerationConfig.from_model_config(checkpoint.config)


def _is_at_home(name: str) -> bool:
    """Whether a tensor is read: neither the decoder's, nor what only encoding or training a codec uses."""
    if name.startswith(("decoder.", "audio_encoder.encoder.")):
        return False
    return not name.endswith((".codebook.cluster_size", ".codebook.embed_avg", ".codebook.inited"))


def _renew_flat_weights(model: nn.Module) -> None:
    """Recurrent layers hold their weights a second time, in a list: let it be those that were loaded."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()


class _Caught(Exception):
    """The decoder was reached."""

    def __init__(self, states: torch.Tensor) -> None:
        super().__init__()
        self.states = states


class _Catcher(nn.Module):
    """Stands in for the decoder; takes what its blocks attend to, and ends the forward."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, *, encoder_hidden_states: torch.Tensor, **others: Any) -> NoReturn:
        raise _Caught(encoder_hidden_states)
