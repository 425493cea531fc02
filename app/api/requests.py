"""`GET /v1/requests/{id}`: where the time of a request of the same key went, hop by hop, after the fact."""

from __future__ import annotations

from typing import Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.errors import ApiError
from app.api.messages import Lenient
from app.api.scope import tenant_of
from app.engine.request import HopUse, RouteHop
from app.gateway import Gateway
from app.records import EndedAnswer, RequestRecord, Stage

PATH = "/v1/requests/{id}"
PARTS = ("compute_s", "network_s", "crypto_s", "queue_s", "local_s")


class HopRecord(Lenient):
    """One node's part of an answer, in seconds; null where the kind of model does not tell it by node.

    `compute_s`, `queue_s` and `crypto_s` are what the node says, cut to what was waited. `network_s` is the leg into
    it (and back, for the last): the answer's whole time on the network, laid on the legs as round trips are.
    """

    node: str
    layers: tuple[int, int]
    path: Literal["direct", "relayed"]
    steps: int | None = None
    compute_s: float | None = None
    network_s: float | None = None
    crypto_s: float | None = None
    queue_s: float | None = None


class AnswerRecord(Lenient):
    """One of a request's answers. `timings` are in seconds; which parts there are depends on the kind of model."""

    index: int
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    replays: int
    timings: dict[str, float]
    hops: list[HopRecord]


class RequestReport(Lenient):
    """One request: nothing of what was asked or answered is kept."""

    object: Literal["request"] = "request"
    id: str
    answer_id: str
    model: str
    endpoint: str
    created: int
    status: Stage
    error: str | None
    took_s: float | None
    answers: list[AnswerRecord]


class Requests:
    """The endpoint, over one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def retrieve(self, request: Request) -> Response:
        """Tell of one request, by its `X-Request-Id` or its answer's id. A key sees its own only."""
        some_id = request.path_params["id"]
        record = await self._gateway.records.find(some_id, tenant_of(request.scope))
        if record is None:
            message = "no such request of this key is remembered: the last ones are, for a day"
            raise ApiError(404, "not_found", message, param="id")
        return JSONResponse(report_of(record).model_dump(mode="json"))


def report_of(record: RequestRecord) -> RequestReport:
    """A record as clients see it."""
    return RequestReport(
        id=record.request_id,
        answer_id=record.answer_id,
        model=record.model,
        endpoint=record.endpoint,
        created=record.created,
        status=record.state,
        error=record.error,
        took_s=record.took_s,
        answers=[_answer(index, record.answers[index]) for index in sorted(record.answers)],
    )


def _answer(index: int, ended: EndedAnswer) -> AnswerRecord:
    hops = [_used(use) for use in ended.hops] or [_hop(hop) for hop in ended.route]
    return AnswerRecord(
        index=index,
        finish_reason=ended.finish_reason,
        prompt_tokens=ended.prompt_tokens,
        completion_tokens=ended.completion_tokens,
        replays=ended.replays,
        timings=ended.timings,
        hops=hops,
    )


def _hop(hop: RouteHop) -> HopRecord:
    path: Literal["direct", "relayed"] = "relayed" if hop.is_relayed else "direct"
    return HopRecord(node=hop.node, layers=(hop.start, hop.end), path=path)


def _used(use: HopUse) -> HopRecord:
    parts = {name: round(getattr(use, name), 6) for name in PARTS if hasattr(use, name)}
    return _hop(use.hop).model_copy(update={"steps": use.steps, **parts})
