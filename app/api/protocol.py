"""The chat request as a typed model: what is accepted, refused and ignored.

Rule: fields that cannot change the answer are ignored, known or not; fields that would change it and are not
built are refused by name. Knows nothing of engines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from app.api.errors import ApiError, from_validation, invalid, unsupported
from app.api.legacy_functions import in_functions, in_tools, uses_functions
from app.api.messages import Lenient, Messages, continues_last, refuse, refuse_order
from app.api.routing_field import RoutingField
from app.api.tool_fields import MAX_TOOLS, FormFields, FunctionField, FunctionName

MAX_STOPS = 4
MAX_STOP_CHARS = 1000  # each is looked for at every character of the answer
MAX_VARIABLES = 64  # flags for the chat template
MAX_LOGIT_BIAS = 300
MAX_TOP_LOGPROBS = 20
MAX_NAME = 256  # characters of a model's name

# Extensions of other servers that would change the answer, each with the values that ask for nothing.
NOT_BUILT: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "suffix": ("",),
    "echo": (False,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "prompt_logprobs": (0,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "grammar": ("",),
    "json_schema": (),
    "typical_p": (1,),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "repeat_penalty": (1,),
    "chat_template": (),
    "documents": ([],),
    "thinking": (),
    "enable_thinking": (),
    "thinking_budget": (),
    "thinking_token_budget": (),
    "add_generation_prompt": (True,),
    "truncate_prompt_tokens": (),
    "mm_processor_kwargs": ({},),
    "lora_request": (),
}
TEMPLATE_RESERVED = frozenset(
    {
        "chat_template",
        "self",
        "messages",
        "conversation",
        "conversations",
        "tools",
        "documents",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "sanitize_control_tokens",
        "return_dict",
        "return_tensors",
        "return_assistant_tokens_mask",
        "padding",
        "truncation",
        "max_length",
        "tokenizer_kwargs",
    }
)
TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
VARIABLE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Stop = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS)]
Flag = str | int | float | bool | None
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(Lenient):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ReasoningWish(Lenient):
    """How much to think, as other servers are asked. There are no summaries: reasoning is told as it is."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    max_tokens: None = None

    @field_validator("max_tokens", mode="before")
    @classmethod
    def _is_not_counted(cls, value: object) -> object:
        if value is not None:
            raise refuse(
                "how long a model thinks has no limit of its own: use max_tokens",
                code="unsupported_parameter",
            )
        return value

    @property
    def said_effort(self) -> Effort | None:
        """The effort, however it was said."""
        return "none" if self.enabled is False else self.effort


def _as_list(stop: Any) -> Any:
    if stop is None:
        return []
    return [stop] if isinstance(stop, str) else stop


