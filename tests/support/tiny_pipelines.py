"""Stock diffusers pipelines at a tiny size: random weights, tokenizers made from nothing, a call that fits each.

Every weight that a fresh model has at zero (gates, last projections) is noise, so that an error shows in the picture.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

PROMPT, NEGATIVE = "a red circle on blue", "grey noise"
TEXT_DIM = 32  # of every text encoder
VOCABULARY = 256 + 3  # bytes and three special tokens
Component = Any


@dataclass(frozen=True)
class TinyPipeline:
    """How one pipeline is built, and the arguments of a small call besides prompt, steps and generator."""

    build: Callable[[], Any]
    call: dict[str, Any]
    num_layers: int  # blocks over all its remote stacks


class TinyPipelines:
    """Folders of tiny pipelines, each built at its first use; one object serves a whole test session."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def folder(self, name: str) -> Path:
        """The folder of the pipeline of this name (see `PIPELINES` and `BLOCK_BY_BLOCK`)."""
        folder = self._root / name
        if not (folder / "model_index.json").is_file():
            torch.manual_seed(7)
            with quiet():
                pipeline_named(name).build().save_pretrained(folder)
        return folder

    def whole(self, name: str) -> Any:
        """The uncut stock pipeline, loaded from its folder in float32.

        Its weights lie in memory that torch made. Mapped from a file they begin anywhere, and for those that do not
        begin at a multiple of 64 kernels take another path, with other last bits for another layout of the file.
        """
        from diffusers import DiffusionPipeline

        with quiet():
            pipeline = DiffusionPipeline.from_pretrained(self.folder(name), dtype=torch.float32)
        pipeline.set_progress_bar_config(disable=True)
        for component in pipeline.components.values():
            for parameter in component.parameters() if isinstance(component, nn.Module) else ():
                parameter.data = parameter.data.clone()
        return pipeline


def draw(pipeline: Any, name: str, *, seed: int = 0, steps: int = 3, **changes: Any) -> torch.Tensor:
    """Run a pipeline of this name on its small call; returns what it made: pixels, frames or samples."""
    generator = torch.Generator("cpu").manual_seed(seed)
    asked = {"prompt": PROMPT, "num_inference_steps": steps, "output_type": "pt"}
    with quiet():
        made = pipeline(generator=generator, **pipeline_named(name).call | asked | changes)
    first = next(iter(made.values()))
    assert isinstance(first, torch.Tensor)
    return first


class quiet(warnings.catch_warnings):  # noqa: N801  # a context manager, used like a function
    """What diffusers and transformers warn about while they build and load is not this project's to mend."""

    def __enter__(self) -> None:  # type: ignore[override]
        from diffusers.utils import logging

        super().__enter__()
        warnings.simplefilter("ignore")
        logging.set_verbosity_error()
        logging.disable_progress_bar()


def roughen(model: nn.Module, *, gain: float = 2.0) -> nn.Module:
    """Put noise where a fresh model has one constant: a gate at zero would hide whatever is behind it.

    Matrices grow by `gain`, so that the text reaches the picture.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif parameter.dim() > 1:
                parameter.mul_(gain)
    return model.eval()


# Text ---------------------------------------------------------------------------------------------------------


def byte_tokenizer(max_length: int) -> Component:
    """One token a byte, padded and ended: `max_length` is what the pipelines cut a prompt to."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "</s>": 1, "<unk>": 2}
    vocab |= {
        character: index + 3 for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in list(vocab)[:3]])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=max_length,
    )


def t5_encoder(kind: str = "T5") -> Component:
    """A T5 encoder ("T5" or "UMT5") of two layers."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY, d_model=TEXT_DIM, d_kv=8, d_ff=48, num_layers=2, num_heads=4
    )
    return getattr(transformers, f"{kind}EncoderModel")(config).eval()


def clip_encoder(*, has_projection: bool) -> Component:
    """A CLIP text model of two layers, with a projection of its pooled state or without."""
    import transformers

    config = transformers.CLIPTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=TEXT_DIM,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        projection_dim=TEXT_DIM,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    name = "CLIPTextModelWithProjection" if has_projection else "CLIPTextModel"
    return getattr(transformers, name)(config).eval()


# Pictures -----------------------------------------------------------------------------------------------------


def picture_vae(latent_channels: int) -> Component:
    """An autoencoder that makes one latent of 2x2 pixels."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=latent_channels,
        layers_per_block=1,
        norm_num_groups=2,
        sample_size=64,
        shift_factor=0.06,
        scaling_factor=1.5,
    ).eval()


