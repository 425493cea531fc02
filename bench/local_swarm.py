"""Real node processes and an engine in this process, as `diffuse up` would place them.

Every node keeps to one torch thread: with several processes on two cores, two pools of threads fight.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from app.engine.request import Finished, GenerationRequest, TextDelta
from app.engine.swarm import Swarm, SwarmSettings, open_swarm
from cli.children import Child, Children, thread_environment
from cli.layout import plan_nodes
from cli.membership import read_membership
from cli.options import DEFAULT_NETWORK
from routing.addresses import parse_address
from slicing.sampler import SamplingParams

MODEL = "smollm2"


@dataclass(frozen=True)
class LocalSwarm:
    """Running nodes, what each said when it was ready, and the engine over them."""

    swarm: Swarm
    settings: SwarmSettings
    nodes: tuple[Child, ...]
    ready: tuple[dict[str, Any], ...]


@contextlib.asynccontextmanager
async def local_swarm(
    num_nodes: int,
    *,
    num_layers: int = 30,
    ends: str = "local",
    local_layers: tuple[int, int] = (1, 0),
    pad: bool = False,
    threads: int = 1,
    wire: str = "auto",
    weights: str = "auto",
    kv_budget: int | None = None,
) -> AsyncIterator[LocalSwarm]:
    """Start nodes over `MODEL`, link an engine to them, stop everything on the way out."""
    plans = plan_nodes(num_layers, num_nodes, local_layers=local_layers, is_thin=ends == "remote")
    async with Children() as children:
        nodes = []
        for plan in plans:
            arguments = ["host", "--model", MODEL, "--layers", plan.layers, "--listen", "127.0.0.1:0"]
            arguments += ["--events", "json", "--until-eof", "--threads", str(threads), "--weights", weights]
            arguments += ["--kv-budget", str(kv_budget)] if kv_budget is not None else []
            arguments += ["--hold-ends"] * plan.hold_ends + ["--pad"] * pad
            nodes.append(
                await children.start(
                    plan.name, arguments, on_event=lambda _: None, environment=thread_environment(threads)
                )
            )
        ready = [await node.wait_for("ready") for node in nodes]
        settings = SwarmSettings(
            model=MODEL,
            nodes=tuple(parse_address(event["address"]) for event in ready),
            network_id=read_membership(DEFAULT_NETWORK, None).network_id,
            ends=ends,  # type: ignore[arg-type]
            local_layers=local_layers,
            pad=pad,
            threads=threads,
            wire=wire,  # type: ignore[arg-type]
            weights=weights,  # type: ignore[arg-type]
        )
        async with open_swarm(settings) as swarm:
            yield LocalSwarm(swarm, settings, tuple(nodes), tuple(ready))


def greedy_request(prompt_ids: list[int], num_tokens: int) -> GenerationRequest:
    """A request whose answer is exactly `num_tokens` long."""
    return GenerationRequest(
        request_id="bench",
        model=MODEL,
        prompt_ids=tuple(prompt_ids),
        sampling=SamplingParams(temperature=0.0),
        max_tokens=num_tokens,
    )


async def answer(swarm: Swarm, request: GenerationRequest) -> tuple[str, Finished]:
    """Run one request to its end."""
    text = ""
    async for event in swarm.engine.generate(request):
        if isinstance(event, TextDelta):
            text += event.text
        elif isinstance(event, Finished):
            return text, event
    raise RuntimeError("the answer has no end")


def chat_prompt(swarm: Swarm, text: str) -> list[int]:
    """Prompt ids of one user turn."""
    return list(swarm.engine.tokenizer.render([{"role": "user", "content": text}]))
