"""The production engine for vectors over real node servers and a small stock model, in one process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, PreTrainedModel

from app.engine.coverage import ModelFacts
from app.engine.embedding import ChainEmbeddingEngine, new_engine
from app.engine.embedding_request import Embedded, EmbeddingFinished, EmbeddingRequest, Vector
from app.engine.ends_queue import EndsQueue
from app.engine.model import EndsSettings, LookedUp
from app.engine.opened import Opened
from app.engine.tokenizer import ChatTokenizer
from routing.types import SliceOffer, SliceSpec, WireDtype
from slicing.checkpoint import Checkpoint, open_folder
from slicing.model_kind import ModelShape, shape_of
from slicing.runner import Parts, PlainRunner
from slicing.sentence_files import SentenceFiles, read_sentence_files
from tests.integration.home import Home, home
from tests.node.rig import DIGEST, Node, until


@dataclass
class SmallModel:
    """A whole stock model in memory, and the same as it is opened from its folder."""

    whole: PreTrainedModel
    checkpoint: Checkpoint
    files: SentenceFiles

    @classmethod
    def open(cls, folder: Path) -> SmallModel:
        checkpoint = open_folder(folder)
        whole = AutoModel.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
        whole.config.architectures = checkpoint.config.architectures
        return cls(whole, checkpoint, read_sentence_files(folder, checkpoint.config))

    @property
    def shape(self) -> ModelShape:
        return shape_of(self.checkpoint.config)

    def stock(self, ids: tuple[int, ...]) -> Vector:
        """What the stock class makes of a text, run whole and pooled."""
        with torch.inference_mode():
            return self._pooled(self.whole(input_ids=torch.tensor([ids])).last_hidden_state[0])

    def uncut(self, ids: tuple[int, ...], chunk: int | None = None) -> Vector:
        """What the uncut model makes of it under our plain runner, in the chunks in which it is sent."""
        runner = PlainRunner.from_model(self.whole, Parts.whole(self.shape.num_layers))
        cache, rows = runner.new_cache(), []
        for start in range(0, len(ids), chunk or len(ids)):
            piece = torch.tensor(ids[start : start + (chunk or len(ids))])
            rows.append(runner.run_whole(cache, piece, start, keep=range(len(piece))))
        return self._pooled(torch.cat(rows))

    def _pooled(self, states: torch.Tensor) -> Vector:
        recipe = self.files.recipe
        made: Vector = recipe.vector(states[list(recipe.pooling.rows_of(len(states)))]).numpy()
        return made


@dataclass
class Vectors:
    """An engine over nodes."""

    here: Home
    engine: ChainEmbeddingEngine
    nodes: list[Node]
    lost: set[bytes] = field(default_factory=set)  # ids of nodes that died

    async def make(self, *texts: tuple[int, ...], **fields: Any) -> tuple[list[Vector], EmbeddingFinished]:
        """Vectors in the order of the texts, and how it ended."""
        made: dict[int, Vector] = {}
        async with aclosing(self.engine.embed(request(*texts, **fields))) as events:
            async for event in events:
                if isinstance(event, Embedded):
                    made[event.index] = event.vector
        assert isinstance(event, EmbeddingFinished)
        assert len(made) == len(texts)
        return [made[number] for number in range(len(texts))], event

    async def is_freed(self) -> None:
        living = [node for node in self.nodes if node.node_id not in self.lost]
        await until(lambda: not any(node.stats.num_sessions for node in living))
        assert self.here.switchboard.num_chains == 0
        assert self.engine.num_running == 0


def request(*texts: tuple[int, ...], **fields: Any) -> EmbeddingRequest:
    return EmbeddingRequest("r", "tiny", texts, **fields)


@contextlib.asynccontextmanager
async def vectors(
    model: SmallModel,
    local: tuple[int, int] | None = (1, 0),
    *,
    slices: int = 2,
    copies: int = 1,
    chunk: int = 5,
    **settings: Any,
) -> AsyncIterator[Vectors]:
    """So many slices with so many copies each; the `local` layers at home, None: the thin mode.

    `settings` are those of the nodes.
    """
    shape = model.shape
    first, last = local or (0, 0)
    middle = SliceSpec(first, shape.num_layers - last)
    size = middle.end - middle.start
    cuts = [middle.start + size * number // slices for number in range(slices + 1)]
    encoding = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))
    async with home() as here:
        nodes = [
            await _add(
                here,
                PlainRunner.from_model(model.whole, _parts(start, end, shape, local is None)),
                start,
                end,
                **settings,
            )
            for start, end in pairwise(cuts)
            for _ in range(copies)
        ]
        await here.know(*nodes)
        ends = None
        if local is not None:
            held = tuple(p for p in ((0, middle.start), (middle.end, shape.num_layers)) if p[0] < p[1])
            ends = EndsQueue(
                PlainRunner.from_model(model.whole, Parts(held, opening=True, closing=True)), middle
            )
        facts = ModelFacts(
            "tiny", DIGEST, shape.num_layers, shape.hidden_size, shape.vocab_size, shape.max_positions
        )
        opened = Opened(
            LookedUp(model.checkpoint, facts, middle, 0, shape),
            EndsSettings(ends="remote" if local is None else "local", prefill_chunk=chunk),
            here.switchboard,
            ChatTokenizer.load(model.checkpoint.folder),
            ends,
            encoding,
            home=model.files,
        )
        yield Vectors(here, new_engine(opened), nodes)
        if ends is not None:
            await ends.close()
    encoding.shutdown()


def _parts(start: int, end: int, shape: ModelShape, is_thin: bool) -> Parts:
    return Parts(((start, end),), opening=is_thin and start == 0, closing=is_thin and end == shape.num_layers)


async def _add(here: Home, runner: PlainRunner, start: int, end: int, **settings: Any) -> Node:
    offer = SliceOffer(
        "tiny", DIGEST, runner.num_layers, runner.hidden_size, SliceSpec(start, end), WireDtype.FLOAT32, runner.form,
        has_opening=runner.parts.opening, has_closing=runner.parts.closing,
        confirms=True, keeps=runner.is_invariant,
    )  # fmt: skip
    each = runner.cache_bytes_per_position
    return await here.rig.add_node(runner, offer, cache_bytes_per_position=each, **settings)


def texts_of(*lengths: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Random texts of these lengths, none of their tokens special."""
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(4, 320, length).tolist()) for length in lengths]
