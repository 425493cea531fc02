"""`POST /v1/embeddings`: texts in, one vector for each, in the same order.

The journey of a request, read downwards: parse, find the engine, tokenize, embed, write.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from app.api.accounting import accounted_events
from app.api.answering import timing_headers
from app.api.body import BodyLimits, read_json_object
from app.api.embedding_protocol import MAX_CHARS, MAX_TOKENS, EmbeddingsRequest, parse_embeddings
from app.api.errors import invalid
from app.api.making import route_of
from app.api.scope import caller_of, request_id_of
from app.api.sse import until_disconnect
from app.embedding_metrics import EmbeddingMeter
from app.engine.embedding_request import (
    Embedded,
    EmbeddingEngine,
    EmbeddingFinished,
    EmbeddingRequest,
    Vector,
)
from app.engine.request import RequestError
from app.gateway import Gateway
from app.keys import Caller

PATH = "/v1/embeddings"
KINDS = frozenset({"encoder", "embedding"})


@dataclass(frozen=True, slots=True)
class _Planned:
    """One request on its way."""

    asked: EmbeddingsRequest
    engine: EmbeddingEngine
    request: EmbeddingRequest = field(repr=False)
    meter: EmbeddingMeter
    request_id: str
    caller: Caller


class Embeddings:
    """The endpoint, over one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._limits = BodyLimits(gateway.settings.max_body_bytes, gateway.settings.body_timeout_s)

    async def create(self, request: Request) -> Response:
        """Make a vector of each text."""
        arrived = time.perf_counter()
        asked, is_alone = parse_embeddings(await read_json_object(request, self._limits))
        scope = request.scope
        with _own_names(is_alone=is_alone):
            beginning = self._begin(asked, request_id_of(scope), arrived, caller_of(scope))
            planned = await until_disconnect(request.receive, beginning)
            return await until_disconnect(request.receive, self._whole(planned))

    async def _begin(
        self, asked: EmbeddingsRequest, request_id: str, arrived: float, caller: Caller
    ) -> _Planned:
        settings, wishes = self._gateway.settings, asked.diffuse
        engine = cast("EmbeddingEngine", await self._gateway.ready(asked.model, KINDS, caller.key))
        if sum(len(text) for text in asked.input) > MAX_CHARS:
            raise invalid("input", f"the texts have at most {MAX_CHARS} characters in all")
        planned = EmbeddingRequest(
            request_id=f"embd-{secrets.token_hex(12)}",
            model=engine.model_name,
            texts=await _encoded(asked, engine),
            dimensions=asked.dimensions,
            deadline_s=settings.request_timeout_s or None,
            route=settings.route if wishes is None else wishes.over(settings.route),
            tenant=caller.tenant,
        )
        if planned.num_tokens > MAX_TOKENS:
            message = f"the texts have {planned.num_tokens} tokens, at most {MAX_TOKENS} are taken at once"
            raise invalid("input", message, code="max_tokens_per_request")
        engine.check(planned)
        meter = EmbeddingMeter(self._gateway.metrics, model=engine.model_name, endpoint=PATH, arrived=arrived)
        return _Planned(asked, engine, planned, meter, request_id, caller)

    async def _whole(self, planned: _Planned) -> Response:
        """Wait for every vector, then write the answer."""
        vectors: dict[int, Vector] = {}
        events = accounted_events(
            self._gateway,
            planned.meter,
            (planned.engine.embed(request) for request in (planned.request,)),
            caller=planned.caller,
            num_answers=1,
            silence_s=float("inf"),
            count=lambda _, event: planned.meter.count(event),
            counts={"texts": len(planned.request.texts), "prompt_tokens": planned.request.num_tokens},
            record=self._gateway.records.begin(
                planned.request_id,
                answer_id=planned.request.request_id,
                tenant=planned.request.tenant,
                model=planned.engine.model_name,
                endpoint=PATH,
            ),
        )
        async with aclosing(events) as coming:
            async for item in coming:
                match item:
                    case (_, Embedded() as made):
                        vectors[made.index] = made.vector
                    case (_, EmbeddingFinished() as end):
                        finished = end
        body = await asyncio.to_thread(_written, planned, vectors, finished)
        headers = timing_headers(finished.timings)
        return Response(body, media_type="application/json", headers=headers)


@contextmanager
def _own_names(*, is_alone: bool) -> Iterator[None]:
    """Name a text as the caller gave it where the engine refuses it."""
    try:
        yield
    except RequestError as error:
        param = "input" if is_alone and error.param == "input.0" else error.param
        raise RequestError(param, error.code, error.message, status=error.status) from None


async def _encoded(asked: EmbeddingsRequest, engine: EmbeddingEngine) -> tuple[tuple[int, ...], ...]:
    """Tokenize; token ids are taken as they are."""

    def encode() -> tuple[tuple[int, ...], ...]:
        return tuple(engine.encode(text) if isinstance(text, str) else text for text in asked.input)

    return await asyncio.to_thread(encode)


def _written(planned: _Planned, vectors: Mapping[int, Vector], finished: EmbeddingFinished) -> bytes:
    """Write the answer as `EmbeddingsAnswer` says."""
    num_tokens = planned.request.num_tokens
    as_text = planned.asked.encoding_format == "base64"
    answer: dict[str, Any] = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _coded(vectors[index], as_text=as_text)}
            for index in range(len(planned.request.texts))
        ],
        "model": planned.asked.model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        "system_fingerprint": finished.fingerprint,
        "timings": asdict(finished.timings),
        "replays": finished.replays,
        "route": [hop.model_dump(mode="json") for hop in route_of(finished.route)],
    }
    return json.dumps(answer, separators=(",", ":")).encode()


def _coded(vector: Vector, *, as_text: bool) -> list[float] | str:
    little_endian = vector.astype("<f4", copy=False)
    if as_text:
        return base64.b64encode(little_endian.tobytes()).decode()
    numbers: list[float] = little_endian.tolist()
    return numbers
