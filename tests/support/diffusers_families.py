"""Tiny configurations and inputs of many diffusion transformers: the stock classes at small sizes.

A table, and a way to make a model of each with random weights; knows nothing of slicing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

NUM_BLOCKS = 4
NOISE = 0.05  # added to every weight: what starts at 0 or 1 (gates, norms, biases) must count as well
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
WIDTH = 32
TEXT = 24  # width of text embeddings, unlike any other width
TOKENS = 5  # of text
AXES = (4, 6, 6)  # of rotary positions, together a head


@dataclass(frozen=True)
class Family:
    """One model class: its settings, what one call of it takes, and what is expected of cutting it."""

    model_class: str
    settings: dict[str, Any]
    inputs: Callable[[Inputs], dict[str, Any]]
    refused: str | None = None  # part of the text with which it must be refused; None: it must be equal


class Inputs:
    """Draws random tensors, the same ones every time."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def noise(self, *shape: int) -> torch.Tensor:
        """Return normal numbers of this shape."""
        return torch.randn(shape, generator=self._generator)

    def whole(self, end: int, *shape: int) -> torch.Tensor:
        """Return whole numbers below `end`."""
        return torch.randint(end, shape, generator=self._generator)

    def text(self, batch: int = 1) -> torch.Tensor:
        """Return text embeddings [batch, 5, 24]."""
        return self.noise(batch, TOKENS, TEXT)

    def grid(self, frames: int, height: int, width: int) -> torch.Tensor:
        """Return the place [tokens, 3] of every token of a grid."""
        return torch.cartesian_prod(*(torch.arange(n, dtype=torch.float32) for n in (frames, height, width)))


def t(value: float = 500.0, batch: int = 1) -> torch.Tensor:
    """Return the time of a batch."""
    return torch.full((batch,), value)


_WAN = HEADS | {
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": TEXT,
    "freq_dim": 16,
    "ffn_dim": 48,
    "num_layers": NUM_BLOCKS,
    "rope_max_seq_len": 32,
}


def _video(draw: Inputs) -> dict[str, Any]:
    return {"hidden_states": draw.noise(1, 4, 2, 8, 8), "timestep": t(), "encoder_hidden_states": draw.text()}


def _anyflow(draw: Inputs) -> dict[str, Any]:
    return _video(draw) | {
        "hidden_states": draw.noise(1, 2, 4, 8, 8),
        "timestep": t().expand(1, 2),
        "r_timestep": t(300.0).expand(1, 2),
    }


_FLUX = HEADS | {
    "in_channels": 4,
    "num_layers": NUM_BLOCKS,
    "num_single_layers": NUM_BLOCKS,
    "joint_attention_dim": TEXT,
    "axes_dims_rope": list(AXES),
}


def _flux(draw: Inputs, time: float = 0.5, axes: int = 3, **others: Any) -> dict[str, Any]:
    ids = draw.grid(1, 4, 4)
    if axes == 4:
        ids = torch.cat([ids, torch.zeros(len(ids), 1)], 1)
    return {
        "hidden_states": draw.noise(1, 16, 4),
        "encoder_hidden_states": draw.text(),
        "timestep": t(time),
        "img_ids": ids,
        "txt_ids": torch.zeros(TOKENS, axes),
    } | others


def _picture(draw: Inputs, channels: int = 4, **others: Any) -> dict[str, Any]:
    return {
        "hidden_states": draw.noise(2, channels, 8, 8),
        "encoder_hidden_states": draw.text(2),
        "timestep": t(batch=2),
    } | others


_COGVIEW = HEADS | {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": NUM_BLOCKS,
    "text_embed_dim": TEXT,
    "time_embed_dim": 16,
    "condition_dim": 8,
    "pos_embed_max_size": 8,
    "sample_size": 8,
}


def _cogview(draw: Inputs) -> dict[str, Any]:
    size = torch.tensor([[8, 8], [8, 8]])
    return _picture(draw, original_size=size, target_size=size, crop_coords=torch.zeros_like(size))


_HUNYUAN = HEADS | {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": NUM_BLOCKS,
    "num_single_layers": NUM_BLOCKS,
    "num_refiner_layers": 2,
    "patch_size": 2,
    "text_embed_dim": TEXT,
    "pooled_projection_dim": 8,
    "rope_axes_dim": AXES,
}


def _hunyuan(draw: Inputs) -> dict[str, Any]:
    mask = torch.ones(1, TOKENS, dtype=torch.int64)
    mask[0, -2:] = 0
    return _video(draw) | {
        "encoder_attention_mask": mask,
        "pooled_projections": draw.noise(1, 8),
        "guidance": t(1000.0),
    }


_SANA = HEADS | {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": NUM_BLOCKS,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 16,
    "cross_attention_dim": WIDTH,
    "caption_channels": TEXT,
    "sample_size": 8,
}
_JOY = {
    "in_channels": 4,
    "hidden_size": WIDTH,
    "num_attention_heads": 2,
    "text_dim": TEXT,
    "num_layers": NUM_BLOCKS,
    "rope_dim_list": list(AXES),
}


