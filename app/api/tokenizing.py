"""`/tokenize`, `/detokenize` and `/v1/chat/completions/input_tokens`: what a model's tokenizer makes of texts.

The first two in vLLM's shapes, the last in llama.cpp's. Nothing is computed, so they need no node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from app.api.body import BodyLimits, read_json_object
from app.api.errors import from_validation, invalid
from app.api.generation import prompt_tokens
from app.api.media_parts import intake_of
from app.api.messages import Lenient
from app.api.protocol import MAX_NAME, ChatRequest, parse_chat
from app.api.scope import key_of
from app.engine.request import TextEngine
from app.gateway import CHAT_KINDS, Gateway
from app.keys import ApiKey

TOKENIZE_PATH = "/tokenize"
DETOKENIZE_PATH = "/detokenize"
INPUT_TOKENS_PATH = "/v1/chat/completions/input_tokens"
MAX_CHARS = 2 << 20  # of a text: seconds of a tokenizer's time, which others wait for
MAX_TOKENS = 1 << 20

Parsed = TypeVar("Parsed", bound=Lenient)
ModelName = Annotated[str | None, Field(min_length=1, max_length=MAX_NAME)]


class TokenizeRequest(Lenient):
    """A text to tokenize; a chat's `messages` may stand in its place, with all that a chat request has."""

    model: ModelName = None
    prompt: Annotated[str, Field(max_length=MAX_CHARS, repr=False)]
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class Tokenized(Lenient):
    """Token ids, and how many the model takes."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Lenient):
    """Token ids whose text is wanted."""

    model: ModelName = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_TOKENS, repr=False)]


class Detokenized(Lenient):
    """The text, special tokens by their names."""

    prompt: str


class InputTokenCount(Lenient):
    """How many tokens a chat's prompt has."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class Tokenizing:
    """The endpoints, over one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._limits = BodyLimits(gateway.settings.max_body_bytes, gateway.settings.body_timeout_s)
        self._intake = intake_of(gateway.settings)

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a text, or of a chat's prompt."""
        key = key_of(request.scope)
        body = await read_json_object(request, self._limits)
        if body.get("messages") is not None:
            return await self._tokenize_chat(body, key)
        asked = _parsed(TokenizeRequest, body)
        engine = await self._engine(asked.model, key)
        tokenizer = engine.tokenizer
        encode: Callable[[str], list[int]] = tokenizer.encode_whole
        if asked.add_special_tokens is False:
            encode = tokenizer.encode
        ids = await asyncio.to_thread(encode, asked.prompt)
        return _written(_tokenized(engine, ids, with_names=bool(asked.return_token_strs)))

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids."""
        asked = _parsed(DetokenizeRequest, await read_json_object(request, self._limits))
        engine = await self._engine(asked.model, key_of(request.scope))
        if asked.tokens and max(asked.tokens) >= engine.vocab_size:
            raise invalid("tokens", f"a token lies outside the vocabulary of {engine.vocab_size}")
        text = await asyncio.to_thread(engine.tokenizer.decode_all, asked.tokens)
        return _written(Detokenized(prompt=text.encode("utf-8", "replace").decode()))

    async def input_tokens(self, request: Request) -> Response:
        """Count the tokens of a chat request's prompt."""
        asked = parse_chat(await read_json_object(request, self._limits))
        _, ids = await self._read(asked, key_of(request.scope))
        return _written(InputTokenCount(input_tokens=len(ids)))

    async def _tokenize_chat(self, body: dict[str, Any], key: ApiKey) -> Response:
        if body.get("prompt") is not None:
            raise invalid("prompt", "give a prompt or messages, not both")
        if body.get("add_generation_prompt") is False:
            raise invalid("add_generation_prompt", "a chat's prompt ends where the answer begins")
        engine, ids = await self._read(parse_chat(body), key)
        return _written(_tokenized(engine, ids, with_names=body.get("return_token_strs") is True))

    async def _read(self, asked: ChatRequest, key: ApiKey) -> tuple[TextEngine, list[int]]:
        engine = await self._engine(asked.model, key)
        ids = await prompt_tokens(
            asked.messages,
            engine,
            self._intake,
            continue_final=asked.continues_text,
            variables=asked.template_variables,
        )
        return engine, list(ids)

    async def _engine(self, asked: str | None, key: ApiKey) -> TextEngine:
        return cast("TextEngine", await self._gateway.opened(asked, CHAT_KINDS, key))


def _parsed(kind: type[Parsed], body: dict[str, Any]) -> Parsed:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from None


def _tokenized(engine: TextEngine, ids: list[int], *, with_names: bool) -> Tokenized:
    names = [engine.tokenizer.name_of(token_id) for token_id in ids] if with_names else None
    return Tokenized(count=len(ids), max_model_len=engine.max_positions, tokens=ids, token_strs=names)


def _written(answer: Lenient) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")
