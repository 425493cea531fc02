"""A video pipeline of Wan's shape with random weights, small enough for two cores and as long in tokens as a real one.

Two guidance calls a step, eight blocks of width 384 and 4,032 tokens for `SIZE`. It makes noise: only its time, its
bytes and the equality of what it makes mean anything.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

NUM_BLOCKS, NUM_HEADS, HEAD_SIZE = 8, 6, 64
WIDTH = NUM_HEADS * HEAD_SIZE
TEXT_WIDTH, TEXT_TOKENS = 32, 512
LATENT_CHANNELS = 16
PIXELS_PER_TOKEN, FRAMES_PER_LATENT = 4, 2  # along a side: two of the autoencoder, two of the patches


@dataclass(frozen=True)
class Size:
    """Of a video: pixels of its sides, multiples of 16, and frames, an odd number."""

    height: int
    width: int
    num_frames: int

    @property
    def num_tokens(self) -> int:
        """In the transformer."""
        frames = (self.num_frames - 1) // FRAMES_PER_LATENT + 1
        return frames * (self.height // PIXELS_PER_TOKEN) * (self.width // PIXELS_PER_TOKEN)


SIZE = Size(112, 192, 5)
SMALL = Size(32, 48, 5)  # to try things out


def write_wan_shaped(folder: Path) -> Path:
    """Write the pipeline's folder; the same weights every time."""
    from diffusers import (
        AutoencoderKLWan,
        FlowMatchEulerDiscreteScheduler,
        WanPipeline,
        WanTransformer3DModel,
    )
    from transformers import UMT5Config, UMT5EncoderModel

    quieten()
    tokenizer = _tokenizer()
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(7)
        encoder = UMT5EncoderModel(
            UMT5Config(
                vocab_size=len(tokenizer), d_model=TEXT_WIDTH, d_kv=8, d_ff=48, num_layers=2, num_heads=4
            )
        )
        vae = AutoencoderKLWan(
            base_dim=4,
            z_dim=LATENT_CHANNELS,
            dim_mult=[1, 1],
            num_res_blocks=1,
            temperal_downsample=[True],
            scale_factor_spatial=PIXELS_PER_TOKEN // 2,
            scale_factor_temporal=FRAMES_PER_LATENT,
        )
        transformer = WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=NUM_HEADS,
            attention_head_dim=HEAD_SIZE,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            text_dim=TEXT_WIDTH,
            freq_dim=64,
            ffn_dim=4 * WIDTH,
            num_layers=NUM_BLOCKS,
        )
        _roughen(transformer)
        WanPipeline(
            tokenizer=tokenizer,
            text_encoder=encoder.eval(),
            vae=vae.eval(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
            transformer=transformer.eval(),
        ).save_pretrained(folder)
    return folder


def quieten() -> None:
    """No bars and hints of diffusers and transformers between the figures."""
    import diffusers.utils.logging as diffusers_logging
    import transformers.utils.logging as transformers_logging

    for logging in (diffusers_logging, transformers_logging):
        logging.disable_progress_bar()
        logging.set_verbosity_error()


def load_whole(folder: Path) -> Any:
    """The uncut stock pipeline, weights in memory that torch made: kernels give other bits for odd addresses."""
    from diffusers import DiffusionPipeline

    quieten()
    pipeline = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    for component in pipeline.components.values():
        for parameter in component.parameters() if isinstance(component, nn.Module) else ():
            parameter.data = parameter.data.clone()
    return pipeline


def _tokenizer() -> Any:
    """A token for each letter: what the words are does not matter here."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "</s>", "<unk>", *map(chr, range(ord("a"), ord("z") + 1))]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=TEXT_TOKENS,
    )


def _roughen(model: nn.Module) -> None:
    """Put noise where a fresh model has one constant, so that every part has its say in what comes out."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.randn_like(parameter) * 0.05)