class AnswerFields(Lenient):
    """What chats and completions share: how tokens are chosen, where answers end, and how they travel."""

    model: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    n: Annotated[int | None, Field(ge=1)] = None
    stop: Annotated[Stops, BeforeValidator(_as_list, json_schema_input_type=Stop | Stops | None)] = Field(
        default_factory=list
    )
    ignore_eos: bool | None = None

    temperature: Annotated[Number | None, Field(ge=0, le=2)] = None
    top_p: Annotated[Number | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=2**31 - 1)] = None
    min_p: Annotated[Number | None, Field(ge=0, le=1)] = None
    repetition_penalty: Annotated[Number | None, Field(ge=0.01, le=10)] = None
    presence_penalty: Annotated[Number | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[Number | None, Field(ge=-2, le=2)] = None
    logit_bias: Annotated[dict[str, Number] | None, Field(max_length=MAX_LOGIT_BIAS)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**63 - 1)] = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    timings_per_token: bool | None = None

    diffuse: RoutingField | None = None

    @field_validator("logit_bias")
    @classmethod
    def _in_range(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for token_id, value in (bias or {}).items():
            if not TOKEN_ID.fullmatch(token_id):
                raise refuse("keys are token ids, written as digits")
            if not -100 <= value <= 100:
                raise refuse("a bias lies between -100 and 100")
        return bias

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refuse("stream_options needs stream", field="stream_options")
        return self

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings; empty ones would stop at once and are dropped."""
        return tuple(stop for stop in self.stop if stop)


class ChatRequest(AnswerFields, FormFields):
    """A chat completion request; None means the default everywhere."""

    messages: Messages

    max_tokens: Annotated[int | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None

    continue_final_message: bool | None = None
    functions: Annotated[list[FunctionField] | None, Field(max_length=MAX_TOOLS)] = (
        None  # the old word for tools
    )
    function_call: Literal["none", "auto"] | FunctionName | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningWish | None = None
    reasoning_format: Literal["auto", "none"] | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Flag] | None, Field(max_length=MAX_VARIABLES)] = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_flags(cls, variables: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in variables or {}:
            if not VARIABLE_NAME.fullmatch(name) or name in TEMPLATE_RESERVED:
                raise refuse(f"{name[:40]!a} cannot be set by a request")
        return variables

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        refuse_order(self.messages)
        if self.continue_final_message and not self.ends_with_assistant:
            raise refuse("the last message is not the assistant's", field="continue_final_message")
        other = self.reasoning.said_effort if self.reasoning else None
        if None not in (other, self.reasoning_effort) and other != self.reasoning_effort:
            raise refuse("reasoning and reasoning_effort ask for different things", field="reasoning")
        return self

    @property
    def says_functions(self) -> bool:
        """Whether calls are told in the old words."""
        return False

    @property
    def ends_with_assistant(self) -> bool:
        return continues_last(self.messages)

    @property
    def continues_text(self) -> bool:
        """The answer carries on the last message, instead of being a new one."""
        return self.ends_with_assistant and self.continue_final_message is not False

    @property
    def continued_text(self) -> str | None:
        """The text that the answer carries on; None where it is a new one."""
        if not self.continues_text:
            return None
        return "\n".join(part.text or "" for part in self.messages[-1].content or ())

    @property
    def num_logprobs(self) -> int | None:
        """Of how many likely tokens in each place the probabilities are told; None: of none at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def effort(self) -> Effort | None:
        """How much to think; None: as much as the model likes."""
        return self.reasoning_effort or (self.reasoning.said_effort if self.reasoning else None)

    @property
    def tells_reasoning(self) -> bool:
        return self.include_reasoning is not False and not (self.reasoning and self.reasoning.exclude)

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the chat template may read: the effort, and the caller's own flags."""
        effort = self.effort
        tools = [tool.for_template() for tool in self.offered]
        own: dict[str, Any] = {"tools": tools} if tools else {}
        if effort is not None:
            thinks = effort != "none"  # under the names that templates have for it
            own |= {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
        return own | (self.chat_template_kwargs or {})


class FunctionsRequest(ChatRequest):
    """A request that said `functions` for tools: its answer says `function_call`."""

    @property
    def says_functions(self) -> bool:
        return True


def parse_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Validate a request body. Raises `ApiError` 400 that names the first wrong field."""
    refuse_not_built(body)
    if not uses_functions(body):
        return _valid(ChatRequest, body)
    try:
        return _valid(FunctionsRequest, in_tools(body))
    except ApiError as failure:
        raise in_functions(failure) from None


def _valid(kind: type[ChatRequest], body: Mapping[str, Any]) -> ChatRequest:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from None


def refuse_not_built(body: Mapping[str, Any]) -> None:
    """Refuse fields that would change the answer and that nothing here honours."""
    if body.get("top_logprobs") is not None and not body.get("logprobs"):
        raise invalid("top_logprobs", "top_logprobs needs logprobs")
    if any(kind != "text" for kind in _list(body.get("modalities"))):
        raise unsupported("modalities", "this model answers in text only")
    for name, neutral in NOT_BUILT.items():
        value = body.get(name)
        if value is not None and not any(_same(value, accepted) for accepted in neutral):
            raise unsupported(name, f"'{name}' is not supported")


def _same(value: Any, neutral: Any) -> bool:
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
