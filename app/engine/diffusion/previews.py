"""Pictures of what there is so far: rough ones after each step, from the autoencoder at the asked points.

The pipeline decodes its own latents: called with them and a scheduler without steps, all that is left of it is the end.
So no way of packing or scaling latents is known here. A preview that fails is left out; the picture goes on.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from PIL import Image

from app.engine.diffusion.watched_scheduler import SchedulerStep
from slicing.diffusion.kinds import Kind

log = logging.getLogger(__name__)

ROUGH_SIDE = 128  # pixels of the longer side of a rough preview, at most
ROUGH_SAMPLES = 4096  # latents that colours are fitted to


def clean_latents(step: SchedulerStep, scheduler: Any) -> torch.Tensor | None:
    """What the picture would be if the model were right now: the latents without noise, as far as that is known.

    The scheduler says it, or keeps it; for flow models it is x - sigma·v.
    """
    if step.clean is not None:
        return step.clean
    kept = getattr(scheduler, "model_outputs", None)
    converts = getattr(scheduler.config, "algorithm_type", "dpmsolver++") in (
        "dpmsolver++",
        "sde-dpmsolver++",
    )
    if isinstance(kept, list) and kept and isinstance(kept[-1], torch.Tensor) and converts:
        return kept[-1]
    is_flow = "Flow" in type(scheduler).__name__ or getattr(scheduler.config, "use_flow_sigmas", False)
    if (
        is_flow
        and step.sample is not None
        and step.model_output is not None
        and step.sigma is not None
        and step.sample.shape == step.model_output.shape
    ):
        return step.sample.float() - step.sigma * step.model_output.float()
    return step.latents


class Previews:
    """Previews of one picture. `decode` is the pipeline's own end: latents in, a picture or frames out."""

    def __init__(
        self, kind: Kind, num_points: int, decode: Callable[[torch.Tensor], Image.Image], channels: int = 0
    ) -> None:
        """`channels` of a latent, which tells them from frames; 0: not known."""
        self._kind = kind
        self._channels = channels
        self._num_points = num_points
        self._decode = decode
        self._colours: torch.Tensor | None = None  # [channels + 1, 3]: from latents to red, green and blue
        self.made = 0

    @property
    def is_on(self) -> bool:
        return self._num_points > 0 and self._kind is not Kind.AUDIO

    def is_point(self, number: int, of: int) -> bool:
        """Whether after step `number` of `of` (from 0) one was asked for: evenly spread, none after the last."""
        points = {round((index + 1) * of / (self._num_points + 1)) - 1 for index in range(self._num_points)}
        return number in points and number + 1 < of

    def exact(self, latents: torch.Tensor) -> Image.Image | None:
        """The autoencoder's picture of latents; of a video its first frame."""
        try:
            frame = self._decode(self._first_frame(latents))
            self._learn_colours(latents, frame)
        except Exception as error:  # pipelines raise all sorts for latents they did not make
            log.info("a preview was left out: %s", type(error).__name__)
            return None
        self.made += 1
        return frame

    def rough(self, latents: torch.Tensor, width: int, height: int) -> Image.Image | None:
        """Colours of the latents, as the last exact preview or the latents themselves tell them."""
        cells = _cells(self._first_frame(latents), width, height)
        if cells is None:
            return None
        rows, channels = cells.reshape(-1, cells.shape[-1]).float(), cells.shape[-1]
        if self._colours is not None and len(self._colours) == channels + 1:
            colours = _with_one(rows) @ self._colours
        else:
            colours = _main_parts(rows)
        if not bool(colours.isfinite().all()):
            return None
        pixels = (colours.clamp(0, 1) * 255).round().to(torch.uint8).reshape(*cells.shape[:2], 3)
        picture = Image.fromarray(pixels.numpy())
        scale = ROUGH_SIDE / max(width, height)
        size = (max(1, round(width * min(1.0, scale))), max(1, round(height * min(1.0, scale))))
        return picture.resize(size, Image.Resampling.BILINEAR)

    def _first_frame(self, latents: torch.Tensor) -> torch.Tensor:
        """Of a video [B, C, F, H, W] or [B, F, C, H, W] the first latent frame."""
        if latents.dim() != 5:
            return latents
        is_second = latents.shape[1] != self._channels == latents.shape[2]
        return latents[:, :1] if is_second else latents[:, :, :1]

    def _learn_colours(self, latents: torch.Tensor, frame: Image.Image) -> None:
        """Fit colours to latents, by least squares over the cells of one decoded picture."""
        cells = _cells(self._first_frame(latents), *frame.size)
        if cells is None:
            return
        small = frame.convert("RGB").resize((cells.shape[1], cells.shape[0]), Image.Resampling.BOX)
        wanted = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).reshape(-1, 3) / 255
        rows = _with_one(cells.reshape(-1, cells.shape[-1]).float())[:ROUGH_SAMPLES]
        self._colours = torch.linalg.lstsq(rows, wanted[:ROUGH_SAMPLES], driver="gelsd").solution


