"""`GET /v1/compat`: what requests to each text model honour, refuse and pass over, so that no refusal surprises.

And the header `X-Ignored-Params`: the fields of one request that were accepted and changed nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.completion_protocol import CompletionRequest
from app.api.messages import Lenient
from app.api.protocol import NOT_BUILT, ChatRequest
from app.api.responses_protocol import NOT_KEPT, ResponsesRequest
from app.api.scope import key_of
from app.engine.request import AnyEngine, KnownModel, ModelState
from app.gateway import CHAT_KINDS, Gateway

PATH = "/v1/compat"
IGNORED_HEADER = "x-ignored-params"
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_NAMES = 32  # in the header
# Fields of OpenAI's that are taken and change nothing; any that nobody knows is treated alike.
IGNORED = (
    "user",
    "safety_identifier",
    "metadata",
    "store",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "verbosity",
    "prediction",
)
REFUSED = ("modalities",)  # anything but text
NEEDS_ENDS = ("response_format", "tool_choice")  # where a grammar holds the answer
PASSED_FIELDS = (
    "store",
    "stream_options",
)  # of a Responses request, which knows them and does nothing with them


class FieldSupport(Lenient):
    """What becomes of the fields of one endpoint."""

    honoured: list[str]
    refused: list[str]
    ignored: list[str]


class ToolSupport(Lenient):
    """In which form the model writes calls, and whether a grammar can hold it to one."""

    form: str
    can_be_required: bool


class ReasoningSupport(Lenient):
    """The marks around the model's thoughts."""

    opener: str
    closer: str


class ModelSupport(Lenient):
    """One model; `tools`, `reasoning` and `refused_by_route` are null until its ends are here."""

    id: str
    status: ModelState
    input_modalities: list[str]
    tools: ToolSupport | None = None
    reasoning: ReasoningSupport | None = None
    refused_by_route: list[str] | None = None


class CompatReport(Lenient):
    """Fields by endpoint, the same for every text model, and what differs from model to model."""

    object: Literal["compat"] = "compat"
    fields: dict[str, FieldSupport]
    models: list[ModelSupport]


class Compat:
    """The endpoint, over one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def retrieve(self, request: Request) -> Response:
        """Tell what is honoured; opens nothing."""
        known = [one for one in self._gateway.listed(key_of(request.scope)) if one.kind in CHAT_KINDS]
        models = [await self._describe(one) for one in known]
        return JSONResponse(CompatReport(fields=FIELDS, models=models).model_dump())

    async def _describe(self, known: KnownModel) -> ModelSupport:
        told = ModelSupport(id=known.name, status=known.status.state, input_modalities=list(known.takes))
        if known.status.state != "ready":
            return told
        return told.model_copy(update=support_of(await self._gateway.library.engine(known.name)))


def support_of(engine: AnyEngine) -> dict[str, Any]:
    """What one model's tokenizer and ends allow."""
    tokenizer = getattr(engine, "tokenizer", None)
    is_thin = bool(getattr(engine, "is_thin", False))
    style = tokenizer.reasoning_style if tokenizer is not None else None
    return {
        "tools": tokenizer and ToolSupport(form=tokenizer.tool_style.kind, can_be_required=not is_thin),
        "reasoning": style and ReasoningSupport(opener=style.opener, closer=style.closer),
        "refused_by_route": list(NEEDS_ENDS) if is_thin else [],
    }


def ignored_params(
    body: Mapping[str, Any], *known: type[BaseModel], passed: tuple[str, ...] = ()
) -> dict[str, str]:
    """Return the header that names what changed nothing; empty where all did."""
    fields = {name for model in known for name in model.model_fields} - set(passed)
    names = [
        name
        for name, value in body.items()
        if value is not None and name not in fields and name not in (*NOT_BUILT, *REFUSED)
    ]
    shown = sorted(name for name in names if NAME.fullmatch(name))[:MAX_NAMES]
    return {IGNORED_HEADER: ", ".join(shown)} if shown else {}


def _fields(model: type[BaseModel], refused: list[str], passed: tuple[str, ...] = ()) -> FieldSupport:
    honoured = sorted(set(model.model_fields) - set(passed))
    ignored = sorted({*IGNORED, *passed} - set(honoured))
    return FieldSupport(honoured=honoured, refused=sorted(set(refused) - set(honoured)), ignored=ignored)


FIELDS = {
    "/v1/chat/completions": _fields(ChatRequest, [*NOT_BUILT, *REFUSED]),
    "/v1/completions": _fields(CompletionRequest, [*NOT_BUILT]),
    "/v1/responses": _fields(ResponsesRequest, [*NOT_KEPT], PASSED_FIELDS),
}
