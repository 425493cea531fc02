"""Tiny random models that see or hear, as folders: weights, tokenizer, chat template and processor settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForMultimodalLM, AutoTokenizer, PreTrainedModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.idefics3 import Idefics3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava import LlavaProcessor
from transformers.models.qwen2_audio import Qwen2AudioProcessor
from transformers.models.qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.whisper import WhisperFeatureExtractor

from slicing.processors import NoVideos, without_videos
from tests.support.tiny_tokenizer import write_tiny_tokenizer

RATE = 16_000  # samples per second
RECORDING_S = 2  # what the ear is padded to
TOKENS = (
    "<image>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|AUDIO|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
)
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% elif part['type'] == 'audio' %}AUDIO"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NOISE = 0.3  # added to weights, so that answers vary
VOCAB_SIZE = 320
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_multimodal(folder: Path, family: str, *, seed: int = 0) -> Path:
    """Save a tiny random model of one of `FAMILIES` or `OTHERS` with everything that belongs to it."""
    write_tiny_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS)})
    tokenizer.chat_template = None
    make_processor, make_config = (FAMILIES | OTHERS)[family]
    processor = make_processor(tokenizer)
    config = make_config(dict(zip(TOKENS, tokenizer.convert_tokens_to_ids(list(TOKENS)), strict=True)))
    torch.manual_seed(seed)
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * NOISE)
    model.save_pretrained(folder)
    _save_processor(processor, folder)
    return folder


def stock_model(folder: Path) -> PreTrainedModel:
    """The whole model, as transformers loads it."""
    model = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert isinstance(model, PreTrainedModel)
    return model


def random_picture(seed: int = 0, size: tuple[int, int] = (70, 50)) -> Image.Image:
    """Noise, [height, width] as `size` says."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def random_recording(seed: int = 0, seconds: float = 1.0) -> np.ndarray:
    """A tone of its own in noise [samples], float32."""
    noise = np.random.default_rng(seed).standard_normal(int(seconds * RATE)) * 0.05
    tone = np.sin(np.arange(len(noise)) * (2 * np.pi * 300 * (seed + 1) / RATE)) * 0.5
    return (noise + tone).astype(np.float32)


def part_of(family: str, seed: int = 0) -> dict[str, Any]:
    """A part of a message, as templates know it: a picture, or a recording of what hears."""
    if family == "qwen2_audio":
        return {"type": "audio", "audio": random_recording(seed)}
    return {"type": "image", "image": random_picture(seed)}


def _save_processor(processor: Any, folder: Path) -> None:
    """In one file, or as older folders have it, in a file for each part: all that can be without a video processor."""
    if "video_processor" not in processor.get_attributes():
        processor.save_pretrained(str(folder))
        return
    processor.tokenizer.chat_template = processor.chat_template
    processor.tokenizer.save_pretrained(str(folder))
    processor.image_processor.save_pretrained(str(folder))


def _llava(tokenizer: Any) -> Any:
    picture = CLIPImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, do_resize=True
    )
    return LlavaProcessor(
        picture,
        tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE.replace("IMAGE", "<image>"),
    )


def _llava_config(ids: dict[str, int]) -> Any:
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
        "projection_dim": 24,
    }
    return AutoConfig.for_model(
        "llava",
        vision_config=vision,
        text_config=_TEXT | {"model_type": "llama"},
        image_token_id=ids["<image>"],
        vision_feature_select_strategy="default",
        vision_feature_layer=-2,
        eos_token_id=2,
    )


def _qwen2_vl(tokenizer: Any) -> Any:
    picture = Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=28 * 28 * 16)
    template = TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    return without_videos(Qwen2VLProcessor)(picture, tokenizer, NoVideos(), chat_template=template)


def _qwen2_vl_config(ids: dict[str, int]) -> Any:
    vision = {"depth": 2, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 32}
    return AutoConfig.for_model(
        "qwen2_vl",
        vision_config=vision,
        text_config=_TEXT
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        eos_token_id=2,
    )


def _qwen2_audio(tokenizer: Any) -> Any:
    ear = WhisperFeatureExtractor(feature_size=16, sampling_rate=RATE, chunk_length=RECORDING_S)
    template = TEMPLATE.replace("AUDIO{%", "<|audio_bos|><|AUDIO|><|audio_eos|>{%")
    return Qwen2AudioProcessor(ear, tokenizer, chat_template=template)


def _qwen2_audio_config(ids: dict[str, int]) -> Any:
    ear = {
        "model_type": "qwen2_audio_encoder",
        "num_mel_bins": 16,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "d_model": 24,
        "max_source_positions": RECORDING_S * 50,
    }
    return AutoConfig.for_model(
        "qwen2_audio",
        audio_config=ear,
        text_config=_TEXT | {"model_type": "qwen2"},
        audio_token_id=ids["<|AUDIO|>"],
        audio_token_index=ids["<|AUDIO|>"],
        eos_token_id=2,
    )


def _idefics3(tokenizer: Any) -> Any:
    picture = Idefics3ImageProcessorPil(size={"longest_edge": 28}, max_image_size={"longest_edge": 28})
    template = TEMPLATE.replace("IMAGE", "<image>")
    return Idefics3Processor(picture, tokenizer, image_seq_len=4, chat_template=template)


def _idefics3_config(ids: dict[str, int]) -> Any:
    vision = {
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
    }
    return AutoConfig.for_model(
        "idefics3",
        vision_config=vision,
        text_config=_TEXT | {"model_type": "llama", "pad_token_id": 0},
        image_token_id=ids["<image>"],
        scale_factor=2,
        eos_token_id=2,
    )


FAMILIES: dict[str, tuple[Callable[[Any], Any], Callable[[dict[str, int]], Any]]] = {
    "llava": (_llava, _llava_config),
    "qwen2_vl": (_qwen2_vl, _qwen2_vl_config),
    "qwen2_audio": (_qwen2_audio, _qwen2_audio_config),
}
# A processor that cannot keep control tokens in messages from being ones.
OTHERS: dict[str, tuple[Callable[[Any], Any], Callable[[dict[str, int]], Any]]] = {
    "idefics3": (_idefics3, _idefics3_config),
}