def decoder_of(
    pipeline: Any, arguments: Mapping[str, Any], kind: Kind
) -> Callable[[torch.Tensor], Image.Image]:
    """The end of `pipeline(**arguments)` as a function of latents. The pipeline is not touched."""
    ending = copy.copy(pipeline)
    ending.__dict__["scheduler"] = _stepless(pipeline.scheduler)
    ending.set_progress_bar_config(disable=True)

    def decode(latents: torch.Tensor) -> Image.Image:
        given = {**arguments, "latents": latents.clone(), "generator": torch.Generator("cpu").manual_seed(0)}
        made = ending(**given, return_dict=False)[0]
        picture = made[0][0] if kind is Kind.VIDEO else made[0]
        assert isinstance(picture, Image.Image)
        return picture

    return decode


def _stepless(scheduler: Any) -> Any:
    """A scheduler of the same class that has no steps to make, and leaves latents as they are given."""
    kind = type(scheduler)

    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.set_timesteps(self, *args, **kwargs)
        self.timesteps = self.timesteps[:0]

    copied = copy.deepcopy(scheduler)
    copied.__class__ = type(
        kind.__name__,
        (kind,),
        {
            "set_timesteps": functools.wraps(kind.set_timesteps)(set_timesteps),
            "init_noise_sigma": property(lambda self: 1.0, lambda self, value: None),
            "__module__": kind.__module__,
        },
    )
    return copied


def _cells(latents: torch.Tensor, width: int, height: int) -> torch.Tensor | None:
    """Latents of one picture as [rows, columns, channels]; None where it is not known how they lie."""
    first = latents.detach()[0].cpu()
    if first.dim() == 4:
        first = first.squeeze(1) if first.shape[1] == 1 else first.squeeze(0)
    if first.dim() == 3:  # [C, H, W]
        return first.permute(1, 2, 0)
    if first.dim() != 2:
        return None
    tokens = first.shape[0]  # packed: [tokens, channels]
    rows = round((tokens * height / width) ** 0.5)
    return first.reshape(rows, tokens // rows, -1) if rows and tokens % rows == 0 else None


def _with_one(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows, torch.ones(len(rows), 1)], dim=1)


def _main_parts(rows: torch.Tensor) -> torch.Tensor:
    """The three directions in which latents differ most, as colours: shapes are right, colours are not."""
    centred = rows - rows.mean(dim=0)
    wanted = min(3, *centred.shape)
    directions = torch.linalg.svd(centred[:ROUGH_SAMPLES], full_matrices=False).Vh[:wanted]
    parts = centred @ directions.T
    parts = torch.cat([parts] + [parts[:, :1]] * (3 - wanted), dim=1)
    return parts / (4 * parts.std(dim=0, correction=0) + 1e-6) + 0.5
