"""Nodes that hold blocks of a tiny pipeline, and a gateway's engine over them, in one process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from app.engine.diffusion.backend import ChainBackend
from app.engine.diffusion.generation import PipelineEngine
from app.engine.diffusion.model import OpenedPipeline
from app.engine.diffusion.request import WireName
from routing.types import SliceOffer, SliceSpec, WireDtype
from slicing.diffusion.block_range import load_block_range
from tests.integration.home import Home
from tests.node.rig import Node


async def add_picture_node(here: Home, opened: OpenedPipeline, start: int, end: int, **settings: Any) -> Node:
    """A node with blocks [start, end) of the pipeline."""
    blocks = load_block_range(opened.source, start, end)
    offer = SliceOffer(
        opened.facts.name,
        opened.facts.digest,
        opened.facts.num_layers,
        blocks.hidden_size,
        SliceSpec(start, end),
        WireDtype.FLOAT32,
        blocks.form,
        False,
        False,
        confirms=True,
    )
    return await here.rig.add_node(blocks, offer, **settings)


async def picture_nodes(
    here: Home, opened: OpenedPipeline, cuts: Sequence[int] = (), replicas: int = 1, **settings: Any
) -> list[Node]:
    """So many nodes for each range between the cuts; the gateway knows all of them."""
    bounds = (0, *cuts, opened.facts.num_layers)
    nodes = [
        await add_picture_node(here, opened, start, end, **settings)
        for start, end in itertools.pairwise(bounds)
        for _ in range(replicas)
    ]
    await here.know(*nodes)
    return nodes


def engine_over(
    here: Home, opened: OpenedPipeline, *, wire: WireName = "compute", splits_branches: bool = True
) -> PipelineEngine:
    """The gateway's engine over the nodes that it knows."""
    backend = ChainBackend(opened.facts, opened.source.remote, here.switchboard, wire=wire)
    return PipelineEngine(opened, backend, splits_branches=splits_branches)


def sessions_left(here: Home) -> int:
    """Sessions that any node still holds."""
    return sum(node.server.num_sessions for node in here.rig.nodes)
