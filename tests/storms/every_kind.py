"""A gateway over a fake of every kind of model, with bounds small enough that a storm meets them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.engine.diffusion.request import DiffusionRequest
from app.engine.request import RequestError
from app.engine.tokenizer import ChatTokenizer
from slicing.diffusion.kinds import Kind
from tests.support.api_server import Served, serve_engines, settles
from tests.support.fake_embeddings import FakeEmbeddings
from tests.support.fake_pictures import SOUNDS, VIDEOS, FakePictures
from tests.support.fake_scribe import FakeScribe
from tests.support.local_engine import ScriptedEngine, saying
from tests.support.tiny_tokenizer import write_tiny_tokenizer

ANSWER = "hello world, the quick brown fox"
# A body that claims more than it sends is given up soon, and pictures of a storm are small: it is about the rules.
BOUNDS: dict[str, Any] = {
    "body_timeout_s": 0.5,
    "max_requests": 64,
    "max_pixels": 512 * 512,
    "max_body_bytes": 4 << 20,
    "max_upload_bytes": 4 << 20,
    "max_recording_s": 5.0,
}


class SmallPictures(FakePictures):
    """Refuses what would take long to make, as models do."""

    def check(self, request: DiffusionRequest) -> None:
        super().check(request)
        if (request.steps or 1) > 20:
            raise RequestError("steps", "invalid_value", "at most 20 steps")
        if (request.seconds or 0) > 2 or (request.num_frames or 1) > 33:
            raise RequestError("seconds", "invalid_value", "at most 2 seconds")


@dataclass
class EveryKind:
    """The gateway, and its engines by the names that requests use."""

    served: Served
    engines: dict[str, Any]

    @property
    def num_open(self) -> int:
        """Answers that engines are making."""
        return sum(engine.num_open for engine in self.engines.values())

    async def is_at_rest(self, *, within_s: float = 5.0) -> None:
        """Wait until nothing runs; raises TimeoutError."""
        await settles(lambda: self.num_open == 0 and self.served.gateway.num_running == 0, within_s=within_s)


@contextlib.asynccontextmanager
async def every_kind(**settings: Any) -> AsyncIterator[EveryKind]:
    """Serve them all until the block is left."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = ChatTokenizer.load(write_tiny_tokenizer(Path(folder)))
        engines = {
            engine.model_name: engine
            for engine in (
                ScriptedEngine(tokenizer, saying(tokenizer, ANSWER)),
                FakeEmbeddings(tokenizer),
                SmallPictures(),
                SmallPictures(Kind.VIDEO, "filmer", VIDEOS),
                SmallPictures(Kind.AUDIO, "composer", SOUNDS),
                FakeScribe(tokenizer),
            )
        }
        async with serve_engines(*engines.values(), **BOUNDS | settings) as served:
            yield EveryKind(served, engines)
