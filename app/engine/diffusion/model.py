"""One diffusion model as the gateway opens it: looked up first, then its ends loaded and its blocks stood in for.

Knows no network and no request but for the texts of errors.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from app.engine.coverage import ModelFacts
from app.engine.diffusion.defaults import defaults_of
from app.engine.diffusion.request import DiffusionDefaults, DiffusionRequest, SchedulerOption
from app.engine.diffusion.texts import TextLimits
from app.engine.model import EndsSettings
from app.engine.request import ModelUnavailableError, RequestError
from app.engine.tokenizer import age_of
from routing.errors import DiffuseError
from slicing.buffers import DTYPES
from slicing.diffusion.block_range import fill_block
from slicing.diffusion.calls import UnsupportedArgument
from slicing.diffusion.kinds import Kind
from slicing.diffusion.outside import load_pipeline
from slicing.diffusion.source import PipelineSource, compute_dtype, open_pipeline
from slicing.diffusion.stacks import Stack
from slicing.diffusion.thread import PassSink, ThreadBroken, replace_blocks
from slicing.progress import Progress, no_progress
from slicing.stacks import BUILDING

FAILED_RETRY_S = 60
PIPELINE_PACKAGES = ("diffusers", "transformers", "tokenizers", "torch", "numpy")  # a pipeline's own code
PER_BLOCK_COST = "at one round trip a block"
MAX_OPTION = 100_000  # of a scheduler's numbers: some are lengths of tables, made before anything is checked
MAX_WORDS = 300  # characters of what a pipeline says of a request


@dataclass(frozen=True, slots=True)
class LookedUpPipeline:
    """A diffusion model without its weights."""

    source: PipelineSource
    facts: ModelFacts
    created: int  # Unix seconds


@dataclass(eq=False)
class OpenedPipeline:
    """A stock pipeline whose remote blocks are stand-ins. Never called itself: pictures call copies of its shell."""

    source: PipelineSource
    facts: ModelFacts
    created: int
    pipeline: Any
    sink_of: ContextVar[PassSink]
    dtype: torch.dtype
    threads: int = 1
    is_per_block: bool = False
    defaults: DiffusionDefaults = field(init=False)
    texts: TextLimits = field(init=False)
    ends_lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.defaults = defaults_of(self.pipeline, self.kind)
        self.texts = TextLimits(self.pipeline)

    @property
    def kind(self) -> Kind:
        return self.source.kind

    @property
    def notes(self) -> tuple[str, ...]:
        """What there is to say of every picture."""
        if not self.is_per_block:
            return ()
        return (f"its {self.facts.num_layers} blocks are sent one by one (--per-block), {PER_BLOCK_COST}",)

    @property
    def patch_size(self) -> int | tuple[int, ...]:
        """Latents that one token is made of: along each side, or along time, height and width."""
        size = next(iter(self.source.transformers.values())).config.get("patch_size") or 1
        return size if isinstance(size, int) else tuple(size)

    def new_scheduler(self, options: Mapping[str, SchedulerOption]) -> Any:
        """The pipeline's noise scheduler with other options. Raises `RequestError` for one that it does not have."""
        scheduler = self.pipeline.scheduler
        if not options:
            return scheduler
        known = {name for name in scheduler.config if not name.startswith("_")}
        for name, value in options.items():
            if name not in known:
                raise _bad_option(name, f"{type(scheduler).__name__} has no option {name}", sorted(known))
            if not _fits(value, scheduler.config[name]):
                kind = type(value).__name__
                raise _bad_option(name, f"{name} takes no {kind}, or none above {MAX_OPTION}", ())
        try:
            return type(scheduler).from_config(scheduler.config, **options)
        except Exception as error:  # schedulers raise all sorts for what they do not do
            name = next(iter(options))
            raise _bad_option(name, f"{type(scheduler).__name__} refuses it: {_words(error)}", ()) from error

    def explained(self, error: BaseException, request: DiffusionRequest, num_steps: int) -> BaseException:
        """What ended a picture, in words for clients; what is nobody's mistake but ours stays as it is.

        `num_steps` were done: beyond the first, the request itself was no trouble.
        """
        if isinstance(error, RequestError | ModelUnavailableError | DiffuseError | asyncio.CancelledError):
            return error
        if isinstance(error, ThreadBroken | UnsupportedArgument):
            mends = isinstance(error, ThreadBroken) and not self.is_per_block
            hint = f" in one pass: start the gateway with --per-block, {PER_BLOCK_COST}" if mends else ""
            return ModelUnavailableError(
                "model_failed", f"the model `{self.facts.name}`: {error}{hint}", FAILED_RETRY_S
            )
        if isinstance(error, Exception) and num_steps <= 1 and _is_raised_outside(error):
            return _refusal(error, request, num_steps)
        return error

    def close(self) -> None:
        """Close the files that blocks could be read from."""
        self.source.close()


