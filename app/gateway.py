"""What every endpoint of one gateway shares: settings, models by name, metrics, and who is being answered.

Built once in `main.py`. Says which models a key may use, waits until one can answer, lets requests in (`entrance.py`),
and ends them when the gateway is told to stop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from starlette.types import Scope

from app.api.errors import ApiError, from_exception, invalid, not_ready, unavailable
from app.api.scope import endpoint_of, request_id_of
from app.engine.request import AnyEngine, KnownModel, Library, ModelStatus, TextEngine
from app.entrance import Entrance, shutting_down
from app.keys import ApiKey, Caller
from app.keys_file import ring_of
from app.metrics import GatewayMetrics
from app.places import Places
from app.records import Records
from app.request_notes import current_notes, name_in_log
from app.settings import GatewaySettings
from app.state.limits import Limits
from app.state.memory import MemoryState
from app.state.state import State
from app.state.trouble import Trouble
from routing.describing import describe

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

    def __init__(
        self, settings: GatewaySettings, library: Library, metrics: GatewayMetrics, state: State | None = None
    ) -> None:
        self.settings = settings
        self.library = library
        self.metrics = metrics
        self.state = state or MemoryState()
        self.state.on_error = Trouble(metrics.count_state_error).note
        self.limits = Limits(self.state)
        self.keys = ring_of(settings)
        self.places = Places(settings.max_requests, settings.max_queued if settings.queue_timeout_s else 0)
        metrics.admission.watch_queue(lambda: self.places.num_queued)
        self.records = Records(self.state)
        self.num_waiting = 0  # requests whose model is being loaded
        self.is_loading = False  # models are on their way: an unknown one may yet come
        self.is_draining = False
        self.stop = asyncio.Event()  # set: running answers end with an error

    @property
    def num_running(self) -> int:
        """Choices being generated."""
        return self.places.num_taken

    def model(self, asked: str, key: ApiKey) -> KnownModel:
        """Return the model behind an id or alias.

        Raises `ApiError` 403 for one that the key may not use, 404 that names the ids, 503 while loading.
        """
        alias_of = self.settings.model_aliases.get(asked, "")
        known = self.library.find(asked) or self.library.find(alias_of)
        if not self._may_use(key, (alias_of or asked) if known is None else known.name):
            raise self._not_allowed(asked, key)
        if known is None and self.is_loading:
            raise unavailable("model_loading", "the model is still loading", LOADING_RETRY_S)
        if known is None:
            raise self._not_found(asked, alias_of, key)
        return known

    def listed(self, key: ApiKey) -> list[KnownModel]:
        """Every model that a key is shown: what it may use, also by an alias."""
        return [
            known for known in self.library.models() if known.is_listed and self._may_use(key, known.name)
        ]

    async def ready_engine(self, asked: str, key: ApiKey) -> TextEngine:
        """Return a text engine if a whole route exists now, loading its ends if need be, for a bounded time.

        Raises `ApiError` 400 for a model that makes no text, 403, 404 or 503, or `ModelUnavailableError`.
        """
        return cast("TextEngine", await self.ready(asked, CHAT_KINDS, key))

    async def ready_diffusion(self, asked: str | None, kind: Kind, key: ApiKey) -> DiffusionEngine:
        """Return the engine of a model that makes this kind of thing, as `ready_engine` does.

        Without a name it is the first that is listed. Raises as `ready_engine` does.
        """
        endpoint = MAKES[kind.value][1]
        kinds = frozenset(other for other, (_, served) in MAKES.items() if served == endpoint)
        return cast("DiffusionEngine", await self.ready(asked, kinds, key))

    async def ready(self, asked: str | None, kinds: frozenset[str], key: ApiKey) -> AnyEngine:
        """Return the engine of a model of one of these kinds, as `ready_engine` does.

        Without a name it is the first that is listed. Raises as `ready_engine` does.
        """
        known = self._of_kind(asked, kinds, key)
        name_in_log(model=known.name)
        with self._waiting():
            status = await _covered(lambda: self.model(known.name, key).status)
        if status.state in ("partial", "failed"):
            raise not_ready(known.name, status)
        engine = await self._opened(known.name)
        with self._waiting():
            status = await _covered(engine.coverage)
        if not status.is_ready:  # nodes may have left while it was loaded
            raise not_ready(known.name, status)
        return engine

    async def opened(self, asked: str | None, kinds: frozenset[str], key: ApiKey) -> AnyEngine:
        """Return an engine as `ready` does, also while it has no route: for what needs no node."""
        return await self._opened(self._of_kind(asked, kinds, key).name)

    def _of_kind(self, asked: str | None, kinds: frozenset[str], key: ApiKey) -> KnownModel:
        known = self._first_of(kinds, key) if asked is None else self.model(asked, key)
        if known.kind not in kinds:
            makes, endpoint = MAKES[known.kind]
            raise invalid("model", f"the model `{known.name}` makes {makes}; POST {endpoint} asks it")
        return known

    def admit(self, caller: Caller, num_choices: int) -> Entrance:
        """Return the way in for the choices of one request: enter it, and wait for places."""
        return Entrance(
            self.places,
            self.limits,
            self.metrics.admission,
            caller,
            num_choices,
            queue_timeout_s=self.settings.queue_timeout_s,
        )

    def failure(self, scope: Scope, error: Exception) -> ApiError:
        """Translate an error that ends a request, count it, and log it unless its line says all there is to say."""
        request_id = request_id_of(scope)
        failure = from_exception(error, request_id)
        endpoint = endpoint_of(scope)
        self.metrics.count_error(endpoint, failure.code or str(failure.status))
        told = {"request_id": request_id, "endpoint": endpoint, "code": failure.code}
        if failure.code == "internal_error":
            log.error("request %s: %s failed: %s", request_id, endpoint, describe(error), extra=told)
        elif (notes := current_notes()) is None or not notes.is_logged:
            log.info("request %s: refused, %s", request_id, failure.status, extra=told)
        return failure

    async def drain(self) -> None:
        """Refuse new requests and those that wait, let running answers finish for `drain_s`, then end them."""
        self.is_draining = True
        self.places.close()
        try:
            async with asyncio.timeout(self.settings.drain_s):
                await self.places.idle.wait()
        except TimeoutError:
            self.stop.set()
            await self.places.idle.wait()

    async def close(self) -> None:
        """Wait until the records of what ended are kept; after `drain`."""
        await self.records.close()

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
            raise shutting_down()
        if self.num_waiting >= self.settings.max_requests:
            message = f"{self.num_waiting} requests wait for a model, the most this gateway lets wait"
            raise unavailable("overloaded", message, OVERLOAD_RETRY_S)
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1

    def _first_of(self, kinds: frozenset[str], key: ApiKey) -> KnownModel:
        """The first listed model of these kinds, one that can answer before others. Raises `ApiError` 404 or 503."""
        found = [known for known in self.listed(key) if known.kind in kinds]
        if not found and self.is_loading:
            raise unavailable("model_loading", "the models are still loading", LOADING_RETRY_S)
        if not found:
            makes = " or ".join(dict.fromkeys(made for kind, (made, _) in MAKES.items() if kind in kinds))
            message = f"No model here makes {makes}. Available models: {self._names(key)}"
            raise ApiError(404, "model_not_found", message, param="model")
        return min(found, key=lambda known: not known.status.can_answer)

    def _may_use(self, key: ApiKey, name: str) -> bool:
        """A key that may use a model may use it by all its names."""
        aliases = self.settings.model_aliases
        return key.models is None or key.may_use(name, *(one for one in aliases if aliases[one] == name))

    def _names(self, key: ApiKey) -> str:
        return ", ".join(f"`{known.name}`" for known in self.listed(key)[:MAX_NAMES]) or "none"

    def _not_allowed(self, asked: str, key: ApiKey) -> ApiError:
        """The same whether there is such a model or not."""
        message = f"this key may not use the model `{_shown(asked)}`. It may use: {self._names(key)}"
        return ApiError(403, "model_not_allowed", message, param="model")

    def _not_found(self, asked: str, alias_of: str, key: ApiKey) -> ApiError:
        """Name what was asked for (bounded, printable), why it is not served if nodes have it, and what there is."""
        unserved = self.library.unserved()
        reason = unserved.get(asked) or unserved.get(alias_of)
        what = f"is not served here: {reason}." if reason else "does not exist."
        message = f"The model `{_shown(asked)}` {what} Available models: {self._names(key)}"
        return ApiError(404, "model_not_found", message, param="model")


def _shown(name: str) -> str:
    """What a client called a model, bounded and printable."""
    return ascii(name[:80])[1:-1]


async def _covered(status_of: Callable[[], ModelStatus]) -> ModelStatus:
    """Give a node that was lost a moment ago the time to return, where layers have no other."""
    while (status := status_of()).may_return:  # noqa: ASYNC110 - ends by the clock too
        await asyncio.sleep(RETURN_POLL_S)
    return status
