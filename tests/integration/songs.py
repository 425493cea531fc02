"""The production music engine over real node servers and a tiny stock MusicGen, in one process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import ClassifierFreeGuidanceLogitsProcessor
from transformers.modeling_outputs import BaseModelOutput

from app.engine.coverage import ModelFacts
from app.engine.diffusion.request import DiffusionEvent, DiffusionRequest, Made
from app.engine.ends_queue import EndsQueue
from app.engine.model import EndsSettings, LookedUp
from app.engine.music import MusicEngine, new_engine
from app.engine.opened import Opened
from routing.types import SliceOffer, SliceSpec, WireDtype
from slicing.checkpoint import Checkpoint, open_folder
from slicing.model_kind import shape_of
from slicing.music import MusicHome, load_home
from slicing.runner import Parts, PlainRunner
from slicing.sampler import Sampler, SamplingParams
from tests.integration.home import Home, home
from tests.node.rig import DIGEST, Node, until
from tests.support.tiny_sound import FRAME_RATE, HIDDEN_SIZE, VOCAB_SIZE, save_music, tiny_music

PROMPT = "rain on a tin roof"
NUM_LAYERS = 4
NUM_FRAMES = 14
SECONDS = NUM_FRAMES / FRAME_RATE
GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_k": 12, "seed": 5}


@dataclass
class TinyMusic:
    """A whole model in memory, the same in a folder, and what of it never leaves home."""

    whole: Any  # a MusicgenForConditionalGeneration
    checkpoint: Checkpoint
    parts: MusicHome
    _runners: dict[tuple[Parts, int], PlainRunner] = field(default_factory=dict)

    def runner(self, parts: Parts, copy: int) -> PlainRunner:
        """One for each node that has these parts; the same in every test, for building one takes long."""
        if (parts, copy) not in self._runners:
            self._runners[parts, copy] = PlainRunner.from_model(self.whole, parts)
        return self._runners[parts, copy]

    @classmethod
    def build(cls, folder: Path, channels: int = 1, **changes: Any) -> TinyMusic:
        whole = tiny_music(channels=channels, num_hidden_layers=NUM_LAYERS, **changes)
        checkpoint = open_folder(save_music(whole, folder))
        return cls(whole, checkpoint, load_home(checkpoint, dtype=torch.float32))

    def greedy(self, num_frames: int = NUM_FRAMES, scale: float = 3.0) -> np.ndarray[Any, Any]:
        """What stock `generate` makes. [channels, samples]"""
        ids = torch.tensor([self.parts.token_ids(PROMPT)])
        with torch.inference_mode():
            made = self.whole.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                guidance_scale=scale,
                max_length=self.parts.form.places_in(num_frames),
            )
        samples: np.ndarray[Any, Any] = made[0].numpy()
        return samples

    def drawn(self, params: SamplingParams, scale: float = 3.0) -> np.ndarray[Any, Any]:
        """What the uncut stock model makes with our sampler. [channels, samples]"""
        form, whole = self.parts.form, self.whole
        samplers = [
            Sampler(SamplingParams(**vars(params) | {"stream": stream}), VOCAB_SIZE)
            for stream in range(form.num_streams)
        ]
        length = form.places_in(NUM_FRAMES)
        first = torch.full((form.num_streams, 1), form.pad_id)
        ids, pattern = whole.decoder.build_delay_pattern_mask(first, form.pad_id, length)
        text = torch.tensor([self.parts.token_ids(PROMPT)])
        mask = torch.ones_like(text)
        guide: Any = ClassifierFreeGuidanceLogitsProcessor(scale) if scale > 1 else None  # type: ignore[no-untyped-call]
        with torch.inference_mode():
            read = whole.text_encoder(input_ids=text, attention_mask=mask).last_hidden_state
            if guide is not None:
                read, mask = (
                    torch.cat([read, torch.zeros_like(read)]),
                    torch.cat([mask, torch.zeros_like(mask)]),
                )
            for place in range(1, length):
                fed = whole.decoder.apply_delay_pattern_mask(ids, pattern)
                logits = whole(
                    encoder_outputs=BaseModelOutput(last_hidden_state=read),
                    attention_mask=mask,
                    decoder_input_ids=fed.repeat(len(mask), 1),
                ).logits[:, -1]
                guided = logits if guide is None else guide(ids, logits)
                drawn = [sampler.sample(row, place) for sampler, row in zip(samplers, guided, strict=True)]
                ids = torch.cat([ids, torch.tensor(drawn)[:, None]], dim=1)
            codes = whole.decoder.apply_delay_pattern_mask(ids, pattern)
            codes = codes[codes != form.pad_id].reshape(1, 1, form.num_streams, -1)
            sides = [
                whole.audio_encoder.decode(codes[:, :, side :: form.channels], [None]).audio_values
                for side in range(form.channels)
            ]
        return torch.cat(sides, dim=1)[0].numpy()


@dataclass
class Songs:
    """An engine over nodes."""

    here: Home
    engine: MusicEngine
    nodes: list[Node]
    ends: EndsQueue | None = None
    lost: set[bytes] = field(default_factory=set)  # ids of nodes that died

    async def events(self, **fields: Any) -> list[DiffusionEvent]:
        async with aclosing(self.engine.generate(request(**fields))) as events:
            return [event async for event in events]

    async def song(self, **fields: Any) -> Made:
        made = (await self.events(**fields))[-1]
        assert isinstance(made, Made)
        return made

    async def is_freed(self) -> None:
        living = [node for node in self.nodes if node.node_id not in self.lost]
        await until(lambda: not any(node.stats.num_sessions for node in living))
        assert self.here.switchboard.num_chains == 0


def request(**fields: Any) -> DiffusionRequest:
    told: dict[str, Any] = {"prompt": PROMPT, "seconds": SECONDS} | fields
    return DiffusionRequest("r", "tiny", **told)


Runners = Callable[[Parts, int], Any]  # makes the runner of a copy of some parts


@contextlib.asynccontextmanager
async def songs(
    music: TinyMusic,
    local: tuple[int, int] | None,
    *,
    slices: int = 2,
    copies: int = 1,
    runners: Runners | None = None,
    kv_budget_bytes: int = 1 << 30,
) -> AsyncIterator[Songs]:
    """So many slices with so many copies each; the `local` layers at home, None: the thin mode."""
    new_runner = runners or music.runner
    first, last = local or (0, 0)
    middle = SliceSpec(first, NUM_LAYERS - last)
    cuts = [middle.start + len_of(middle) * number // slices for number in range(slices + 1)]
    encoding = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))
    async with home() as here:
        nodes = [
            await _add(here, new_runner(_parts(start, end, local is None), copy), start, end, kv_budget_bytes)
            for start, end in pairwise(cuts)
            for copy in range(copies)
        ]
        await here.know(*nodes)
        ends = None
        if local is not None:
            held = tuple(p for p in ((0, middle.start), (middle.end, NUM_LAYERS)) if p[0] < p[1])
            ends = EndsQueue(new_runner(Parts(held, opening=True, closing=True), 0), middle)
        shape = shape_of(music.checkpoint.config)
        facts = ModelFacts("tiny", DIGEST, NUM_LAYERS, HIDDEN_SIZE, VOCAB_SIZE, shape.max_positions)
        found = LookedUp(music.checkpoint, facts, middle, 0, shape)
        opened = Opened(
            found,
            EndsSettings(ends="remote" if local is None else "local"),
            here.switchboard,
            None,
            ends,
            encoding,
            home=music.parts,
        )
        yield Songs(here, new_engine(opened), nodes, ends)
        if ends is not None:
            await ends.close()
    encoding.shutdown()


def len_of(spec: SliceSpec) -> int:
    return spec.end - spec.start


def _parts(start: int, end: int, is_thin: bool) -> Parts:
    return Parts(((start, end),), opening=is_thin and start == 0, closing=is_thin and end == NUM_LAYERS)


async def _add(here: Home, runner: Any, start: int, end: int, kv_budget_bytes: int) -> Node:
    offer = SliceOffer(
        "tiny", DIGEST, NUM_LAYERS, HIDDEN_SIZE, SliceSpec(start, end), WireDtype.FLOAT32, runner.form,
        has_opening=runner.parts.opening, has_closing=runner.parts.closing,
        confirms=runner.is_invariant, keeps=runner.is_invariant,
    )  # fmt: skip
    return await here.rig.add_node(
        runner,
        offer,
        cache_bytes_per_position=runner.cache_bytes_per_position,
        kv_budget_bytes=kv_budget_bytes,
    )
