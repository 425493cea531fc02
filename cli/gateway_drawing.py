"""A gateway as a `Drawer`: pictures and sounds over event streams, videos as jobs that are let go of afterwards."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final
from urllib.parse import quote

from cli.drawing import Drawn, Order, Said, StepTold, Told
from cli.gateway import Gateway, GatewayError, text_of

PICTURE_FORMATS: Final = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
LETTING_GO_S: Final = 5.0  # for cancelling a job when we are interrupted


class GatewayDrawer:
    """Makes things with one model of a gateway."""

    def __init__(self, gateway: Gateway, output: str) -> None:
        self._gateway = gateway
        self.model = gateway.model
        self.output = output

    def draw(self, order: Order, suffix: str) -> AsyncGenerator[Told, None]:
        """Ask the endpoint of what the model makes. Raises GatewayError."""
        match self.output:
            case "image":
                return self._picture(order, suffix)
            case "video":
                return self._video(order)
            case _:
                return self._sound(order, suffix)

    async def _picture(self, order: Order, suffix: str) -> AsyncGenerator[Told, None]:
        body = self._body(order) | {"prompt": order.prompt, "output_format": PICTURE_FORMATS[suffix]}
        body |= {"stream": True, "stream_options": {"include_progress": True}}
        drawn: Drawn | None = None
        async with aclosing(self._gateway.events("images/generations", body)) as events:
            async for event in events:
                if event.get("type") == "image_generation.completed":
                    drawn = _drawn(_bytes(event.get("b64_json")), event, order)
                for told in _progress(event):
                    yield told
        yield _whole(drawn)

    async def _sound(self, order: Order, suffix: str) -> AsyncGenerator[Told, None]:
        body = self._body(order) | {"input": order.prompt, "response_format": suffix.removeprefix(".")}
        body |= {"stream_format": "sse", "stream_options": {"include_progress": True}}
        pieces: list[bytes] = []
        drawn: Drawn | None = None
        async with aclosing(self._gateway.events("audio/speech", body)) as events:
            async for event in events:
                if event.get("type") == "speech.audio.delta":
                    pieces.append(_bytes(event.get("audio")))
                elif event.get("type") == "speech.audio.done":
                    drawn = _drawn(b"".join(pieces), event, order)
                for told in _progress(event):
                    yield told
        yield _whole(drawn)

    async def _video(self, order: Order) -> AsyncGenerator[Told, None]:
        asked = self._body(order) | {"prompt": order.prompt}
        asked |= {"num_frames": order.frames} if order.frames is not None else {}
        job = await self._ordered(asked)
        if not (name := str(job.get("id") or "")):
            raise GatewayError("the gateway's job has no id")
        path = _path_of(name)
        try:
            async for told in self._followed(f"{path}/events"):
                yield told
            content = await self._gateway.fetch(f"{path}/content")
        finally:
            await self._let_go(path)
        yield _drawn(content, job, order)

    async def _ordered(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Make a job. Who is interrupted meanwhile does not know its name yet, and lets go of it all the same."""
        asking = asyncio.ensure_future(self._gateway.post("videos", asked))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            with contextlib.suppress(GatewayError, TimeoutError):
                async with asyncio.timeout(LETTING_GO_S):
                    if name := str((await asking).get("id") or ""):
                        await self._let_go(_path_of(name))
            raise

    async def _followed(self, path: str) -> AsyncGenerator[Told, None]:
        """Tell of a job until it is completed. Raises GatewayError when it is not."""
        job: dict[str, Any] = {}
        step, patches = 0, ""
        async with aclosing(self._gateway.events(path)) as events:
            async for job in events:
                if (number := _number(job.get("step"))) > step:
                    step = number
                    yield StepTold(step, _number(job.get("steps")), _seconds(job.get("seconds_per_step")))
                if (said := str(job.get("patches") or "")) and said != patches:
                    patches = said
                    yield Said(f"patches: {said}")
        if job.get("status") != "completed":
            raise GatewayError(text_of(job.get("error")) or "the gateway's job ended without a video")

    async def _let_go(self, path: str) -> None:
        """Delete the job, done or not: its video is here, or nobody wants it any more."""
        try:
            async with asyncio.timeout(LETTING_GO_S):
                await asyncio.shield(self._gateway.delete(path))
        except (GatewayError, TimeoutError):
            return  # it ends by itself, and goes with its time

    def _body(self, order: Order) -> dict[str, Any]:
        size = {} if order.size is None else {"size": order.size}
        length = {} if order.seconds is None else {"seconds": order.seconds}
        return {"model": self.model} | order.fields() | size | length


def _path_of(name: str) -> str:
    return f"videos/{quote(name, safe='')}"


def _progress(event: dict[str, Any]) -> list[Told]:
    if not str(event.get("type", "")).endswith(".progress"):
        return []
    if (patches := event.get("patches")) is not None:
        return [Said(f"patches: {patches}")]
    if event.get("seconds") is None:
        return []
    return [StepTold(_number(event.get("step")), _number(event.get("steps")), _seconds(event["seconds"]))]


def _drawn(content: bytes, told: dict[str, Any], order: Order) -> Drawn:
    timings = told.get("timings")
    return Drawn(
        content,
        seed=_number(told.get("seed", order.seed)),
        replays=_number(told.get("replays")),
        fingerprint=str(told.get("system_fingerprint") or ""),
        timings=_measured(timings) if isinstance(timings, dict) else {},
    )


def _whole(drawn: Drawn | None) -> Drawn:
    if drawn is None:
        raise GatewayError("the gateway's answer was cut short")
    return drawn


def _bytes(text: Any) -> bytes:
    try:
        return base64.b64decode(str(text or ""), validate=True)
    except (binascii.Error, ValueError):
        raise GatewayError("the gateway sent a file that cannot be read") from None


def _measured(timings: dict[str, Any]) -> dict[str, Any]:
    """What of a gateway's timings are numbers, or lists of numbers."""
    return {
        name: value
        for name, value in timings.items()
        if all(isinstance(one, int | float) for one in (value if isinstance(value, list) else [value]))
    }


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