def pixart() -> Component:
    """One guidance call of two rows."""
    from diffusers import DPMSolverMultistepScheduler, PixArtAlphaPipeline, PixArtTransformer2DModel

    transformer = PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=4,
        cross_attention_dim=32,
        caption_channels=TEXT_DIM,
        sample_size=32,
        patch_size=2,
    )
    return PixArtAlphaPipeline(
        tokenizer=byte_tokenizer(120),
        text_encoder=t5_encoder(),
        vae=picture_vae(4),
        transformer=roughen(transformer),
        scheduler=DPMSolverMultistepScheduler(),
    )


def stable_diffusion_3() -> Component:
    """Two streams, the last block another shape than the others."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    transformer = SD3Transformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=4,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=2 * TEXT_DIM,
        pooled_projection_dim=2 * TEXT_DIM,
        out_channels=4,
        pos_embed_max_size=32,
    )
    from transformers import T5Config, T5EncoderModel

    wide = T5Config(vocab_size=VOCABULARY, d_model=2 * TEXT_DIM, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    return StableDiffusion3Pipeline(
        transformer=roughen(transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=picture_vae(4),
        text_encoder=clip_encoder(has_projection=True),
        tokenizer=byte_tokenizer(77),
        text_encoder_2=clip_encoder(has_projection=True),
        tokenizer_2=byte_tokenizer(77),
        text_encoder_3=T5EncoderModel(wide).eval(),
        tokenizer_3=byte_tokenizer(77),
    )


def flux() -> Component:
    """Two stacks behind each other."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT_DIM,
        pooled_projection_dim=TEXT_DIM,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=picture_vae(4),
        text_encoder=clip_encoder(has_projection=False),
        tokenizer=byte_tokenizer(77),
        text_encoder_2=t5_encoder(),
        tokenizer_2=byte_tokenizer(77),
        transformer=roughen(transformer),
    )


def hunyuan_dit() -> Component:
    """Its later blocks take what its earlier ones gave: no plain thread."""
    from diffusers import AutoencoderKL, DDPMScheduler, HunyuanDiT2DModel, HunyuanDiTPipeline
    from transformers import BertConfig, BertModel

    transformer = HunyuanDiT2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        patch_size=2,
        sample_size=8,
        hidden_size=32,
        num_layers=4,
        cross_attention_dim=TEXT_DIM,
        cross_attention_dim_t5=TEXT_DIM,
        pooled_projection_dim=16,
        text_len=77,
        text_len_t5=256,
        use_style_cond_and_image_meta_size=False,
    )
    bert = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=TEXT_DIM,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
    )
    vae = AutoencoderKL(
        block_out_channels=(8,) * 4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        sample_size=64,
    )
    return HunyuanDiTPipeline(
        vae=vae.eval(),
        text_encoder=BertModel(bert).eval(),
        tokenizer=byte_tokenizer(77),
        text_encoder_2=t5_encoder(),
        tokenizer_2=byte_tokenizer(256),
        transformer=roughen(transformer),
        scheduler=DDPMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


# Video --------------------------------------------------------------------------------------------------------


def _wan_transformer() -> Component:
    from diffusers import WanTransformer3DModel

    return roughen(
        WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=16,
            out_channels=16,
            text_dim=TEXT_DIM,
            freq_dim=32,
            ffn_dim=32,
            num_layers=4,
            rope_max_seq_len=64,
        )
    )


def _wan(**changes: Any) -> Component:
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline

    vae = AutoencoderKLWan(
        base_dim=3,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )
    return WanPipeline(
        tokenizer=byte_tokenizer(512),
        text_encoder=t5_encoder("UMT5"),
        vae=vae.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        transformer=_wan_transformer(),
        **changes,
    )


def wan() -> Component:
    """Two guidance calls a step."""
    return _wan()


def wan_two() -> Component:
    """Two transformers, as Wan 2.2 has them: the second below a noise level."""
    return _wan(transformer_2=_wan_transformer(), boundary_ratio=0.875)