def look_up_pipeline(
    model: str,
    settings: EndsSettings,
    *,
    name: str | None = None,
    may_fetch: bool = True,
    progress: Progress = no_progress,
) -> LookedUpPipeline:
    """Read what there is to know without weights. Raises ModelError, LoadStopped."""
    source = open_pipeline(model, cache_dir=settings.cache_dir, progress=progress, may_fetch=may_fetch)
    facts = ModelFacts(
        name=name or source.public_name,
        digest=source.digest,
        num_layers=source.num_layers,
        hidden_size=0,
        vocab_size=0,
        max_positions=0,
    )
    assert source.kind  # refuses a pipeline that needs more than a prompt
    return LookedUpPipeline(source, facts, age_of(source.folder))


def load_opened(
    found: LookedUpPipeline, settings: EndsSettings, progress: Progress = no_progress
) -> OpenedPipeline:
    """Load everything but the remote blocks, and put stand-ins in their places. Raises ModelError, LoadStopped."""
    _silence()
    source = found.source
    dtype = (
        compute_dtype(source.dtype, settings.device) if settings.dtype == "auto" else DTYPES[settings.dtype]
    )
    pipeline = load_pipeline(source, dtype=dtype, device=settings.device, progress=progress)
    pipeline.set_progress_bar_config(disable=True)
    sink_of: ContextVar[PassSink] = ContextVar("sink_of")

    def load_block(stack: Stack, number: int) -> nn.Module:
        tensors = source.read_block(stack, number)
        with BUILDING:  # another pipeline's loading changes torch's defaults meanwhile
            return fill_block(stack, number, tensors, dtype=dtype, device=settings.device)

    for component in source.transformers:
        stacks = [stack for stack in source.remote if stack.component == component]
        if stacks:
            model = getattr(pipeline, component)
            replace_blocks(model, stacks, sink_of, load_block, per_block=settings.per_block)
    return OpenedPipeline(
        source,
        found.facts,
        found.created,
        pipeline,
        sink_of,
        dtype,
        settings.threads,
        settings.per_block,
    )


def _silence() -> None:
    """Pipelines log pieces of prompts that they cut; nothing of a prompt belongs into a log."""
    from diffusers.utils import logging

    logging.set_verbosity_error()


def _fits(value: SchedulerOption, known: Any) -> bool:
    if known is None or isinstance(known, list | tuple | dict):
        return known is None
    if isinstance(known, bool) or isinstance(value, bool):
        return isinstance(known, bool) and isinstance(value, bool)
    if isinstance(known, int | float):
        return isinstance(value, int | float) and abs(value) <= MAX_OPTION  # false for NaN
    return isinstance(value, str) and isinstance(known, str)


def _bad_option(name: str, message: str, known: Any) -> RequestError:
    names = f"; it has {', '.join(known)}" if known else ""
    return RequestError(f"scheduler.{name[:64]}", "invalid_value", f"{message[:200]}{names}")


def _is_raised_outside(error: Exception) -> bool:
    """Whether it was a library that refused, at its own check or by breaking, and not code of ours."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    name = str(frames[-1].f_globals.get("__name__", "")) if frames else ""
    return name.partition(".")[0] in PIPELINE_PACKAGES


def _refusal(error: Exception, request: DiffusionRequest, num_steps: int) -> RequestError:
    """A pipeline's own error as a refusal of the field that it is about, as far as that can be told."""
    raised = f"its pipeline raises {type(error).__name__}"
    if num_steps == 1 and request.steps == 1:  # some end with what only schedulers of one step return
        text = f"the model cannot make this in one step: {raised} after it; ask for 2 steps or more"
        return RequestError("steps", "invalid_value", text)
    words, texts = _words(error), (request.prompt, request.negative_prompt or "")
    if not isinstance(error, ValueError) or any(text and text in words for text in texts):
        words = f"{raised}; other steps, sizes or options may do"
    param = "size" if "`height`" in words or "`width`" in words else None
    return RequestError(param, "invalid_value", f"the model cannot make this: {words}")


def _words(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:MAX_WORDS]
