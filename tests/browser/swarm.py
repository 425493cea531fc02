"""A gateway whose engines make up everything, with routes as a swarm has them: what the page is shown in tests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

from app.engine.planned import PlannedHop, RoutePlan
from app.engine.request import (
    Finished,
    GenerationEvent,
    GenerationRequest,
    HopUse,
    ModelStatus,
    RouteHop,
    TextDelta,
    Timings,
)
from app.engine.tokenizer import ChatTokenizer
from slicing.diffusion.kinds import Kind
from tests.support.fake_embeddings import FakeEmbeddings
from tests.support.fake_pictures import FakePictures, fake_sounds
from tests.support.fake_scribe import FakeScribe
from tests.support.local_engine import ScriptedEngine

ANSWER = """Three rivers of **Europe**:

1. The *Danube*, from the Black Forest to the Black Sea
2. The Rhine, which passes `Basel` and Cologne
3. The Loire

```python
for river in ("Danube", "Rhine"):
    print(river)
```

> A river is never the same twice.

<b>This is not bold</b><script>window.broken = 1</script><img src=x onerror="window.broken = 1">
See [its source](https://example.org/rivers) and ![a picture](https://example.org/r.png).
"""
ROUTE = (
    RouteHop("0a1b2c3d", 1, 11),
    RouteHop("4e5f6a7b", 11, 21, is_relayed=True),
    RouteHop("8c9dae0f", 21, 30),
)
STEP = Timings(compute_s=0.011, network_s=0.024, queue_s=0.002, crypto_s=0.0006, local_s=0.003)


@dataclass
class Talker(ScriptedEngine):
    """A scripted engine that takes its time, and tells where it went."""

    pause_s: float = 0.02
    plan: RoutePlan | None = None
    takes: tuple[str, ...] = ("text",)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.before_token = self._pause

    async def _pause(self, number: int) -> None:
        if number >= 0:
            await asyncio.sleep(self.pause_s)

    async def generate(self, request: GenerationRequest) -> Any:
        count = 0
        event: GenerationEvent
        async for event in super().generate(request):
            if isinstance(event, TextDelta):
                count += 1
                yield replace(event, timings=_timings(count))
            elif isinstance(event, Finished):
                yield replace(event, timings=_timings(count), route=ROUTE, hops=USES)
            else:
                yield event


USES = tuple(HopUse(hop, 40, 0.15, 0.02, 0.006, 0.3) for hop in ROUTE)


def _timings(count: int) -> Timings:
    wobble = [1.0, 1.2, 0.9, 1.4, 1.0, 0.8][count % 6]
    each = 0.0406
    return Timings(
        total_s=0.3 + each * count,
        prefill_s=0.3,
        decode_s=each * count,
        tokens=count,
        compute_s=STEP.compute_s * count,
        network_s=STEP.network_s * (count + wobble),
        crypto_s=STEP.crypto_s * count,
        queue_s=STEP.queue_s * count,
        local_s=STEP.local_s * count,
    )


def plan() -> RoutePlan:
    hops = tuple(
        PlannedHop(hop, rtt, ms, queue, number != 2, "float32", "fast/bf16")
        for number, (hop, rtt, ms, queue) in enumerate(
            zip(ROUTE, (1.2, 38.5, 4.7), (0.42, 0.61, 0.38), (0.2, 1.4, 0.1), strict=True)
        )
    )
    replicas = (0, *(2 if layer < 8 else 1 if layer < 21 else 3 for layer in range(1, 30)))
    return RoutePlan(30, hops, home=((0, 1),), replicas=replicas, expected_ms=41.7)


def picture_plan() -> RoutePlan:
    hops = (
        PlannedHop(
            RouteHop("77aa88bb", 0, 8),
            1.9,
            6.1,
            0.3,
            True,
            "float32",
            "plain/fp32",
            "transformer.transformer_blocks",
        ),
    )
    return RoutePlan(8, hops, replicas=(1,) * 8, expected_ms=52.0)


@dataclass
class Painter(FakePictures):
    """Pictures that take their time."""

    plan: RoutePlan | None = None
    pause_s: float = 0.4

    def __post_init__(self) -> None:
        self.before_step = lambda number: asyncio.sleep(self.pause_s if number >= 0 else 0)


def engines(tokenizer: ChatTokenizer, answer: str = ANSWER, *, pause_s: float = 0.02) -> list[Any]:
    """One engine of each kind that the page knows, and one without a whole route."""
    from tests.support.local_engine import saying

    script = saying(tokenizer, answer)
    talker = Talker(tokenizer, script, model_name="smollm2", max_positions=4096, plan=plan(), pause_s=pause_s)
    seer = Talker(
        tokenizer,
        saying(tokenizer, "the quick brown fox"),
        model_name="seer",
        max_positions=4096,
        takes=("text", "image", "audio"),
        pause_s=pause_s,
    )
    broken = ScriptedEngine(
        tokenizer, script, model_name="half-a-model", status=ModelStatus("partial", 30, ((10, 17),))
    )
    scribe = FakeScribe(tokenizer)
    scribe.takes = ("audio",)  # type: ignore[attr-defined]
    return [
        talker,
        seer,
        Painter(Kind.PICTURE, "tiny-pictures", plan=picture_plan()),
        fake_sounds("composer"),
        scribe,
        FakeEmbeddings(tokenizer, model_name="librarian"),
        broken,
    ]
