"""What the OpenAPI document says of each path: endpoints parse and answer by themselves, so FastAPI does not know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from app.api import (
    chat,
    compat,
    completions,
    embeddings,
    images,
    models,
    picture_links,
    requests,
    responses,
    route,
    speech,
    tokenizing,
    transcriptions,
    videos,
)
from app.api.chat_reply import ChatCompletion, ErrorEnvelope
from app.api.compat import CompatReport
from app.api.completion_protocol import CompletionRequest
from app.api.completion_reply import Completion
from app.api.embedding_protocol import EmbeddingsAnswer, EmbeddingsRequest
from app.api.health import HealthReport, ReadyReport, VersionReport
from app.api.image_protocol import ImageAnswer, ImageEvent, ImageRequest
from app.api.models import ModelCard, ModelList
from app.api.protocol import ChatRequest
from app.api.requests import RequestReport
from app.api.responses_protocol import ResponsesRequest
from app.api.responses_reply import ResponseEvent, ResponseObject
from app.api.route import RouteReport
from app.api.speech import SpeechEvent, SpeechRequest
from app.api.tokenizing import Detokenized, DetokenizeRequest, InputTokenCount, Tokenized, TokenizeRequest
from app.api.transcription_protocol import (
    TranscriptionEvent,
    TranscriptionJson,
    TranscriptionRequest,
)
from app.api.video_protocol import VideoDeleted, VideoJob, VideoList, VideoRequest
from app.media.film import FILM_TYPE
from app.media.pictures import PICTURE_TYPES
from app.media.sound import SOUND_TYPES
from app.media.subtitles import SUBRIP_TYPE, WEBVTT_TYPE
from app.stream_shapes import ChatChunk, CompletionChunk

JSON = "application/json"
TEXT = "text/plain"
EVENTS = "text/event-stream"
FORM = "multipart/form-data"
REFERENCE = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Description:
    """One operation: its body, its parameters, and its answers by media type."""

    answers: Mapping[str, type[BaseModel] | None]
    body: type[BaseModel] | None = None
    parameters: tuple[Mapping[str, Any], ...] = ()
    unavailable: type[BaseModel] = field(default=ErrorEnvelope)  # the body of a 503
    is_form: bool = False  # the body may also be a multipart form
    is_json: bool = True
    has_ranges: bool = False  # part of the answer may be asked for


MODEL_ID = {
    "name": "model",
    "in": "path",
    "required": True,
    "description": "An id or alias; it may hold slashes",
    "schema": {"type": "string", "minLength": 1},
}
MODEL_QUERY = {
    "name": "model",
    "in": "query",
    "description": "Ask about this model only",
    "schema": {"type": "string"},
}
ROUTE_MODEL = MODEL_QUERY | {"description": "An id or alias; without it, the first model that can answer"}
REQUEST_ID = {
    "name": "id",
    "in": "path",
    "required": True,
    "description": "An `X-Request-Id`, or the id of an answer",
    "schema": {"type": "string", "minLength": 1},
}
VIDEO_ID = {
    "name": "id",
    "in": "path",
    "required": True,
    "description": "The id of a job of the same key",
    "schema": {"type": "string", "minLength": 1},
}
VARIANT = {
    "name": "variant",
    "in": "query",
    "description": "What of the video",
    "schema": {"type": "string", "enum": ["video", "thumbnail", "spritesheet"], "default": "video"},
}
RANGE = {
    "name": "Range",
    "in": "header",
    "description": "One range of bytes; the answer is then 206",
    "schema": {"type": "string"},
}
PAGE = (
    {
        "name": "limit",
        "in": "query",
        "schema": {"type": "integer", "minimum": 1, "maximum": videos.MAX_LIMIT},
    },
    {"name": "after", "in": "query", "description": "The last id seen", "schema": {"type": "string"}},
    {"name": "order", "in": "query", "schema": {"type": "string", "enum": ["asc", "desc"]}},
)
PICTURE_NAME = {
    "name": "name",
    "in": "path",
    "required": True,
    "description": "As the picture's URL has it",
    "schema": {"type": "string", "minLength": 1},
}
WRITTEN_DOWN = Description(
    {
        JSON: TranscriptionJson,
        TEXT: None,
        SUBRIP_TYPE: None,
        WEBVTT_TYPE: None,
        EVENTS: TranscriptionEvent,
    },
    body=TranscriptionRequest,
    is_form=True,
    is_json=False,
)
OPERATIONS: Mapping[tuple[str, str], Description] = {
    (chat.PATH, "post"): Description({JSON: ChatCompletion, EVENTS: ChatChunk}, body=ChatRequest),
    (responses.PATH, "post"): Description(
        {JSON: ResponseObject, EVENTS: ResponseEvent}, body=ResponsesRequest
    ),
    (completions.PATH, "post"): Description(
        {JSON: Completion, EVENTS: CompletionChunk}, body=CompletionRequest
    ),
    (tokenizing.TOKENIZE_PATH, "post"): Description({JSON: Tokenized}, body=TokenizeRequest),
    (tokenizing.DETOKENIZE_PATH, "post"): Description({JSON: Detokenized}, body=DetokenizeRequest),
    (tokenizing.INPUT_TOKENS_PATH, "post"): Description({JSON: InputTokenCount}, body=ChatRequest),
    (embeddings.PATH, "post"): Description({JSON: EmbeddingsAnswer}, body=EmbeddingsRequest),
    (images.PATH, "post"): Description({JSON: ImageAnswer, EVENTS: ImageEvent}, body=ImageRequest),
    (picture_links.PATH, "get"): Description(
        dict.fromkeys(PICTURE_TYPES.values()), parameters=(PICTURE_NAME,)
    ),
    (speech.PATH, "post"): Description(
        {**dict.fromkeys(SOUND_TYPES.values()), EVENTS: SpeechEvent}, body=SpeechRequest
    ),
    (transcriptions.PATH, "post"): WRITTEN_DOWN,
    (transcriptions.TRANSLATIONS_PATH, "post"): WRITTEN_DOWN,
    (videos.PATH, "post"): Description({JSON: VideoJob}, body=VideoRequest, is_form=True),
    (videos.PATH, "get"): Description({JSON: VideoList}, parameters=PAGE),
    (videos.ONE_PATH, "get"): Description({JSON: VideoJob}, parameters=(VIDEO_ID,)),
    (videos.ONE_PATH, "delete"): Description({JSON: VideoDeleted}, parameters=(VIDEO_ID,)),
    (videos.CONTENT_PATH, "get"): Description(
        {FILM_TYPE: None, "image/webp": None}, parameters=(VIDEO_ID, VARIANT, RANGE), has_ranges=True
    ),
    (videos.EVENTS_PATH, "get"): Description({EVENTS: VideoJob}, parameters=(VIDEO_ID,)),
    (models.PATH, "get"): Description({JSON: ModelList}),
    (compat.PATH, "get"): Description({JSON: CompatReport}),
    ("/v1/models/{model}", "get"): Description({JSON: ModelCard}, parameters=(MODEL_ID,)),
    (route.PATH, "get"): Description({JSON: RouteReport}, parameters=(ROUTE_MODEL,)),
    (requests.PATH, "get"): Description({JSON: RequestReport}, parameters=(REQUEST_ID,)),
    ("/health", "get"): Description({JSON: HealthReport}, unavailable=HealthReport),
    ("/ready", "get"): Description({JSON: ReadyReport}, parameters=(MODEL_QUERY,), unavailable=ReadyReport),
    ("/version", "get"): Description({JSON: VersionReport}),
    ("/metrics", "get"): Description({TEXT: None}),
}


def describe(app: FastAPI) -> None:
    """Complete the document that `app.openapi()` makes."""
    build = app.openapi

    def openapi() -> dict[str, Any]:
        document = build()
        for (path, method), description in OPERATIONS.items():
            document["paths"][path][method] |= _operation(description)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for model in _models():
            schema = model.model_json_schema(ref_template=REFERENCE)
            for name, part in (schema.pop("$defs", {}) | {model.__name__: schema}).items():
                assert schemas.setdefault(name, part) == part, f"two models are named {name}"
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _operation(description: Description) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "responses": {
            "200": _answer("The answer", description.answers),
            "4XX": _answer("The request is wrong; `param` names the field", {JSON: ErrorEnvelope}),
            "503": _answer("Not now", {JSON: description.unavailable}),
            "5XX": _answer("The request cannot be served", {JSON: ErrorEnvelope}),
        }
    }
    if description.has_ranges:
        operation["responses"]["206"] = _answer("The bytes that `Range` asked for", description.answers)
    if description.parameters:
        operation["parameters"] = [dict(parameter) for parameter in description.parameters]
    if description.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {
                media_type: {"schema": _schema(description.body)}
                for media_type in (JSON, FORM)
                if (description.is_json if media_type == JSON else description.is_form)
            },
        }
    return operation


def _answer(text: str, by_type: Mapping[str, type[BaseModel] | None]) -> dict[str, Any]:
    return {
        "description": text,
        "content": {
            media_type: {"schema": _body(media_type, model)} for media_type, model in by_type.items()
        },
    }


def _body(media_type: str, model: type[BaseModel] | None) -> dict[str, Any]:
    """A schema of what is sent; of a stream, that of each event, as OpenAPI 3.2 has it for all versions."""
    if media_type != EVENTS:
        return _schema(model) if model or media_type == TEXT else {}
    held = {"anyOf": [_schema(model), _schema(ErrorEnvelope)]}
    told = {"type": "string", "contentMediaType": JSON, "contentSchema": held}
    done = {"const": "[DONE]", "description": "The end, where a stream has one of its own"}
    name = {"type": "string", "description": "Its `type`, where events have names"}
    return {
        "type": "object",
        "properties": {"data": {"anyOf": [done, told]}, "event": name},
        "required": ["data"],
    }


def _schema(model: type[BaseModel] | None) -> dict[str, Any]:
    return {"type": "string"} if model is None else {"$ref": REFERENCE.format(model=model.__name__)}


def _models() -> list[type[BaseModel]]:
    named: list[type[BaseModel]] = [ErrorEnvelope]
    for description in OPERATIONS.values():
        parts = (description.body, description.unavailable, *description.answers.values())
        named += [model for model in parts if model is not None]
    return list(dict.fromkeys(named))
