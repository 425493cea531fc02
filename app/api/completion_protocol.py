"""The completion request as a typed model: what is accepted, refused and ignored. Knows nothing of engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from app.api.errors import from_validation, unsupported
from app.api.messages import refuse
from app.api.protocol import NOT_BUILT, AnswerFields

MAX_PROMPTS = 2048  # and as many answers to them
MAX_LOGPROBS = 5  # OpenAI's own limit
DEFAULT_TOKENS = 16

Prompt = str | tuple[int, ...]  # as it is, or as token ids

# What would change the answer and is not built here, each with the values that ask for nothing.
OWN_FIELDS = frozenset({"echo", "best_of", "suffix", "logprobs"})
NOT_HERE: Mapping[str, tuple[Any, ...]] = {
    **{name: neutral for name, neutral in NOT_BUILT.items() if name not in OWN_FIELDS},
    "suffix": ("",),
    "functions": ([],),
    "messages": (),
    "tools": ([],),
    "response_format": ({"type": "text"},),
    "top_logprobs": (),
    "max_completion_tokens": (),
    "prompt_embeds": (),
}


def _as_prompts(given: Any) -> tuple[Prompt, ...]:
    """Read one prompt or a list of them, each a string or a list of token ids."""
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, list):
        raise refuse("give a string, a list of strings, token ids, or a list of lists of them")
    if not given:
        raise refuse("give at least one prompt")
    if type(given[0]) is int:
        return (_as_prompt(given, None),)
    if len(given) > MAX_PROMPTS:
        raise refuse(f"at most {MAX_PROMPTS} prompts are taken at once")
    prompts = tuple(_as_prompt(prompt, str(number)) for number, prompt in enumerate(given))
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str) is not isinstance(prompts[0], str):
            raise refuse("prompts are all strings or all token ids", field=str(number))
    return prompts


def _as_prompt(given: Any, field: str | None) -> Prompt:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise refuse("a prompt is a string or a list of token ids", field=field)
    if not given:
        raise refuse("a prompt has at least one token", field=field)
    if not all(type(token_id) is int and 0 <= token_id < 1 << 31 for token_id in given):
        raise refuse("token ids are whole numbers from 0 on", field=field)
    return tuple(given)


Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Many = Annotated[list[str] | list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]


class CompletionRequest(AnswerFields):
    """A completion request; None means the default everywhere."""

    prompt: Annotated[
        tuple[Prompt, ...],
        BeforeValidator(_as_prompts, json_schema_input_type=str | Ids | Many),
        Field(repr=False),
    ]
    max_tokens: Annotated[int | None, Field(ge=0)] = None
    echo: bool | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    best_of: Annotated[int | None, Field(ge=1)] = None

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise refuse("without echo an answer has at least one token", field="max_tokens")
        if self.best_of is not None and self.best_of > self.num_choices:
            text = "answers that are not told are not made: best_of is n"
            raise refuse(text, field="best_of", code="unsupported_parameter")
        if self.best_of is not None and self.best_of < self.num_choices:
            raise refuse("best_of is not below n", field="best_of")
        if self.num_choices * len(self.prompt) > MAX_PROMPTS:
            raise refuse(f"at most {MAX_PROMPTS} answers are given at once, over all prompts", field="n")
        return self

    @property
    def token_limit(self) -> int:
        return DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def scores_prompt(self) -> bool:
        """The tokens of the prompt are told with their probabilities."""
        return bool(self.echo) and self.logprobs is not None


def parse_completion(body: Mapping[str, Any]) -> tuple[CompletionRequest, bool]:
    """Validate a request body; tell also whether it holds one prompt by itself, which errors call `prompt`.

    Raises `ApiError` 400 that names the first wrong field.
    """
    for name, neutral in NOT_HERE.items():
        value = body.get(name)
        if value is not None and not any(_same(value, one) for one in neutral):
            raise unsupported(name, f"'{name}' is not supported in completions")
    try:
        asked = CompletionRequest.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from None
    given = body["prompt"]
    return asked, isinstance(given, str) or type(given[0]) is int


def _same(value: Any, neutral: Any) -> bool:
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
