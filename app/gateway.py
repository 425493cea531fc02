"""What every endpoint of one gateway shares: settings, engines by name, metrics, and who is being answered.

Built once in `main.py`. Bounds the answers that run at once, and ends them when the gateway is told to stop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from starlette.types import Scope

from app.api.errors import ApiError, describe, from_exception, not_ready, unavailable
from app.api.scope import endpoint_of, request_id_of
from app.engine.request import TextEngine
from app.metrics import GatewayMetrics
from app.settings import GatewaySettings

log = logging.getLogger(__name__)

MAX_NAMES = 20  # of models, in the text of a 404
OVERLOAD_RETRY_S = 2
LOADING_RETRY_S = 5


class Gateway:
    """One gateway: its engines and its running answers."""

    def __init__(
        self, settings: GatewaySettings, engines: Mapping[str, TextEngine], metrics: GatewayMetrics
    ) -> None:
        self.settings = settings
        self.engines = engines
        self.metrics = metrics
        self.num_running = 0  # choices being generated
        self.is_loading = False  # models are on their way: an unknown one may yet come
        self.is_draining = False
        self.stop = asyncio.Event()  # set: running answers end with an error
        self._idle = asyncio.Event()
        self._idle.set()

    def engine(self, model: str) -> TextEngine:
        """Return the engine behind an id or alias. Raises `ApiError` 404 that names the ids, 503 while loading."""
        engine = self.engines.get(model) or self.engines.get(self.settings.model_aliases.get(model, ""))
        if engine is None and self.is_loading:
            raise unavailable("model_loading", "the model is still loading", LOADING_RETRY_S)
        if engine is None:
            raise model_not_found(model, self.engines)
        return engine

    def ready_engine(self, model: str) -> TextEngine:
        """Return the engine if a whole route exists now. Raises `ApiError` 404 or 503."""
        engine = self.engine(model)
        status = engine.coverage()
        if not status.is_ready:
            raise not_ready(engine.model_name, status)
        return engine

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


def model_not_found(model: str, engines: Mapping[str, TextEngine]) -> ApiError:
    """Name what was asked for (bounded, printable) and what there is."""
    asked = ascii(model[:80])[1:-1]
    names = ", ".join(f"`{name}`" for name in list(engines)[:MAX_NAMES]) or "none"
    message = f"The model `{asked}` does not exist. Available models: {names}"
    return ApiError(404, "model_not_found", message, param="model")
