"""What every endpoint of one gateway shares: settings, models by name, metrics, and who is being answered.

Built once in `main.py`. Bounds the answers that run at once, and ends them when the gateway is told to stop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from starlette.types import Scope

from app.api.errors import ApiError, describe, from_exception, invalid, not_ready, unavailable
from app.api.scope import endpoint_of, request_id_of
from app.engine.request import AnyEngine, KnownModel, Library, ModelStatus, TextEngine
from app.metrics import GatewayMetrics
from app.records import Records
from app.settings import GatewaySettings

if TYPE_CHECKING:
    from app.engine.diffusion.request import DiffusionEngine
    from slicing.diffusion.kinds import Kind

log = logging.getLogger(__name__)

MAX_NAMES = 20  # of models, in the text of a 404
OVERLOAD_RETRY_S = 2
LOADING_RETRY_S = 5
RETURN_POLL_S = 0.05

# What models of a kind make, and who is asked for it. By value: no start waits for what the kinds import.
CHAT = ("text", "/v1/chat/completions")
EMBEDDINGS = ("embeddings", "/v1/embeddings")
MAKES = {
    "text": CHAT,
    "multimodal": CHAT,
    "seq2seq": CHAT,
    "speech": ("text of recordings", "/v1/audio/transcriptions"),
    "encoder": EMBEDDINGS,
    "embedding": EMBEDDINGS,
    "picture": ("pictures", "/v1/images/generations"),
    "video": ("videos", "/v1/videos"),
    "audio": ("sounds", "/v1/audio/speech"),
    "music": ("music", "/v1/audio/speech"),
}
CHAT_KINDS = frozenset(kind for kind, made in MAKES.items() if made is CHAT)


class Gateway:
    """One gateway: its models and its running answers."""

    def __init__(self, settings: GatewaySettings, library: Library, metrics: GatewayMetrics) -> None:
        self.settings = settings
        self.library = library
        self.metrics = metrics
        self.records = Records()
        self.num_running = 0  # choices being generated
        self.num_waiting = 0  # requests whose model is being loaded
        self.is_loading = False  # models are on their way: an unknown one may yet come
        self.is_draining = False
        self.stop = asyncio.Event()  # set: running answers end with an error
        self._idle = asyncio.Event()
        self._idle.set()

    def model(self, asked: str) -> KnownModel:
        """Return the model behind an id or alias. Raises `ApiError` 404 that names the ids, 503 while loading."""
        alias_of = self.settings.model_aliases.get(asked, "")
        known = self.library.find(asked) or self.library.find(alias_of)
        if known is None and self.is_loading:
            raise unavailable("model_loading", "the model is still loading", LOADING_RETRY_S)
        if known is None:
            raise self._not_found(asked, alias_of)
        return known

    def listed(self) -> list[KnownModel]:
        """Every model that clients are shown."""
        return [known for known in self.library.models() if known.is_listed]

    async def ready_engine(self, asked: str) -> TextEngine:
        """Return a text engine if a whole route exists now, loading its ends if need be, for a bounded time.

        Raises `ApiError` 400 for a model that makes no text, 404 or 503, or `ModelUnavailableError`.
        """
        return cast("TextEngine", await self.ready(asked, CHAT_KINDS))

    async def ready_diffusion(self, asked: str | None, kind: Kind) -> DiffusionEngine:
        """Return the engine of a model that makes this kind of thing, as `ready_engine` does.

        Without a name it is the first that is listed. Raises as `ready_engine` does.
        """
        endpoint = MAKES[kind.value][1]
        kinds = frozenset(other for other, (_, served) in MAKES.items() if served == endpoint)
        return cast("DiffusionEngine", await self.ready(asked, kinds))

    async def ready(self, asked: str | None, kinds: frozenset[str]) -> AnyEngine:
        """Return the engine of a model of one of these kinds, as `ready_engine` does.

        Without a name it is the first that is listed. Raises as `ready_engine` does.
        """
        known = self._of_kind(asked, kinds)
        with self._waiting():
            status = await _covered(lambda: self.model(known.name).status)
        if status.state in ("partial", "failed"):
            raise not_ready(known.name, status)
        engine = await self._opened(known.name)
        with self._waiting():
            status = await _covered(engine.coverage)
        if not status.is_ready:  # nodes may have left while it was loaded
            raise not_ready(known.name, status)
        return engine

    async def opened(self, asked: str | None, kinds: frozenset[str]) -> AnyEngine:
        """Return an engine as `ready` does, also while it has no route: for what needs no node."""
        return await self._opened(self._of_kind(asked, kinds).name)

    def _of_kind(self, asked: str | None, kinds: frozenset[str]) -> KnownModel:
        known = self.model(asked if asked is not None else self._first_of(kinds))
        if known.kind not in kinds:
            makes, endpoint = MAKES[known.kind]
            raise invalid("model", f"the model `{known.name}` makes {makes}; POST {endpoint} asks it")
        return known

    @contextmanager
    def admit(self, num_choices: int) -> Iterator[None]:
        """Hold places for the choices of one request. Raises `ApiError` 503 when there are none."""
        if self.is_draining:
            raise unavailable("shutting_down", "the gateway is shutting down", OVERLOAD_RETRY_S)
        if self.num_running + num_choices > self.settings.max_requests:
            message = f"{self.num_running} answers are running, the most this gateway gives at once"
            raise unavailable("overloaded", message, OVERLOAD_RETRY_S)
        self.num_running += num_choices
        self._idle.clear()
        try:
            yield
        finally:
            self.num_running -= num_choices
            if self.num_running == 0:
                self._idle.set()

    def failure(self, scope: Scope, error: Exception) -> ApiError:
        """Translate an error that ends a request, count it, and log it when it is our own bug."""
        request_id = request_id_of(scope)
        failure = from_exception(error, request_id)
        endpoint = endpoint_of(scope)
        self.metrics.count_error(endpoint, failure.code or str(failure.status))
        if failure.code == "internal_error":
            log.error("request %s: %s failed: %s", request_id, endpoint, describe(error))
        return failure

    async def drain(self) -> None:
        """Refuse new requests, let running answers finish for `drain_s`, then end them with an error."""
        self.is_draining = True
        try:
            async with asyncio.timeout(self.settings.drain_s):
                await self._idle.wait()
        except TimeoutError:
            self.stop.set()
            await self._idle.wait()

    async def _opened(self, name: str) -> AnyEngine:
        """Wait for a model's ends, with few others and not for long."""
        try:
            with self._waiting():
                async with asyncio.timeout(self.settings.load_wait_s):
                    return await self.library.engine(name)
        except TimeoutError:
            message = f"the model `{name}` is still loading"
            raise unavailable("model_loading", message, LOADING_RETRY_S) from None

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """A place among those that wait for a model. Raises `ApiError` 503 when there is none."""
        if self.is_draining:
            raise unavailable("shutting_down", "the gateway is shutting down", OVERLOAD_RETRY_S)
        if self.num_waiting >= self.settings.max_requests:
            message = f"{self.num_waiting} requests wait for a model, the most this gateway lets wait"
            raise unavailable("overloaded", message, OVERLOAD_RETRY_S)
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1

    def _first_of(self, kinds: frozenset[str]) -> str:
        """The first listed model of these kinds, one that can answer before others. Raises `ApiError` 404 or 503."""
        found = [known for known in self.listed() if known.kind in kinds]
        if not found and self.is_loading:
            raise unavailable("model_loading", "the models are still loading", LOADING_RETRY_S)
        if not found:
            makes = " or ".join(dict.fromkeys(made for kind, (made, _) in MAKES.items() if kind in kinds))
            message = f"No model here makes {makes}. Available models: {self._names()}"
            raise ApiError(404, "model_not_found", message, param="model")
        return min(found, key=lambda known: not known.status.can_answer).name

    def _names(self) -> str:
        return ", ".join(f"`{known.name}`" for known in self.listed()[:MAX_NAMES]) or "none"

    def _not_found(self, asked: str, alias_of: str) -> ApiError:
        """Name what was asked for (bounded, printable), why it is not served if nodes have it, and what there is."""
        unserved = self.library.unserved()
        reason = unserved.get(asked) or unserved.get(alias_of)
        what = f"is not served here: {reason}." if reason else "does not exist."
        message = f"The model `{ascii(asked[:80])[1:-1]}` {what} Available models: {self._names()}"
        return ApiError(404, "model_not_found", message, param="model")


async def _covered(status_of: Callable[[], ModelStatus]) -> ModelStatus:
    """Give a node that was lost a moment ago the time to return, where layers have no other."""
    while (status := status_of()).may_return:  # noqa: ASYNC110 - ends by the clock too
        await asyncio.sleep(RETURN_POLL_S)
    return status