def _allegro_rotary(draw: Inputs) -> tuple[Any, Any]:
    grid = draw.grid(2, 4, 4).long()
    tables = tuple((draw.noise(4, 8), draw.noise(4, 8)) for _ in range(3))
    return tables, tuple(grid[None, :, axis] for axis in range(3))


def _wan_animate_2(draw: Inputs) -> dict[str, Any]:
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    size = torch.tensor([[1, 4, 4]])
    return {
        "hidden_states": [draw.noise(4, 1, 8, 8)],
        "condition_latents": [draw.noise(4, 1, 8, 8)],
        "timestep": t(),
        "encoder_hidden_states": [draw.noise(TOKENS, TEXT)],
        "kv_cache": WanAnimate2KVCache(NUM_BLOCKS),
        "kv_cache_mode": "extract",
        "seq_len": 16,
        "offset_grid_sizes": size,
    }


FAMILIES: dict[str, Family] = {
    family.model_class.removesuffix("Model"): family
    for family in (
        Family("WanTransformer3DModel", _WAN, _video),
        Family("ChronoEditTransformer3DModel", _WAN, _video),
        Family("SkyReelsV2Transformer3DModel", _WAN, _video),
        Family("AnyFlowTransformer3DModel", _WAN, lambda draw: _anyflow(draw)),
        Family(
            "HeliosTransformer3DModel",
            {key: value for key, value in _WAN.items() if key != "rope_max_seq_len"} | {"rope_dim": AXES},
            lambda draw: (
                _video(draw)
                | {
                    "indices_hidden_states": torch.arange(2)[None],
                    "indices_latents_history_short": torch.arange(1)[None],
                    "indices_latents_history_mid": torch.arange(2)[None],
                    "indices_latents_history_long": torch.arange(4)[None],
                    "latents_history_short": draw.noise(1, 4, 1, 8, 8),
                    "latents_history_mid": draw.noise(1, 4, 2, 8, 8),
                    "latents_history_long": draw.noise(1, 4, 4, 8, 8),
                }
            ),
        ),
        Family(
            "PixArtTransformer2DModel",
            HEADS
            | {
                "num_layers": NUM_BLOCKS,
                "cross_attention_dim": WIDTH,
                "caption_channels": TEXT,
                "sample_size": 8,
                "norm_num_groups": 1,
                "use_additional_conditions": False,
            },
            lambda draw: _picture(draw, added_cond_kwargs={"resolution": None, "aspect_ratio": None}),
        ),
        Family(
            "DiTTransformer2DModel",
            HEADS
            | {"num_layers": NUM_BLOCKS, "sample_size": 8, "norm_num_groups": 1, "num_embeds_ada_norm": 16},
            lambda draw: {
                "hidden_states": draw.noise(2, 4, 8, 8),
                "timestep": t(batch=2),
                "class_labels": draw.whole(16, 2),
            },
        ),
        Family(
            "FluxTransformer2DModel",
            _FLUX | {"pooled_projection_dim": 8, "guidance_embeds": True},
            lambda draw: _flux(draw, pooled_projections=draw.noise(1, 8), guidance=t(3.5)),
        ),
        Family("BriaTransformer2DModel", _FLUX, lambda draw: _flux(draw, 500.0)),
        Family("LongCatImageTransformer2DModel", _FLUX | {"pooled_projection_dim": 8}, _flux),
        Family("OvisImageTransformer2DModel", _FLUX | {"out_channels": 4}, _flux),
        Family(
            "Flux2Transformer2DModel",
            _FLUX | {"axes_dims_rope": [4, 4, 4, 4], "timestep_guidance_channels": 16},
            lambda draw: _flux(draw, axes=4, guidance=t(3.5)),
        ),
        Family(
            "SD3Transformer2DModel",
            HEADS
            | {
                "sample_size": 8,
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": NUM_BLOCKS,
                "joint_attention_dim": TEXT,
                "caption_projection_dim": WIDTH,
                "pooled_projection_dim": 8,
                "pos_embed_max_size": 8,
                "dual_attention_layers": (0, 1),
                "qk_norm": "rms_norm",
            },
            lambda draw: _picture(draw, pooled_projections=draw.noise(2, 8)),
        ),
        Family(
            "AuraFlowTransformer2DModel",
            HEADS
            | {
                "sample_size": 8,
                "num_mmdit_layers": NUM_BLOCKS,
                "num_single_dit_layers": NUM_BLOCKS,
                "joint_attention_dim": TEXT,
                "caption_projection_dim": WIDTH,
                "pos_embed_max_size": 64,
            },
            lambda draw: _picture(draw) | {"timestep": t(0.5, 2)},
        ),
        Family(
            "ChromaTransformer2DModel",
            _FLUX | {"approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1},
            lambda draw: _flux(draw, attention_mask=None),
        ),
        Family(
            "CogVideoXTransformer3DModel",
            HEADS
            | {
                "in_channels": 4,
                "out_channels": 4,
                "time_embed_dim": 16,
                "text_embed_dim": TEXT,
                "num_layers": NUM_BLOCKS,
                "sample_width": 8,
                "sample_height": 8,
                "sample_frames": 5,
                "max_text_seq_length": TOKENS,
            },
            lambda draw: _picture(draw) | {"hidden_states": draw.noise(2, 2, 4, 8, 8)},
        ),
        Family(
            "CogView3PlusTransformer2DModel",
            _COGVIEW,
            _cogview,
        ),
        Family("CogView4Transformer2DModel", _COGVIEW | {"rope_axes_dim": (8, 8)}, _cogview),
        Family(
            "EasyAnimateTransformer3DModel",
            HEADS
            | {
                "in_channels": 4,
                "out_channels": 4,
                "patch_size": 2,
                "num_layers": NUM_BLOCKS,
                "mmdit_layers": 2,
                "time_embed_dim": 16,
                "text_embed_dim": TEXT,
            },
            _video,
        ),
        Family(
            "GlmImageTransformer2DModel",
            {
                key: value
                for key, value in _COGVIEW.items()
                if key not in ("pos_embed_max_size", "sample_size")
            }
            | {"prior_vq_quantizer_codebook_size": 32},
            lambda draw: _picture(
                draw,
                prior_token_id=draw.whole(32, 2, 16),
                prior_token_drop=torch.zeros(2, 16, dtype=torch.bool),
                target_size=torch.tensor([[8.0, 8.0]] * 2),
                crop_coords=torch.zeros(2, 2),
            ),
        ),
        Family(
            "MochiTransformer3DModel",
            HEADS
            | {
                "num_layers": NUM_BLOCKS,
                "pooled_projection_dim": 16,
                "in_channels": 4,
                "text_embed_dim": TEXT,
                "time_embed_dim": 16,
                "max_sequence_length": TOKENS,
            },
            lambda draw: _video(draw) | {"encoder_attention_mask": torch.ones(1, TOKENS, dtype=torch.bool)},
        ),
        Family(
            "LTXVideoTransformer3DModel",
            HEADS
            | {
                "in_channels": 4,
                "out_channels": 4,
                "cross_attention_dim": WIDTH,
                "num_layers": NUM_BLOCKS,
                "caption_channels": TEXT,
            },
            lambda draw: {
                "hidden_states": draw.noise(2, 32, 4),
                "encoder_hidden_states": draw.text(2),
                "timestep": t(batch=2),
                "encoder_attention_mask": torch.ones(2, TOKENS),
                "num_frames": 2,
                "height": 4,
                "width": 4,
            },
        ),
        Family(
            "LTX2VideoTransformer3DModel",
            HEADS
            | {
                "in_channels": 4,
                "out_channels": 4,
                "cross_attention_dim": WIDTH,
                "audio_in_channels": 4,
                "audio_out_channels": 4,
                "audio_num_attention_heads": 2,
                "audio_attention_head_dim": 8,
                "audio_cross_attention_dim": 16,
                "num_layers": NUM_BLOCKS,
                "caption_channels": TEXT,
                "rope_double_precision": False,
            },
            lambda draw: {
                "hidden_states": draw.noise(1, 32, 4),
                "audio_hidden_states": draw.noise(1, 3, 4),
                "encoder_hidden_states": draw.text(),
                "audio_encoder_hidden_states": draw.text(),
                "timestep": t(),
                "encoder_attention_mask": torch.ones(1, TOKENS),
                "audio_encoder_attention_mask": torch.ones(1, TOKENS),
                "num_frames": 2,
                "height": 4,
                "width": 4,
                "fps": 25.0,
                "audio_num_frames": 3,
            },
        ),
        Family("HunyuanVideoTransformer3DModel", _HUNYUAN, _hunyuan),
        Family(
            "HunyuanVideo15Transformer3DModel",
            {
                key: value
                for key, value in _HUNYUAN.items()
                if key not in ("num_single_layers", "pooled_projection_dim")
            }
            | {"text_embed_2_dim": 12, "image_embed_dim": 10, "target_size": 16, "task_type": "t2v"},
            lambda draw: {
                "hidden_states": draw.noise(1, 4, 2, 8, 8),
                "timestep": t(),
                "encoder_hidden_states": draw.text(),
                "encoder_attention_mask": torch.ones(1, TOKENS),
                "encoder_hidden_states_2": draw.noise(1, 3, 12),
                "encoder_attention_mask_2": torch.ones(1, 3),
                "image_embeds": torch.zeros(1, 2, 10),
            },
        ),
        Family(
            "HunyuanVideoFramepackTransformer3DModel",
            _HUNYUAN | {"has_image_proj": True, "image_proj_dim": 10, "has_clean_x_embedder": True},
            lambda draw: (
                _hunyuan(draw)
                | {
                    "image_embeds": draw.noise(1, 3, 10),
                    "indices_latents": torch.arange(2),
                    "latents_clean": draw.noise(1, 4, 2, 8, 8),
                    "indices_latents_clean": torch.arange(2),
                    "latents_history_2x": draw.noise(1, 4, 2, 8, 8),
                    "indices_latents_history_2x": torch.arange(2),
                    "latents_history_4x": draw.noise(1, 4, 4, 8, 8),
                    "indices_latents_history_4x": torch.arange(4),
                }
            ),
        ),
        Family(
            "QwenImageTransformer2DModel",
            {key: value for key, value in _FLUX.items() if key != "num_single_layers"} | {"out_channels": 1},
            lambda draw: {
                "hidden_states": draw.noise(1, 16, 4),
                "encoder_hidden_states": draw.text(),
                "encoder_hidden_states_mask": torch.ones(1, TOKENS, dtype=torch.int64),
                "timestep": t(0.5),
                "img_shapes": [(1, 4, 4)],
            },
        ),
        Family(
            "Lumina2Transformer2DModel",
            {
                "sample_size": 8,
                "in_channels": 4,
                "hidden_size": WIDTH,
                "num_layers": NUM_BLOCKS,
                "num_refiner_layers": 2,
                "num_attention_heads": 2,
                "num_kv_heads": 1,
                "multiple_of": 16,
                "axes_dim_rope": (4, 6, 6),
                "axes_lens": (32, 16, 16),
                "cap_feat_dim": TEXT,
            },
            lambda draw: (
                _picture(draw, encoder_attention_mask=torch.ones(2, TOKENS, dtype=torch.bool))
                | {"timestep": t(0.5, 2)}
            ),
        ),
        Family(
            "LuminaNextDiT2DModel",
            {
                "sample_size": 8,
                "hidden_size": WIDTH,
                "num_layers": NUM_BLOCKS,
                "num_attention_heads": 2,
                "num_kv_heads": 1,
                "multiple_of": 16,
                "cross_attention_dim": TEXT,
            },
            lambda draw: {
                "hidden_states": draw.noise(2, 4, 8, 8),
                "timestep": t(0.5, 2),
                "encoder_hidden_states": draw.text(2),
                "encoder_mask": torch.ones(2, TOKENS),
                "image_rotary_emb": torch.polar(torch.ones(8, 8, 8), draw.noise(8, 8, 8)),
                "cross_attention_kwargs": {},
            },
        ),
        Family(
            "ZImageTransformer2DModel",
            {
                "in_channels": 4,
                "dim": WIDTH,
                "n_layers": NUM_BLOCKS,
                "n_refiner_layers": 2,
                "n_heads": 2,
                "n_kv_heads": 2,
                "cap_feat_dim": TEXT,
                "axes_dims": list(AXES),
                "axes_lens": [64, 16, 16],
            },
            lambda draw: {
                "x": [draw.noise(4, 1, 8, 8)],
                "t": t(0.5),
                "cap_feats": [draw.noise(TOKENS, TEXT)],
            },
        ),
        Family(
            "StableAudioDiTModel",
            HEADS
            | {
                "sample_size": 16,
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": NUM_BLOCKS,
                "num_key_value_attention_heads": 1,
                "cross_attention_dim": WIDTH,
                "cross_attention_input_dim": TEXT,
                "time_proj_dim": 16,
                "global_states_input_dim": 12,
            },
            lambda draw: {
                "hidden_states": draw.noise(2, 4, 12),
                "timestep": t(0.5, 2),
                "encoder_hidden_states": draw.text(2),
                "global_hidden_states": draw.noise(2, 1, 12),
                "rotary_embedding": (draw.noise(13, 8), draw.noise(13, 8)),
            },
        ),
        Family(
            "SanaTransformer2DModel",
            _SANA,
            lambda draw: _picture(draw, encoder_attention_mask=torch.ones(2, TOKENS)),
        ),
        Family(
            "SanaVideoTransformer3DModel",
            _SANA,
            lambda draw: _video(draw) | {"encoder_attention_mask": torch.ones(1, TOKENS)},
        ),
        Family(
            "PRXTransformer2DModel",
            {
                "in_channels": 4,
                "context_in_dim": TEXT,
                "hidden_size": WIDTH,
                "num_heads": 2,
                "depth": NUM_BLOCKS,
                "axes_dim": [8, 8],
            },
            lambda draw: (
                _picture(draw, attention_mask=torch.ones(2, TOKENS, dtype=torch.bool))
                | {"timestep": t(0.5, 2)}
            ),
        ),
        Family(
            "StableAudio3DiTModel",
            {
                "io_channels": 4,
                "embed_dim": 128,
                "depth": NUM_BLOCKS,
                "num_heads": 2,
                "cond_token_dim": TEXT,
                "global_cond_dim": 12,
                "local_add_cond_dim": 5,
                "timestep_features_dim": 16,
                "num_memory_tokens": 3,
            },
            lambda draw: {
                "hidden_states": draw.noise(2, 4, 12),
                "timestep": t(0.5, 2),
                "encoder_hidden_states": draw.text(2),
                "global_hidden_states": draw.noise(2, 12),
                "local_add_cond": draw.noise(2, 5, 12),
            },
        ),
        Family(
            "AllegroTransformer3DModel",
            HEADS
            | {
                "num_layers": NUM_BLOCKS,
                "attention_head_dim": 24,
                "cross_attention_dim": 48,
                "sample_height": 8,
                "sample_width": 8,
                "sample_frames": 2,
                "caption_channels": TEXT,
            },
            lambda draw: (
                _video(draw)
                | {
                    "attention_mask": torch.ones(1, 2, 8, 8),
                    "encoder_attention_mask": torch.ones(1, TOKENS),
                    "image_rotary_emb": _allegro_rotary(draw),
                }
            ),
        ),
        Family(
            "OmniGenTransformer2DModel",
            {
                "hidden_size": WIDTH,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "intermediate_size": 48,
                "num_layers": NUM_BLOCKS,
                "pad_token_id": 0,
                "vocab_size": 40,
                "max_position_embeddings": 64,
                "original_max_position_embeddings": 64,
                "pos_embed_max_size": 16,
                "time_step_dim": 16,
                "rope_scaling": {"long_factor": [1.0] * 8, "short_factor": [1.0] * 8},
            },
            lambda draw: {
                "hidden_states": draw.noise(1, 4, 8, 8),
                "timestep": t(0.5),
                "input_ids": draw.whole(40, 1, TOKENS),
                "input_img_latents": [draw.noise(1, 4, 4, 4)],
                "input_image_sizes": {0: [[0, 4]]},
                "attention_mask": torch.ones(1, TOKENS + 17, TOKENS + 17),
                "position_ids": torch.arange(TOKENS + 17)[None],
            },
        ),
        Family(
            "ErnieImageTransformer2DModel",
            {
                "hidden_size": WIDTH,
                "num_attention_heads": 2,
                "num_layers": NUM_BLOCKS,
                "ffn_hidden_size": 48,
                "in_channels": 4,
                "out_channels": 4,
                "text_in_dim": TEXT,
                "rope_axes_dim": AXES,
            },
            lambda draw: {
                "hidden_states": draw.noise(2, 4, 4, 4),
                "timestep": t(batch=2),
                "text_bth": draw.text(2),
                "text_lens": torch.tensor([TOKENS, TOKENS - 2]),
            },
        ),
        Family(
            "Ideogram4Transformer2DModel",
            HEADS
            | {
                "in_channels": 4,
                "num_layers": NUM_BLOCKS,
                "intermediate_size": 48,
                "adaln_dim": 8,
                "llm_features_dim": TEXT,
                "mrope_section": (4, 2, 2),
            },
            lambda draw: {
                "hidden_states": draw.noise(1, 21, 4),
                "timestep": t(0.5),
                "encoder_hidden_states": draw.noise(1, 21, TEXT),
                "position_ids": draw.whole(8, 1, 21, 3),
                "segment_ids": torch.ones(1, 21, dtype=torch.int64),
                "indicator": torch.tensor([[3] * TOKENS + [2] * 16]),
            },
        ),
        Family(
            "Krea2Transformer2DModel",
            HEADS
            | {
                "in_channels": 4,
                "num_layers": NUM_BLOCKS,
                "num_key_value_heads": 1,
                "intermediate_size": 48,
                "timestep_embed_dim": 16,
                "text_hidden_dim": TEXT,
                "num_text_layers": 3,
                "text_num_attention_heads": 2,
                "text_num_key_value_heads": 2,
                "text_intermediate_size": 32,
                "axes_dims_rope": AXES,
            },
            lambda draw: {
                "hidden_states": draw.noise(1, 16, 4),
                "encoder_hidden_states": draw.noise(1, TOKENS, 3, TEXT),
                "timestep": t(0.5),
                "position_ids": torch.cat([torch.zeros(TOKENS, 3), draw.grid(1, 4, 4)]),
                "encoder_attention_mask": torch.ones(1, TOKENS, dtype=torch.bool),
            },
        ),
        Family(
            "MiniMaxH3Transformer3DModel",
            HEADS
            | {
                "hidden_size": 48,
                "num_layers": NUM_BLOCKS,
                "ffn_dim": 40,
                "in_channels": 4,
                "audio_in_channels": 4,
                "text_dim": TEXT,
                "freq_dim": 16,
                "time_embed_hidden_dim": 24,
                "time_embed_dim": 16,
                "rope_freq_dim": 2,
            },
            lambda draw: {
                "hidden_states": draw.noise(1, 8, 16),
                "audio_hidden_states": draw.noise(1, 3, 4),
                "encoder_hidden_states": draw.text(),
                "timestep": t(0.5, 2),
                "timestep_indices": draw.whole(2, 16),
                "token_tags": torch.tensor([0] * TOKENS + [1] * 8 + [2] * 3),
                "position_ids": draw.whole(8, 16, 3),
                "text_indices": torch.arange(TOKENS),
                "video_indices": torch.arange(TOKENS, TOKENS + 8),
                "audio_indices": torch.arange(TOKENS + 8, TOKENS + 11),
            },
        ),
        Family(
            "MiniMaxMusic3Transformer1DModel",
            HEADS
            | {
                "in_channels": 4,
                "condition_dim": 6,
                "num_layers": NUM_BLOCKS,
                "ff_inner_dim": 48,
                "rotary_dim": 8,
                "fourier_embedding_dim": 16,
            },
            lambda draw: {
                "hidden_states": draw.noise(1, 4, 12),
                "timestep": t(0.5),
                "encoder_hidden_states": draw.noise(1, 12, 6),
            },
        ),
        Family(
            "NucleusMoEImageTransformer2DModel",
            HEADS
            | {
                "in_channels": 4,
                "out_channels": 1,
                "num_layers": NUM_BLOCKS + 2,
                "num_key_value_heads": 1,
                "joint_attention_dim": TEXT,
                "axes_dims_rope": AXES,
                "num_experts": 4,
                "moe_intermediate_dim": 16,
                "capacity_factors": [2.0] * (NUM_BLOCKS + 2),
            },
            lambda draw: {
                "hidden_states": draw.noise(1, 16, 4),
                "img_shapes": [(1, 4, 4)],
                "encoder_hidden_states": draw.text(),
                "encoder_hidden_states_mask": torch.ones(1, TOKENS, dtype=torch.bool),
                "timestep": t(0.5),
            },
        ),
        Family(
            "LongCatAudioDiTTransformer",
            {
                "dit_dim": WIDTH,
                "dit_depth": NUM_BLOCKS,
                "dit_heads": 2,
                "dit_text_dim": TEXT,
                "latent_dim": 4,
            },
            lambda draw: {
                "hidden_states": draw.noise(1, 12, 4),
                "encoder_hidden_states": draw.text(),
                "encoder_attention_mask": torch.ones(1, TOKENS, dtype=torch.bool),
                "timestep": t(0.5),
                "attention_mask": torch.ones(1, 12, dtype=torch.bool),
                "latent_cond": draw.noise(1, 12, 4),
            },
        ),
        Family("JoyImageEditTransformer3DModel", _JOY, _video),
        Family(
            "JoyImageEditPlusTransformer3DModel",
            _JOY,
            lambda draw: {
                "hidden_states": draw.noise(2, 20, 4, 1, 2, 2),
                "timestep": t(batch=2),
                "encoder_hidden_states": draw.text(2),
                "encoder_hidden_states_mask": torch.ones(2, TOKENS),
                "shape_list": [[(1, 4, 4), (1, 2, 2)], [(1, 4, 4)]],
            },
        ),
        Family(
            "MotifVideoTransformer3DModel",
            {
                key: value
                for key, value in _HUNYUAN.items()
                if key not in ("num_refiner_layers", "pooled_projection_dim")
            }
            | {
                "image_embed_dim": 10,
                "enable_text_cross_attention_dual": True,
                "enable_text_cross_attention_single": True,
            },
            lambda draw: (
                _video(draw)
                | {"encoder_attention_mask": torch.ones(1, TOKENS), "image_embeds": draw.noise(1, 3, 10)}
            ),
        ),
        Family(
            "Cosmos3OmniTransformer",
            {
                "dtype": "float32",
                "head_dim": 16,
                "hidden_size": WIDTH,
                "intermediate_size": 48,
                "latent_channel": 4,
                "num_attention_heads": 2,
                "num_hidden_layers": NUM_BLOCKS,
                "num_key_value_heads": 1,
                "patch_latent_dim": 16,
                "vocab_size": 40,
                "rope_axes_dim": [4, 2, 2],
            },
            lambda draw: {
                "input_ids": draw.whole(40, TOKENS),
                "text_indexes": torch.arange(TOKENS),
                "position_ids": torch.arange(TOKENS + 8).expand(3, TOKENS + 8),
                "und_len": TOKENS,
                "sequence_length": TOKENS + 8,
                "vision_tokens": [draw.noise(1, 4, 2, 4, 4)],
                "vision_token_shapes": [(2, 2, 2)],
                "vision_sequence_indexes": torch.arange(TOKENS, TOKENS + 8),
                "vision_mse_loss_indexes": torch.arange(TOKENS, TOKENS + 8),
                "vision_timesteps": t(batch=8),
                "vision_noisy_frame_indexes": [torch.arange(2)],
            },
        ),
        Family(
            "TransformerTemporalModel",
            HEADS
            | {
                "in_channels": 32,
                "num_layers": NUM_BLOCKS,
                "norm_num_groups": 4,
                "cross_attention_dim": WIDTH,
            },
            lambda draw: {"hidden_states": draw.noise(4, 32, 4, 4), "num_frames": 4},
        ),
        Family(
            "AceStepTransformer1DModel",
            {
                "hidden_size": WIDTH,
                "intermediate_size": 48,
                "num_hidden_layers": NUM_BLOCKS,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 16,
                "in_channels": 12,
                "audio_acoustic_hidden_dim": 4,
                "sliding_window": 3,
                "encoder_hidden_size": TEXT,
            },
            lambda draw: {
                "hidden_states": draw.noise(1, 12, 4),
                "timestep": t(0.5),
                "timestep_r": t(0.2),
                "encoder_hidden_states": draw.text(),
                "context_latents": draw.noise(1, 12, 8),
            },
        ),
        Family(
            "CosmosTransformer3DModel",  # torchvision is needed for a padding mask only
            HEADS
            | {
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": NUM_BLOCKS,
                "mlp_ratio": 2,
                "text_embed_dim": TEXT,
                "adaln_lora_dim": 4,
                "max_size": (4, 8, 8),
                "concat_padding_mask": False,
            },
            lambda draw: _video(draw) | {"attention_mask": torch.ones(1, TOKENS, dtype=torch.bool)},
        ),
        Family(
            "HunyuanImageTransformer2DModel",
            {key: value for key, value in _HUNYUAN.items() if key not in ("pooled_projection_dim",)}
            | {"patch_size": (2, 2), "rope_axes_dim": (8, 8), "text_embed_2_dim": 12},
            lambda draw: {
                "hidden_states": draw.noise(1, 4, 8, 8),
                "timestep": t(),
                "encoder_hidden_states": draw.text(),
                "encoder_attention_mask": torch.ones(1, TOKENS),
                "encoder_hidden_states_2": draw.noise(1, 3, 12),
                "encoder_attention_mask_2": torch.ones(1, 3),
            },
        ),
        Family(
            "Flux3Transformer2DModel",
            _FLUX | {"cond_in_channels": 4, "axes_dims_rope": [4, 4, 4, 4], "timestep_channels": 16},
            lambda draw: _flux(draw, axes=4),
        ),
        Family(
            "Kandinsky5Transformer3DModel",
            {
                "in_text_dim": TEXT,
                "in_text_dim2": 8,
                "time_dim": 16,
                "model_dim": WIDTH,
                "ff_dim": 48,
                "num_visual_blocks": NUM_BLOCKS,
                "axes_dims": AXES,
            },
            lambda draw: {
                "hidden_states": draw.noise(1, 2, 8, 8, 4),
                "encoder_hidden_states": draw.text(),
                "timestep": t(),
                "pooled_projections": draw.noise(1, 8),
                "visual_rope_pos": (torch.arange(2), torch.arange(4), torch.arange(4)),
                "text_rope_pos": torch.arange(TOKENS),
            },
        ),
        Family(
            "HunyuanDiT2DModel",
            HEADS
            | {
                "in_channels": 4,
                "patch_size": 2,
                "sample_size": 8,
                "hidden_size": WIDTH,
                "num_layers": 2 * NUM_BLOCKS,
                "cross_attention_dim": TEXT,
                "cross_attention_dim_t5": 16,
                "pooled_projection_dim": 16,
                "text_len": 4,
                "text_len_t5": 3,
                "use_style_cond_and_image_meta_size": False,
            },
            lambda draw: {
                "hidden_states": draw.noise(1, 4, 8, 8),
                "timestep": t(),
                "encoder_hidden_states": draw.noise(1, 4, TEXT),
                "text_embedding_mask": torch.ones(1, 4),
                "encoder_hidden_states_t5": draw.noise(1, 3, 16),
                "text_embedding_mask_t5": torch.ones(1, 3),
                "image_rotary_emb": [draw.noise(16, 16), draw.noise(16, 16)],
            },
            refused="block 5 of transformer.blocks, argument skip, is an output of block 2",
        ),
        Family(
            "BriaFiboTransformer2DModel",
            _FLUX | {"text_encoder_dim": 12},
            lambda draw: _flux(
                draw, 500.0, text_encoder_layers=[draw.noise(1, TOKENS, 12) for _ in range(2 * NUM_BLOCKS)]
            ),
            refused="block 0 of transformer.transformer_blocks, output 0, is used by the model itself",
        ),
        Family(
            "HiDreamImageTransformer2DModel",
            HEADS
            | {
                "patch_size": 2,
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": NUM_BLOCKS,
                "num_single_layers": NUM_BLOCKS,
                "caption_channels": [TEXT, 12],
                "text_emb_dim": 8,
                "axes_dims_rope": AXES,
                "max_resolution": (8, 8),
                "llama_layers": list(range(2 * NUM_BLOCKS)),
                "force_inference_output": True,
            },
            lambda draw: {
                "hidden_states": draw.noise(1, 4, 8, 8),
                "timesteps": t(),
                "encoder_hidden_states_t5": draw.noise(1, TOKENS, TEXT),
                "encoder_hidden_states_llama3": draw.noise(2 * NUM_BLOCKS, 1, TOKENS, 12),
                "pooled_embeds": draw.noise(1, 8),
            },
            refused="block 0 of transformer.double_stream_blocks, output 1, is used by the model itself",
        ),
        Family(
            "LatteTransformer3DModel",
            HEADS
            | {
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": NUM_BLOCKS,
                "cross_attention_dim": WIDTH,
                "sample_size": 8,
                "patch_size": 2,
                "num_embeds_ada_norm": 1000,
                "norm_type": "ada_norm_single",
                "norm_elementwise_affine": False,
                "caption_channels": TEXT,
                "video_length": 2,
            },
            _video,
            refused="block 0 of transformer.transformer_blocks, output 0, is used by the model itself",
        ),
        Family(
            "WanVACETransformer3DModel",
            _WAN | {"vace_layers": [0, 2], "vace_in_channels": 6},
            lambda draw: _video(draw) | {"control_hidden_states": draw.noise(1, 6, 2, 8, 8)},
            refused="block 0 of transformer.vace_blocks, output 0, is used by the model itself",
        ),
        Family(
            "WanAnimateTransformer3DModel",
            _WAN
            | {
                "in_channels": 12,
                "latent_channels": 4,
                "image_dim": 10,
                "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
                "motion_encoder_size": 16,
                "motion_style_dim": 8,
                "motion_dim": 4,
                "motion_encoder_dim": 8,
                "face_encoder_hidden_dim": 16,
                "face_encoder_num_heads": 2,
                "inject_face_latents_blocks": 2,
            },
            lambda draw: (
                _video(draw)
                | {
                    "hidden_states": draw.noise(1, 12, 3, 8, 8),
                    "encoder_hidden_states_image": draw.noise(1, 3, 10),
                    "pose_hidden_states": draw.noise(1, 4, 2, 8, 8),
                    "face_pixel_values": draw.noise(1, 3, 5, 16, 16),
                }
            ),
            refused="block 0 of transformer.face_adapter, argument args[0], is an output of block 0",
        ),
        Family(
            "AnyFlowFARTransformer3DModel",
            _WAN | {"chunk_partition": (1, 1)},
            lambda draw: _anyflow(draw) | {"chunk_partition": [1, 1]},
            refused="block 0 of transformer.blocks, argument args[4], is a torch.nn.attention.flex_attention.BlockMask",
        ),
        Family(
            "WanAnimate2Transformer3DModel",
            {
                "text_len": TOKENS,
                "in_dim": 8,
                "dim": WIDTH,
                "ffn_dim": 48,
                "freq_dim": 16,
                "text_dim": TEXT,
                "out_dim": 4,
                "num_heads": 2,
                "num_layers": NUM_BLOCKS,
                "use_img_emb": False,
            },
            lambda draw: _wan_animate_2(draw),
            refused="block 0 of transformer.blocks, argument kv_cache, is a diffusers",
        ),
        Family(
            "ConsisIDTransformer3DModel",
            HEADS
            | {
                "num_attention_heads": 3,
                "in_channels": 4,
                "out_channels": 4,
                "time_embed_dim": 16,
                "text_embed_dim": TEXT,
                "num_layers": NUM_BLOCKS,
                "sample_width": 8,
                "sample_height": 8,
                "sample_frames": 5,
                "max_text_seq_length": TOKENS,
                "is_train_face": True,
                "cross_attn_dim_head": 8,
                "cross_attn_num_heads": 2,
                "LFE_id_dim": 10,
                "LFE_vit_dim": 12,
                "LFE_depth": 5,
                "LFE_dim_head": 8,
                "LFE_num_heads": 2,
                "LFE_num_id_token": 2,
                "LFE_num_querie": 3,
                "LFE_output_dim": 32,
                "LFE_ff_mult": 2,
            },
            lambda draw: (
                _picture(draw)
                | {
                    "hidden_states": draw.noise(2, 2, 4, 8, 8),
                    "id_cond": draw.noise(2, 10),
                    "id_vit_hidden": [draw.noise(2, 3, 12) for _ in range(5)],
                }
            ),
            refused="block 0 of transformer.transformer_blocks, output 0, is used by the model itself",
        ),
    )
}


def model_class(family: Family) -> type[nn.Module]:
    """Return the stock class."""
    import diffusers.models.transformers as transformers

    found: type[nn.Module] = getattr(transformers, family.model_class)
    return found


def tiny_model(family: Family, seed: int = 0, **changes: Any) -> Any:
    """Return the stock class in float32 with random weights, none of them at its initial 0 or 1."""
    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(seed)
        model = model_class(family)(**family.settings | changes).eval().requires_grad_(False)
        for parameter in model.parameters():
            parameter.nan_to_num_(0, 0, 0).clamp_(-4, 4)  # some classes leave memory as it is
            parameter.add_(torch.randn_like(parameter) * NOISE)
    return model.float()


def call(model: nn.Module, family: Family, seed: int = 0, **changes: Any) -> list[torch.Tensor]:
    """Call a model once with the family's inputs and return every tensor of its answer."""
    with torch.no_grad(), _quiet():
        return list(_tensors(model(**family.inputs(Inputs(seed)) | changes, return_dict=False)))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("diffusers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
