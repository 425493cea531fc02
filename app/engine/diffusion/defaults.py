"""What a pipeline makes when it is not told otherwise, read from its own call and its parts' configurations.

No list of families. Knows no requests.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

from app.engine.diffusion.request import DiffusionDefaults
from slicing.diffusion.kinds import Kind

USUAL_STEPS = 30  # for a pipeline whose call names none
USUAL_FPS = 16.0  # no pipeline folder says how fast its frames follow one another
USUAL_FRAMES = 17
USUAL_SIZE = 512
STATED_STEPS = (1, 8, 16, 32, 64)  # of sizes, that pipelines write into their checks as numbers
UNLIMITED = 1 << 20  # tokenizers without a length of their own claim 1e30

SPATIAL = ("vae_scale_factor", "vae_scale_factor_spatial", "vae_spatial_compression_ratio")
SPATIAL_MORE = ("vae_spatial_scale_factor", "spatial_compression_ratio")
TEMPORAL = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor")
SECONDS = ("audio_end_in_s", "audio_length_in_s", "audio_duration")


def defaults_of(pipeline: Any, kind: Kind) -> DiffusionDefaults:
    """Read them from a loaded pipeline."""
    call = call_defaults(pipeline)
    steps = call.get("num_inference_steps")
    scale_name = guidance_name(call)
    scale = call.get(scale_name) if scale_name else None
    shared: dict[str, Any] = {
        "steps": int(steps) if steps else USUAL_STEPS,
        "guidance_scale": None if scale is None else float(scale),
        "max_text": max_text(pipeline),
        "takes_negative": "negative_prompt" in call,
        "size_step": 1,
    }
    if kind is Kind.AUDIO:
        return _sound(pipeline, call, shared)
    shared["size_step"] = size_step(pipeline, call)
    width, height = (_size(pipeline, call, side, shared["size_step"]) for side in ("width", "height"))
    if kind is Kind.PICTURE:
        return DiffusionDefaults(width=width, height=height, **shared)
    frames = call.get("num_frames") or (_config(pipeline, "transformer") or {}).get("sample_frames")
    fps = call.get("frame_rate") or call.get("fps") or USUAL_FPS
    return DiffusionDefaults(
        width=width,
        height=height,
        num_frames=int(frames or USUAL_FRAMES),
        frame_step=frame_step(pipeline),
        fps=float(fps),
        **shared,
    )


def call_defaults(pipeline: Any) -> Mapping[str, Any]:
    """What the pipeline's call takes, with what it takes when not told."""
    parameters = inspect.signature(type(pipeline).__call__).parameters
    return {name: parameter.default for name, parameter in parameters.items() if name != "self"}


def guidance_name(call: Mapping[str, Any]) -> str | None:
    """What a call names its guidance scale: the one with a default, where there are two."""
    names = [name for name in ("guidance_scale", "true_cfg_scale") if name in call]
    return next((name for name in names if call[name] is not None), names[0] if names else None)


def size_step(pipeline: Any, call: Mapping[str, Any]) -> int:
    """Width and height are multiples of this: of a token's pixels, and as coarse as the pipeline's own check wants."""
    token = token_pixels(pipeline)
    steps = (math.lcm(token, stated) for stated in STATED_STEPS)
    # Three times the step is a multiple of no coarser one.
    return next((step for step in steps if _passes_check(pipeline, call, 3 * step)), token)


def _passes_check(pipeline: Any, call: Mapping[str, Any], side: int) -> bool:
    """Whether the pipeline's own check takes a square of this side, and all else as its call has it."""
    check = getattr(pipeline, "check_inputs", None)
    if check is None:
        return True
    arguments = {
        name: call.get(name) for name, own in inspect.signature(check).parameters.items() if _is_open(own)
    }
    try:
        check(**arguments | {"prompt": "a", "height": side, "width": side})
    except Exception:  # whatever it dislikes
        return False
    return True


