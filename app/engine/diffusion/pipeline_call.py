"""A request as the arguments of a stock pipeline's call, and the call's result as a picture, a video or a sound.

What the uncut pipeline makes of the same arguments is what is made here, in every byte. Knows nothing of nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from app.engine.diffusion.defaults import call_defaults, guidance_name, seconds_name
from app.engine.diffusion.request import DiffusionDefaults, DiffusionRequest
from app.engine.request import RequestError
from slicing.diffusion.kinds import Kind
from slicing.diffusion.patches import PatchesRefused, check_patches

MAX_SIDE = 8192  # pixels
MAX_STEPS = 1000  # schedulers are trained on so many
MAX_SEED = (1 << 63) - 1
MAX_PREVIEWS = 8
MAX_FRAMES = 4097
TRUE_GUIDANCE = 4.0  # for models whose own guidance takes no negative prompt, when they are given one


def call_arguments(
    pipeline: Any, kind: Kind, defaults: DiffusionDefaults, request: DiffusionRequest
) -> dict[str, Any]:
    """The arguments of `pipeline(...)`. The request was checked."""
    known = call_defaults(pipeline)
    arguments: dict[str, Any] = {
        "prompt": request.prompt,
        "num_inference_steps": request.steps or defaults.steps,
        "generator": torch.Generator("cpu").manual_seed(request.seed),
    }
    if kind is Kind.AUDIO:
        name = seconds_name(known)
        if name is not None and (request.seconds or defaults.seconds):
            arguments[name] = request.seconds or defaults.seconds
    else:
        arguments |= {
            "height": request.height or defaults.height,
            "width": request.width or defaults.width,
        }
    if kind is Kind.VIDEO:
        arguments["num_frames"] = num_frames(defaults, request)
    arguments |= _guidance(known, request)
    if "use_resolution_binning" in known:  # what is asked for is made, not what is near it
        arguments["use_resolution_binning"] = False
    if "output_type" in known:
        arguments["output_type"] = "np" if kind is Kind.AUDIO else "pil"
    return arguments


def num_frames(defaults: DiffusionDefaults, request: DiffusionRequest) -> int:
    """Frames of a video: as asked for, by number or by length, in the steps that the model can make."""
    if request.num_frames is not None:
        return request.num_frames
    if request.seconds is not None:
        steps = round((request.seconds * defaults.fps - 1) / defaults.frame_step)
        return max(0, steps) * defaults.frame_step + 1
    return defaults.num_frames or 1


def check_numbers(kind: Kind, defaults: DiffusionDefaults, request: DiffusionRequest) -> None:
    """Raise `RequestError` for numbers that this model cannot make."""
    if not request.prompt.strip():
        raise _invalid("prompt", "the prompt is empty")
    if request.negative_prompt and not defaults.takes_negative:
        raise _invalid("negative_prompt", "this model takes no negative prompt", code="unsupported_parameter")
    for name in ("temperature", "top_k", "top_p"):
        if getattr(request, name) is not None:
            raise _invalid(name, "this model draws no tokens", code="unsupported_parameter")
    steps = defaults.steps if request.steps is None else request.steps
    if not 1 <= steps <= MAX_STEPS:
        raise _invalid("steps", f"steps is {steps}; it must be between 1 and {MAX_STEPS}")
    if (scale := request.guidance_scale) is not None:
        if not (math.isfinite(scale) and 0 <= scale <= 1000):
            raise _invalid("guidance_scale", f"guidance_scale is {scale}; it must be between 0 and 1000")
        if defaults.guidance_scale is None:
            raise _invalid(
                "guidance_scale", "this model takes no guidance scale", code="unsupported_parameter"
            )
    if not 0 <= request.seed <= MAX_SEED:
        raise _invalid("seed", f"seed is {request.seed}; it must be between 0 and {MAX_SEED}")
    if not 0 <= request.previews <= MAX_PREVIEWS:
        raise _invalid("previews", f"previews is {request.previews}; it must be between 0 and {MAX_PREVIEWS}")
    if kind is Kind.AUDIO:
        _check_sound(defaults, request)
    else:
        _check_size(defaults, request)
    if kind is Kind.VIDEO:
        _check_frames(defaults, request)
    elif request.num_frames is not None:
        raise _invalid("num_frames", f"this model makes a {kind}, which has no frames")
    if kind is Kind.PICTURE and request.seconds is not None:
        raise _invalid("seconds", "this model makes a picture, which has no length")


def check_asked_patches(defaults: DiffusionDefaults, request: DiffusionRequest, stages: int) -> None:
    """Raise `RequestError` for patches that make no sense with these steps over so many stages."""
    steps = defaults.steps if request.steps is None else request.steps
    try:
        check_patches(request.patches, warmup=request.warmup, steps=steps, stages=stages)
    except PatchesRefused as error:
        raise _invalid(error.param, str(error)) from None


def taken(kind: Kind, made: Any) -> dict[str, Any]:
    """What a pipeline's answer holds, as fields of `Made`."""
    first = made[0] if isinstance(made, tuple) else next(iter(made.values()))
    if kind is Kind.PICTURE:
        return {"image": first[0]}
    if kind is Kind.VIDEO:
        return {"frames": tuple(first[0])}
    samples = first[0]
    samples = samples.detach().cpu().float().numpy() if isinstance(samples, torch.Tensor) else samples
    return {"samples": samples.reshape(-1, samples.shape[-1]) if samples.ndim != 2 else samples}


