"""What nodes learn of a picture: everything that they decrypt is read, and searched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from app.engine.diffusion.remote_stacks import RemoteStacks
from routing.types import Answer, Message, Step
from slicing.diffusion.calls import Pass
from slicing.diffusion.packing import memory_order
from slicing.diffusion.stacks import Stack
from slicing.diffusion.thread import PassSink
from tests.integration.home import home
from tests.integration.picture_nodes import engine_over, picture_nodes
from tests.support.decrypted import num_found, pieces
from tests.support.opened_pictures import draw, open_tiny, request_for, whole_bytes
from tests.support.tiny_pipelines import PROMPT, TinyPipelines, quiet


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    torch.set_num_threads(1)
    with quiet():
        yield


@pytest.mark.parametrize("name", ["pixart", "wan", "flux"])
async def test_nodes_decrypt_no_token_ids_no_pixels_and_no_latents(
    tiny_pipelines: TinyPipelines, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, request = open_tiny(tiny_pipelines, name), request_for(name)
    whole = tiny_pipelines.whole(name)
    outputs: list[torch.Tensor] = []
    latents: list[torch.Tensor] = []
    streams: list[torch.Tensor] = []

    really_step = type(whole.scheduler).step

    def step(self: Any, model_output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        made = really_step(self, model_output, *args, **kwargs)
        outputs.append(model_output.clone())
        latents.append((made[0] if isinstance(made, tuple) else made.prev_sample).clone())
        return made

    with monkeypatch.context() as patch:
        patch.setattr(type(whole.scheduler), "step", step)
        pixels = whole_bytes(tiny_pipelines, name, opened, request)
    assert len(latents) == request.steps

    really_sink = RemoteStacks.sink

    def sink(self: RemoteStacks, attempt: Any) -> PassSink:
        run = really_sink(self, attempt)

        def watched(stack: Stack, made: Pass) -> list[torch.Tensor]:
            back = run(stack, made)
            streams.extend(stream.permute(memory_order(stream)).clone() for stream in (*made.streams, *back))
            return back

        return watched

    monkeypatch.setattr(RemoteStacks, "sink", sink)
    async with home() as here:
        heard: list[bytes] = []

        def listen(link: Any, message: Message) -> bool:
            if isinstance(message, Step | Answer):
                heard.append(bytes(message.payload))
            return False

        here.rig.network.drop = listen
        await picture_nodes(here, opened, (1,))
        await draw(engine_over(here, opened), request)
    decrypted = b"".join(heard)

    token_ids = torch.tensor(whole.tokenizer(PROMPT).input_ids)
    assert not any(
        token_ids.to(dtype).numpy().tobytes() in decrypted
        for dtype in (torch.int64, torch.int32, torch.int16)
    )
    raster = np.frombuffer(pixels, np.uint8)
    assert num_found(pieces([raster, raster.astype(np.float32) / 255]), decrypted) == 0
    assert num_found(pieces(latents), decrypted) == 0
    assert num_found(pieces(outputs), decrypted) == 0
    # The same search finds what nodes do get: the streams that go in, and come back.
    wanted = pieces(streams, in_both_orders=False)
    assert len(wanted) > 50
    assert num_found(wanted, decrypted) == len(wanted)
