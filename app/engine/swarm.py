"""A text engine and everything under it: checkpoint, ends, links, directory; opened and closed as one.

The gateway keeps one of these per model; `diffuse query` opens one for a single answer. Builds objects, decides
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from app.engine.text import PREFILL_CHUNK, ChainTextEngine, ModelFacts
from app.engine.tokenizer import ChatTokenizer
from routing.directory import StaticDirectory
from routing.endpoint import Endpoint
from routing.errors import SettingsError
from routing.identity import Identity
from routing.switchboard import Switchboard
from routing.types import Capabilities, NodeAddress, SliceSpec, WireDtype
from slicing.buffers import DTYPES
from slicing.checkpoint import Checkpoint
from slicing.miniature import check_cut
from slicing.model_source import open_checkpoint
from slicing.progress import Progress, StoppableProgress, no_progress
from slicing.runner import Parts, PlainRunner, max_positions

FIRST_LOOK_S = 6.0  # how long a start waits for nodes that do not answer before it says what is missing


@dataclass(frozen=True, slots=True)
class SwarmSettings:
    """One model over one list of nodes. `local_layers` are the first K and last J layers kept at home."""

    model: str
    nodes: tuple[NodeAddress, ...]
    network_id: bytes
    name: str | None = None
    ends: Literal["local", "remote"] = "local"
    local_layers: tuple[int, int] = (1, 0)
    wire: Literal["auto", "bf16"] = "auto"
    psk: bytes | None = field(default=None, repr=False)
    pad: bool = False
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "cpu"
    threads: int = 1
    prefill_chunk: int = PREFILL_CHUNK
    max_positions: int | None = None
    cache_dir: Path | None = None


@dataclass(frozen=True, slots=True)
class Swarm:
    """An open engine with the parts that operations look at."""

    engine: ChainTextEngine
    checkpoint: Checkpoint
    endpoint: Endpoint
    directory: StaticDirectory
    switchboard: Switchboard
    load_s: float


@contextlib.asynccontextmanager
async def open_swarm(
    settings: SwarmSettings, *, progress: Progress = no_progress, wait_for_nodes: bool = True
) -> AsyncIterator[Swarm]:
    """Load the ends, link to the nodes and yield the engine; links are closed on the way out.

    Raises ModelError (slicing) when the model cannot be opened or cut, SettingsError for settings that contradict it.
    """
    async with contextlib.AsyncExitStack() as stack:
        loading = StoppableProgress(progress)
        compute = ThreadPoolExecutor(
            1, thread_name_prefix="ends", initializer=torch.set_num_threads, initargs=(settings.threads,)
        )
        stack.push_async_callback(_shut_down, compute)
        stack.callback(loading.stop)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        checkpoint, facts = await loop.run_in_executor(compute, _open_checkpoint, settings, loading)
        middle = middle_layers(settings, facts.num_layers)
        runner, tokenizer = await loop.run_in_executor(
            compute, _load_ends, settings, checkpoint, middle, loading
        )
        load_s = loop.time() - begun

        switchboard = Switchboard()
        endpoint = Endpoint(
            Identity.generate(),
            settings.network_id,
            Capabilities,
            switchboard,
            psk=settings.psk,
            pad=settings.pad,
        )
        stack.push_async_callback(endpoint.close)
        directory = StaticDirectory(endpoint, settings.nodes)
        switchboard.connect(endpoint, directory)
        keeping = asyncio.create_task(directory.run())
        stack.push_async_callback(_stop, keeping)
        if wait_for_nodes:
            await directory.first_look(FIRST_LOOK_S)
        engine = ChainTextEngine(
            facts,
            tokenizer,
            switchboard,
            compute,
            runner,
            middle,
            wire=WireDtype.BFLOAT16 if settings.wire == "bf16" else None,
            prefill_chunk=settings.prefill_chunk,
        )
        yield Swarm(engine, checkpoint, endpoint, directory, switchboard, load_s)


def middle_layers(settings: SwarmSettings, num_layers: int) -> SliceSpec:
    """The layers that nodes run. Raises SettingsError when home would hold more layers than there are."""
    if settings.ends == "remote":
        return SliceSpec(0, num_layers)
    first, last = settings.local_layers
    if first < 0 or last < 0 or first + last > num_layers:
        raise SettingsError(f"local layers {first}:{last} do not fit a model of {num_layers} layers")
    if first + last == num_layers:
        raise SettingsError(f"local layers {first}:{last} leave none of {num_layers} layers for a node")
    return SliceSpec(first, num_layers - last)


def _open_checkpoint(settings: SwarmSettings, progress: Progress) -> tuple[Checkpoint, ModelFacts]:
    checkpoint = open_checkpoint(settings.model, cache_dir=settings.cache_dir, progress=progress)
    check_cut(checkpoint.config)
    return checkpoint, _facts(settings, checkpoint)


def _load_ends(
    settings: SwarmSettings, checkpoint: Checkpoint, middle: SliceSpec, progress: Progress
) -> tuple[PlainRunner | None, ChatTokenizer]:
    tokenizer = ChatTokenizer.load(checkpoint.folder)
    if settings.ends == "remote":
        return None, tokenizer
    num_layers = checkpoint.config.num_hidden_layers
    held = tuple(part for part in ((0, middle.start), (middle.end, num_layers)) if part[0] < part[1])
    parts = Parts(layers=held, opening=True, closing=True)
    dtype = _compute_dtype(settings, checkpoint)
    runner = PlainRunner.load(checkpoint, parts, dtype=dtype, device=settings.device, progress=progress)
    runner.widen_head()
    return runner, tokenizer


def _compute_dtype(settings: SwarmSettings, checkpoint: Checkpoint) -> torch.dtype:
    """Float32 on a CPU (exact, and its fastest), the checkpoint's own on an accelerator."""
    if settings.dtype == "auto":
        return torch.float32 if settings.device == "cpu" else checkpoint.dtype
    return DTYPES[settings.dtype]


def _facts(settings: SwarmSettings, checkpoint: Checkpoint) -> ModelFacts:
    config = checkpoint.config
    limit = max_positions(config)
    return ModelFacts(
        name=settings.name or checkpoint.public_name,
        digest=checkpoint.digest,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_positions=min(limit, settings.max_positions or limit),
    )


async def _shut_down(compute: ThreadPoolExecutor) -> None:
    """Let the running job end without holding up the loop."""
    await asyncio.to_thread(compute.shutdown, wait=True, cancel_futures=True)


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