def _is_open(parameter: inspect.Parameter) -> bool:
    """Whether a parameter must be given by its name."""
    return parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD


def token_pixels(pipeline: Any) -> int:
    """The side of one token: what one latent makes, times the latents that the transformer takes as one."""
    scale = spatial_scale(pipeline)
    steps = [scale * patch for patch in _patch_sizes(pipeline)[-2:]] or [scale]
    for name in ("image_processor", "video_processor"):  # some pipelines pack latents outside the transformer
        processor = getattr(pipeline, name, None)
        if processor is not None:
            steps.append(int(processor.config.vae_scale_factor))
    return math.lcm(*steps)


def spatial_scale(pipeline: Any) -> int:
    """Pixels of a picture's side that one latent makes."""
    for name in (*SPATIAL, *SPATIAL_MORE):
        if isinstance(value := getattr(pipeline, name, None), int):
            return value
    return 8


def frame_step(pipeline: Any) -> int:
    """Frames that one latent makes, but for the first."""
    for name in TEMPORAL:
        if isinstance(value := getattr(pipeline, name, None), int):
            return value
    return 1


def seconds_name(call: Mapping[str, Any]) -> str | None:
    """What a call names the length of its sound."""
    return next((name for name in SECONDS if name in call), None)


def max_text(pipeline: Any) -> int | None:
    """Tokens that the longest reading text encoder takes; None where none has a limit."""
    limits = text_limits(pipeline)
    return max(limits.values()) if limits else None


def text_limits(pipeline: Any) -> dict[str, int]:
    """How many tokens each tokenizer's text may have, by the tokenizer's name."""
    asked = call_defaults(pipeline).get("max_sequence_length")
    limits = {}
    for name, tokenizer in tokenizers_of(pipeline).items():
        known = [value for value in (asked, tokenizer.model_max_length) if value and value < UNLIMITED]
        if known:
            limits[name] = int(min(known))
    return limits


def tokenizers_of(pipeline: Any) -> dict[str, Any]:
    """The pipeline's tokenizers, by their names."""
    return {
        name: part
        for name, part in pipeline.components.items()
        if name.startswith("tokenizer") and hasattr(part, "model_max_length")
    }


def _patch_sizes(pipeline: Any) -> list[int]:
    config = _config(pipeline, "transformer")
    size = config.get("patch_size") if config is not None else None
    sizes = [size] if isinstance(size, int) else list(size or ())
    return [int(value) for value in sizes if isinstance(value, int)]


def _size(pipeline: Any, call: Mapping[str, Any], side: str, step: int) -> int:
    """The width or height that the call names, or what the transformer was made for."""
    if call.get(side):
        return int(call[side])
    config = _config(pipeline, "transformer") or {}
    size = getattr(pipeline, "default_sample_size", None) or config.get("sample_size")
    size = config.get(f"sample_{side}") or size
    if isinstance(size, list | tuple):
        size = size[-1] if side == "width" else size[-2]
    made = int(size) * spatial_scale(pipeline) if isinstance(size, int) else USUAL_SIZE
    return max(step, made // step * step)


def _sound(pipeline: Any, call: Mapping[str, Any], shared: dict[str, Any]) -> DiffusionDefaults:
    vae = _config(pipeline, "vae") or {}
    rate = int(vae.get("sampling_rate") or vae.get("sample_rate") or 0)
    hop = getattr(pipeline.vae, "hop_length", None)
    sample_size = (_config(pipeline, "transformer") or {}).get("sample_size")
    longest = sample_size * hop / rate if rate and hop and isinstance(sample_size, int) else None
    name = seconds_name(call)
    seconds = (call.get(name) if name else None) or longest
    return DiffusionDefaults(
        width=None, height=None, seconds=seconds, max_seconds=longest, rate=rate, **shared
    )


def _config(pipeline: Any, component: str) -> Any:
    return getattr(getattr(pipeline, component, None), "config", None)