def _guidance(known: Mapping[str, Any], request: DiffusionRequest) -> dict[str, Any]:
    """Guidance and what it leads away from.

    Where a model has guidance of its own and true guidance beside it (off unless asked), a negative prompt asks for the
    true one, and the scale is its.
    """
    arguments: dict[str, Any] = {}
    name = guidance_name(known)
    negative = request.negative_prompt
    if negative is not None:
        arguments["negative_prompt"] = negative
        if name == "guidance_scale" and "true_cfg_scale" in known and negative:
            scale = request.guidance_scale
            arguments["true_cfg_scale"] = TRUE_GUIDANCE if scale is None else scale
            return arguments
    if name is not None and request.guidance_scale is not None:
        arguments[name] = request.guidance_scale
    return arguments


def _check_size(defaults: DiffusionDefaults, request: DiffusionRequest) -> None:
    step = defaults.size_step
    for side, asked in (("width", request.width), ("height", request.height)):
        if asked is None:
            continue
        if asked % step or not step <= asked <= MAX_SIDE:
            raise _invalid(
                "size", f"{side} is {asked}; this model makes multiples of {step}, up to {MAX_SIDE}"
            )
    width, height = request.width or defaults.width or 0, request.height or defaults.height or 0
    if defaults.max_pixels is not None and width * height > defaults.max_pixels:
        raise _invalid(
            "size", f"{width}x{height} is more than the {defaults.max_pixels} pixels of this model"
        )


def _check_frames(defaults: DiffusionDefaults, request: DiffusionRequest) -> None:
    step, asked = defaults.frame_step, request.num_frames
    if asked is not None and request.seconds is not None:
        raise _invalid("seconds", "give num_frames or seconds, not both")
    if asked is not None and (not 1 <= asked <= MAX_FRAMES or (asked - 1) % step):
        also = f", in steps of {step} from 1 on" if step > 1 else ""
        raise _invalid("num_frames", f"num_frames is {asked}; it must be between 1 and {MAX_FRAMES}{also}")
    if request.seconds is not None:
        longest = MAX_FRAMES / defaults.fps
        if not (math.isfinite(request.seconds) and 0 < request.seconds <= longest):
            raise _invalid(
                "seconds", f"seconds is {request.seconds}; it must be above 0, up to {longest:.0f}"
            )


def _check_sound(defaults: DiffusionDefaults, request: DiffusionRequest) -> None:
    if request.width is not None or request.height is not None:
        raise _invalid("size", "this model makes a sound, which has no size")
    if request.previews:
        raise _invalid("previews", "there are no previews of a sound")
    longest = defaults.max_seconds if defaults.max_seconds is not None else 3600.0
    if request.seconds is not None and not (
        math.isfinite(request.seconds) and 0 < request.seconds <= longest
    ):
        raise _invalid("seconds", f"seconds is {request.seconds}; it must be above 0, up to {longest:g}")


def _invalid(param: str, message: str, *, code: str = "invalid_value") -> RequestError:
    return RequestError(param, code, message)
