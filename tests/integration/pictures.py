"""A gateway's sessions of calls in one process, as its engine plays them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from routing.chain import Chain
from routing.recorded import CannotRemake, RecordedStep
from routing.types import Answer
from slicing.diffusion.calls import Pass
from slicing.diffusion.patches import Cut, Mode
from slicing.diffusion.wire import CallHeader, CallReceiver, CallSender, HopVerdict, WireForm
from slicing.errors import CallError
from tests.integration.home import Home
from tests.node.block_rig import ToyBlocks, add_block_node, toy_pass
from tests.node.fake_runner import NUM_LAYERS
from tests.node.rig import Node


class Branch:
    """One session: a stack, a branch, an image."""

    def __init__(self, chain: Chain, number: int = 0, form: WireForm = WireForm.RAW) -> None:
        self.chain = chain
        self.number = number
        self.sender, self.receiver = CallSender(form), CallReceiver()
        self.sent_bytes: list[int] = []
        self.refuses_all_patches = False
        self.verdicts: list[HopVerdict] = []
        self._streams: dict[RecordedStep, list[torch.Tensor]] = {}

    async def send(self, made: Pass, header: CallHeader) -> RecordedStep:
        got: list[list[torch.Tensor]] = []

        def make(is_fresh: bool) -> bytes:
            if header.mode == Mode.PATCH and (is_fresh or self.refuses_all_patches):
                raise CannotRemake
            again = CallHeader(header.mode, header.pass_number, header.cut, header.extrapolate)
            payload = self.sender.pack(again, made, fresh=is_fresh)
            self.sent_bytes.append(len(payload))
            return payload

        def check(answer: Answer) -> str | None:
            try:
                told, streams = self.receiver.unpack_streams(answer.payload, made.streams)
            except CallError as error:
                return str(error)
            self.verdicts = told.verdicts
            got.append(streams)
            return None

        recorded = await self.chain.send_call(make, check)
        self._streams[recorded] = got  # type: ignore[assignment]
        return recorded

    async def take(self, recorded: RecordedStep) -> list[torch.Tensor]:
        got: Any = self._streams.pop(recorded)
        await self.chain.answer(recorded)
        streams: list[torch.Tensor] = got[-1]
        return streams

    async def run(self, number: int, **changes: Any) -> list[torch.Tensor]:
        """Pass `number` of this branch, whole."""
        header = CallHeader(pass_number=number, **changes)
        return await self.take(await self.send(toy_pass(number, branch=self.number), header))

    async def run_patches(self, number: int, cut: Cut) -> list[torch.Tensor]:
        """Pass `number` as patches, all of them under way at once."""
        made = toy_pass(number, branch=self.number)
        sent = [
            await self.send(
                Pass(made.plan, [one.take(made.streams[0])], made.slots), CallHeader(Mode.PATCH, number, one)
            )
            for one in cut.all()
        ]
        return [(await self.take(recorded))[0] for recorded in sent]


async def open_branch(here: Home, number: int = 0, form: WireForm = WireForm.RAW, **options: Any) -> Branch:
    return Branch(await here.open(calls=True, **options), number, form)


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


async def two_of_each(here: Home, *cuts: int) -> list[Node]:
    """Two nodes for each slice between these cuts."""
    ends = (0, *cuts, NUM_LAYERS)
    nodes = [
        await add_block_node(here.rig, start, end)
        for start, end in itertools.pairwise(ends)
        for _ in range(2)
    ]
    await here.know(*nodes)
    return nodes


def blocks_of(node: Node) -> ToyBlocks:
    assert isinstance(node.runner, ToyBlocks)
    return node.runner