def cogvideox() -> Component:
    """Two streams of one guidance call, three-dimensional latents."""
    from diffusers import (
        AutoencoderKLCogVideoX,
        CogVideoXDDIMScheduler,
        CogVideoXPipeline,
        CogVideoXTransformer3DModel,
    )

    transformer = CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=TEXT_DIM,
        num_layers=4,
        sample_width=4,
        sample_height=4,
        sample_frames=9,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=226,
    )
    vae = AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
    )
    return CogVideoXPipeline(
        tokenizer=byte_tokenizer(226),
        text_encoder=t5_encoder(),
        vae=vae.eval(),
        transformer=roughen(transformer),
        scheduler=CogVideoXDDIMScheduler(),
    )


# Sound --------------------------------------------------------------------------------------------------------


def stable_audio() -> Component:
    """2000 samples a second, a second at most."""
    from diffusers import (
        AutoencoderOobleck,
        EDMDPMSolverMultistepScheduler,
        StableAudioDiTModel,
        StableAudioPipeline,
    )
    from diffusers.pipelines.stable_audio import StableAudioProjectionModel

    transformer = StableAudioDiTModel(
        sample_size=256,
        in_channels=4,
        out_channels=4,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=4,
        num_key_value_attention_heads=2,
        cross_attention_dim=16,
        cross_attention_input_dim=16,
        time_proj_dim=16,
        global_states_input_dim=32,
    )
    vae = AutoencoderOobleck(
        encoder_hidden_size=8,
        downsampling_ratios=[2, 4],
        decoder_channels=4,
        decoder_input_channels=4,
        audio_channels=2,
        channel_multiples=[1, 2],
        sampling_rate=2000,
    )
    return StableAudioPipeline(
        vae=vae.eval(),
        text_encoder=t5_encoder(),
        projection_model=StableAudioProjectionModel(
            text_encoder_dim=TEXT_DIM, conditioning_dim=16, min_value=0, max_value=32
        ),
        tokenizer=byte_tokenizer(64),
        transformer=roughen(transformer),
        scheduler=EDMDPMSolverMultistepScheduler(
            prediction_type="v_prediction", sigma_max=50.0, sigma_min=0.3
        ),
    )


PIPELINES: dict[str, TinyPipeline] = {
    "pixart": TinyPipeline(
        pixart,
        {
            "height": 32,
            "width": 32,
            "guidance_scale": 3.0,
            "negative_prompt": NEGATIVE,
            "use_resolution_binning": False,
        },
        4,
    ),
    "sd3": TinyPipeline(
        stable_diffusion_3,
        {"height": 32, "width": 32, "guidance_scale": 3.0, "negative_prompt": NEGATIVE},
        4,
    ),
    "flux": TinyPipeline(flux, {"height": 32, "width": 32, "guidance_scale": 3.5}, 5),
    "wan": TinyPipeline(
        wan,
        {"height": 32, "width": 32, "num_frames": 9, "guidance_scale": 3.0, "negative_prompt": NEGATIVE},
        4,
    ),
    "wan-two": TinyPipeline(
        wan_two,
        {"height": 32, "width": 32, "num_frames": 9, "guidance_scale": 3.0, "negative_prompt": NEGATIVE},
        8,
    ),
    "cogvideox": TinyPipeline(
        cogvideox,
        {"height": 32, "width": 32, "num_frames": 9, "guidance_scale": 3.0, "negative_prompt": NEGATIVE},
        4,
    ),
    "stable-audio": TinyPipeline(
        stable_audio,
        {"audio_end_in_s": 0.5, "guidance_scale": 3.0, "negative_prompt": NEGATIVE},
        4,
    ),
}
# Those whose blocks are no plain thread.
BLOCK_BY_BLOCK: dict[str, TinyPipeline] = {
    "hunyuan-dit": TinyPipeline(
        hunyuan_dit,
        {
            "height": 64,
            "width": 64,
            "guidance_scale": 3.0,
            "negative_prompt": NEGATIVE,
            "use_resolution_binning": False,
        },
        4,
    ),
}


def pipeline_named(name: str) -> TinyPipeline:
    """One of either table."""
    return (PIPELINES | BLOCK_BY_BLOCK)[name]
