"""The embeddings request and its answer as typed models: what is accepted, refused and ignored.

Knows nothing of engines or tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from app.api.chat_reply import AnswerTimings
from app.api.errors import from_validation, unsupported
from app.api.making import HopField
from app.api.messages import Lenient, refuse
from app.api.protocol import MAX_NAME
from app.api.routing_field import RoutingField

MAX_TEXTS = 2048  # OpenAI's own limit
MAX_CHARS = 2 << 20  # of all texts: seconds of a tokenizer's time
MAX_TOKENS = 300_000  # of all texts: OpenAI's own limit

Text = str | tuple[int, ...]  # as it is, or as token ids

# Extensions of other servers that would change the vectors, each with the values that ask for nothing.
NOT_BUILT: Mapping[str, tuple[Any, ...]] = {
    "truncate": (False, "none", "NONE"),
    "truncate_prompt_tokens": (),
    "input_type": (),
    "prompt_name": (),
    "task": (),
    "normalize": (True,),
    "embed_dtype": ("float32",),
    "messages": (),
}


def _as_texts(given: Any) -> tuple[Text, ...]:
    """Read one text or a list of them, each a string or a list of token ids."""
    if isinstance(given, str):
        return (_as_text(given, None),)
    if not isinstance(given, list):
        raise refuse("give a string, a list of strings, or token ids")
    if not given:
        raise refuse("give at least one text")
    is_alone = type(given[0]) is int
    if len(given) > MAX_TEXTS and not is_alone:
        raise refuse(f"at most {MAX_TEXTS} texts are taken at once")
    if sum(len(ids) for ids in ([given] if is_alone else given) if isinstance(ids, list)) > MAX_TOKENS:
        raise refuse(f"at most {MAX_TOKENS} tokens are taken at once", code="max_tokens_per_request")
    if is_alone:
        return (_as_text(given, None),)
    texts = tuple(_as_text(text, str(number)) for number, text in enumerate(given))
    for number, text in enumerate(texts):
        if isinstance(text, str) is not isinstance(texts[0], str):
            raise refuse("texts are all strings or all token ids", field=str(number))
    return texts


def _as_text(given: Any, field: str | None) -> Text:
    if not isinstance(given, str | list):
        raise refuse("a text is a string or a list of token ids", field=field)
    if not given:
        raise refuse("a text is not empty", field=field)
    if isinstance(given, str):
        return given
    if not all(type(token_id) is int and 0 <= token_id < 1 << 31 for token_id in given):
        raise refuse("token ids are whole numbers", field=field)
    return tuple(given)


Words = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Many = Annotated[list[Words] | list[Ids], Field(min_length=1, max_length=MAX_TEXTS)]


class EmbeddingsRequest(Lenient):
    """A request for vectors; None means the default everywhere."""

    model: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    input: Annotated[
        tuple[Text, ...],
        BeforeValidator(_as_texts, json_schema_input_type=Words | Ids | Many),
        Field(repr=False),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int | None, Field(ge=1)] = None

    diffuse: RoutingField | None = None


def parse_embeddings(body: Mapping[str, Any]) -> tuple[EmbeddingsRequest, bool]:
    """Validate a request body; tell also whether it holds one text by itself, which errors call `input`.

    Raises `ApiError` 400 that names the first wrong field.
    """
    for name, neutral in NOT_BUILT.items():
        value = body.get(name)
        if value is not None and not any(value is one or value == one for one in neutral):
            raise unsupported(name, f"'{name}' is not supported")
    try:
        asked = EmbeddingsRequest.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from None
    given = body["input"]
    return asked, isinstance(given, str) or type(given[0]) is int


class EmbeddingObject(Lenient):
    """One vector: a list of numbers, or their little-endian float32 bytes in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str = Field(repr=False)


class EmbeddingsUsage(Lenient):
    """Tokens of all texts, special ones included."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(Lenient):
    """The whole answer."""

    object: Literal["list"] = "list"
    data: list[EmbeddingObject] = Field(repr=False)
    model: str
    usage: EmbeddingsUsage
    system_fingerprint: str
    timings: AnswerTimings
    replays: int = 0
    route: list[HopField]
