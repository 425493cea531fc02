"""Pictures, videos and sounds as users make them: nodes in processes of their own, real links, a gateway's engine."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Iterator

import pytest
import torch

from app.engine.diffusion.swarm import open_pictures
from app.engine.swarm import SwarmSettings
from cli.membership import read_membership
from cli.options import DEFAULT_NETWORK
from routing.addresses import parse_address
from tests.support.nursery import Nursery
from tests.support.opened_pictures import draw, made_bytes, open_tiny, request_for, whole_bytes
from tests.support.processes import Process, Processes
from tests.support.tiny_pipelines import PIPELINES, TinyPipelines, quiet

pytestmark = pytest.mark.processes
FIRST_PART = 2  # blocks of each model on the first node


@pytest.fixture(scope="module")
def nodes(tiny_pipelines: TinyPipelines, nursery: Nursery) -> Iterator[list[Process]]:
    """Two nodes: the first blocks of every model, and the others."""
    with Processes(nursery) as processes:
        parts: list[list[str]] = [[], []]
        for name in PIPELINES:
            folder, num_layers = tiny_pipelines.folder(name), open_tiny(tiny_pipelines, name).facts.num_layers
            for part, span in zip(parts, ((0, FIRST_PART), (FIRST_PART, num_layers)), strict=True):
                part.append(f"{folder}={span[0]}:{span[1]}")
        yield [
            processes.start_host(first, "", *(flag for model in others for flag in ("--model", model)))
            for first, *others in parts
        ]


@pytest.fixture(autouse=True)
async def _surroundings() -> AsyncIterator[None]:
    torch.set_num_threads(1)
    with warnings.catch_warnings(), quiet():
        yield


@pytest.mark.parametrize("name", PIPELINES)
async def test_every_pipeline_makes_the_bytes_of_the_uncut_one(
    nodes: list[Process], tiny_pipelines: TinyPipelines, name: str
) -> None:
    request = request_for(name)
    settings = SwarmSettings(
        model=str(tiny_pipelines.folder(name)),
        nodes=tuple(parse_address(node.address) for node in nodes),
        network_id=read_membership(DEFAULT_NETWORK, None).network_id,
    )
    async with open_pictures(settings) as opened:
        made = await draw(opened.engine, request)
    hops = [hop for stack in made.stacks for route in stack.routes for hop in route]
    assert {(hop.start, hop.end) for hop in hops} >= {(0, FIRST_PART)}
    assert len({hop.node for hop in hops}) == len(nodes)
    assert made_bytes(made) == whole_bytes(tiny_pipelines, name, open_tiny(tiny_pipelines, name), request)
