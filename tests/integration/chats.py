"""The production text engine over real node servers and a tiny real model, in one process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from app.engine.ends_queue import EndsQueue
from app.engine.prefix import PrefixCache
from app.engine.request import Finished, GenerationRequest, TextDelta
from app.engine.text import ChainTextEngine, ModelFacts
from app.engine.tokenizer import ChatTokenizer
from routing.types import Message, SliceOffer, SliceSpec, Step, WireDtype
from slicing.model_kind import ModelShape, shape_of
from slicing.runner import Parts, PlainRunner
from slicing.sampler import SamplingParams
from tests.integration.home import Home, home
from tests.node.rig import DIGEST, Node, until

if TYPE_CHECKING:
    from node.tracing import NodeTraces

NUM_LAYERS = 6
HIDDEN_SIZE = 32
VOCAB_SIZE = 300
PROMPT = (7, 90, 31, 200, 5, 64, 12, 8, 44, 101, 3)
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.9, seed=4, presence_penalty=0.7, repetition_penalty=1.2)


@dataclass
class Chat:
    """An engine over nodes; `local` layers are at home, None for the thin mode."""

    here: Home
    engine: ChainTextEngine
    nodes: list[Node]
    ends: EndsQueue | None = None
    prefixes: PrefixCache | None = None
    lost: set[bytes] = field(default_factory=set)  # ids of nodes that died

    async def text(self, **fields: Any) -> tuple[str, Finished]:
        deltas, finished = await self.deltas(**fields)
        return "".join(delta.text for delta in deltas), finished

    async def tokens(self, **fields: Any) -> tuple[list[int], Finished]:
        deltas, finished = await self.deltas(**fields)
        return [token_id for delta in deltas for token_id in delta.token_ids], finished

    async def deltas(self, **fields: Any) -> tuple[list[TextDelta], Finished]:
        deltas: list[TextDelta] = []
        async with aclosing(self.engine.generate(request(**fields))) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    deltas.append(event)
        assert isinstance(event, Finished)
        return deltas, event

    def lose_at(
        self, after: int, doomed: Sequence[Node], counts: Callable[[Step], bool] = lambda step: True
    ) -> None:
        """Cut off one of the doomed nodes: whoever is sent the step that is number `after` of those that count."""
        ids = {node.node_id for node in doomed}
        num_seen = 0

        def lose(link: Any, message: Message) -> bool:
            nonlocal num_seen
            if isinstance(message, Step) and link.peer_id in ids and counts(message):
                num_seen += 1
                if num_seen == after:
                    self.lost.add(link.peer_id)
                    self.here.rig.network.cut_off(link.peer_id)
            return False

        self.here.rig.network.drop = lose

    async def is_freed(self) -> None:
        living = [node for node in self.nodes if node.node_id not in self.lost]
        await until(lambda: not any(node.stats.num_sessions for node in living))
        assert self.here.switchboard.num_chains == 0


def request(**fields: Any) -> GenerationRequest:
    told = {"prompt_ids": PROMPT, "sampling": GREEDY, "max_tokens": 8} | fields
    return GenerationRequest("r", "tiny", **told)


@contextlib.asynccontextmanager
async def chat(
    model: PreTrainedModel,
    tokenizer: ChatTokenizer,
    local: tuple[int, int] | None,
    copies: int = 2,
    runners: Any = PlainRunner,
    secret: bytes = b"",
    guesses: bool = False,
    chunk: int = 3,
    slices: int = 2,
    traces: NodeTraces | None = None,
) -> AsyncIterator[Chat]:
    """Slices with so many copies each; the first and last layers that are `local` at home, None: the thin mode.

    With a `secret`, what earlier answers left is gone on from.
    """
    shape = shape_of(model.config)
    first, last = local or (0, 0)
    middle = SliceSpec(first, shape.num_layers - last)
    size = middle.end - middle.start
    cuts = [middle.start + size * number // slices for number in range(slices + 1)]
    async with home() as here:
        here.rig.traces = traces
        nodes = [
            await _add(here, runners.from_model(model, _parts(start, end, shape, local is None)), start, end)
            for start, end in pairwise(cuts)
            for _ in range(copies)
        ]
        await here.know(*nodes)
        ends = None
        if local is not None:
            held = tuple(p for p in ((0, middle.start), (middle.end, shape.num_layers)) if p[0] < p[1])
            ends = EndsQueue(runners.from_model(model, Parts(held, opening=True, closing=True)), middle)
        facts = ModelFacts(
            "tiny", DIGEST, shape.num_layers, shape.hidden_size, shape.vocab_size, shape.max_positions
        )
        prefixes = None
        if secret:
            has_ends = middle != SliceSpec(0, shape.num_layers)
            prefixes = PrefixCache(secret, DIGEST, has_ends=has_ends, guesses=guesses)
        engine = ChainTextEngine(
            facts, tokenizer, here.switchboard, ends, middle, prefill_chunk=chunk, prefixes=prefixes
        )
        yield Chat(here, engine, nodes, ends, prefixes)
        if ends is not None:
            await ends.close()
        if prefixes is not None:
            prefixes.close()


def _parts(start: int, end: int, shape: ModelShape, is_thin: bool) -> Parts:
    return Parts(((start, end),), opening=is_thin and start == 0, closing=is_thin and end == shape.num_layers)


async def _add(here: Home, runner: PlainRunner, start: int, end: int) -> Node:
    offer = SliceOffer(
        "tiny", DIGEST, runner.num_layers, runner.hidden_size, SliceSpec(start, end), WireDtype.FLOAT32, runner.form,
        has_opening=runner.parts.opening, has_closing=runner.parts.closing,
        confirms=runner.is_invariant, keeps=runner.is_invariant,
    )  # fmt: skip
    return await here.rig.add_node(runner, offer, cache_bytes_per_position=runner.cache_bytes_per_position)
