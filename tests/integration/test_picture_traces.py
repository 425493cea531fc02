"""Sessions that a picture opens, from threads of its own, belong to the request that asked for it."""

from __future__ import annotations

import torch

from routing.session_trace import BEGIN
from tests.integration.home import home
from tests.integration.picture_nodes import engine_over, picture_nodes
from tests.support.opened_pictures import draw, open_tiny, request_for
from tests.support.tiny_pipelines import TinyPipelines, quiet


async def test_every_branch_of_a_picture_is_traced_with_its_request(tiny_pipelines: TinyPipelines) -> None:
    torch.set_num_threads(1)
    names: list[str] = []

    def begin(name: str) -> None:
        names.append(name)

    with quiet():
        pipeline = open_tiny(tiny_pipelines, "sd3")
        async with home() as here:
            await picture_nodes(here, pipeline, cuts=(1,))
            token = BEGIN.set(begin)  # type: ignore[arg-type]  # None, as where nobody traces
            try:
                await draw(engine_over(here, pipeline), request_for("sd3"))
            finally:
                BEGIN.reset(token)
            assert len(names) == len(set(names)) == 2
