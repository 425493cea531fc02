"""What a chat request may hold: each wrong field is refused under its own name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from app.api.answer_form import AnswerForm, form_of
from app.api.errors import ApiError
from app.api.messages import ChatMessage
from app.api.protocol import NOT_BUILT as NOT_BUILT_FIELDS
from app.api.protocol import TEMPLATE_RESERVED, ChatRequest, parse_chat
from tests.app.conftest import Serve, patient
from tests.support.api_server import QUESTION, Served
from tests.support.local_engine import ScriptedEngine

USER = {"role": "user", "content": "hello"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def parse(**changes: Any) -> ChatRequest:
    return parse_chat({**QUESTION, **changes})


def refusal(**changes: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**changes)
    assert caught.value.status == 400
    return caught.value


WRONG_VALUES: list[tuple[str, Any, str]] = [
    ("model", 5, "model"),
    ("model", "", "model"),
    ("messages", [], "messages"),
    ("messages", "hello", "messages"),
    ("messages", {"role": "user"}, "messages"),
    ("messages", ["hello"], "messages.0"),
    ("messages", [USER, {"content": "x"}], "messages.1.role"),
    ("messages", [{"role": "robot", "content": "x"}], "messages.0.role"),
    ("messages", [{"role": "user"}], "messages.0.content"),
    ("messages", [{"role": "user", "content": None}], "messages.0.content"),
    ("messages", [{"role": "user", "content": 5}], "messages.0.content"),
    ("messages", [{"role": "user", "content": {"text": "x"}}], "messages.0.content"),
    ("messages", [{"role": "user", "content": [5]}], "messages.0.content.0"),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
    ("messages", [{"role": "user", "content": [{"type": "smell"}]}], "messages.0.content.0.type"),
    ("messages", [USER, {"role": "tool", "content": "2"}], "messages.1.tool_call_id"),
    ("messages", [{"role": "tool", "content": "2", "tool_call_id": None}], "messages.0.tool_call_id"),
    ("messages", [{"role": "function", "content": "2"}], "messages.0.name"),
    ("messages", [{"role": "assistant"}], "messages.0.content"),
    (
        "messages",
        [{"role": "assistant", "tool_calls": [{"id": "x"}]}, USER],
        "messages.0.tool_calls.0.function",
    ),
    (
        "messages",
        [USER, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
        "messages.2",
    ),
    ("messages", [USER, {"role": "assistant", "tool_calls": [CALL]}], "messages.1"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", -1, "max_tokens"),
    ("max_tokens", "5", "max_tokens"),
    ("max_tokens", 5.5, "max_tokens"),
    ("max_tokens", True, "max_tokens"),
    ("max_completion_tokens", 0, "max_completion_tokens"),
    ("n", 0, "n"),
    ("n", "2", "n"),
    ("temperature", -0.1, "temperature"),
    ("temperature", 2.1, "temperature"),
    ("temperature", "0.7", "temperature"),
    ("temperature", True, "temperature"),
    ("temperature", 1e999, "temperature"),
    ("top_p", 0, "top_p"),
    ("top_p", 1.5, "top_p"),
    ("top_k", -2, "top_k"),
    ("top_k", 1.5, "top_k"),
    ("min_p", -0.1, "min_p"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("repetition_penalty", 1e-300, "repetition_penalty"),
    ("temperature", 10**400, "temperature"),
    ("presence_penalty", 2.5, "presence_penalty"),
    ("frequency_penalty", -2.5, "frequency_penalty"),
    ("seed", 1.0, "seed"),
    ("seed", 2**63, "seed"),
    ("seed", "1", "seed"),
    ("logit_bias", {"a": 1}, "logit_bias"),
    ("logit_bias", {"-1": 1}, "logit_bias"),
    ("logit_bias", {"5": 1, "05": 2}, "logit_bias"),
    ("logit_bias", {"5": 101}, "logit_bias"),
    ("logit_bias", {"5": "1"}, "logit_bias.5"),
    ("logit_bias", {str(n): 1 for n in range(301)}, "logit_bias"),
    ("logit_bias", [1], "logit_bias"),
    ("stop", ["a", "b", "c", "d", "e"], "stop"),
    ("stop", 5, "stop"),
    ("stop", "x" * 1001, "stop.0"),
    ("stop", ["a", 5], "stop.1"),
    ("stream", "yes", "stream"),
    ("stream_options", {"include_usage": True}, "stream_options"),
    ("reasoning_effort", "heroic", "reasoning_effort"),
    ("chat_template_kwargs", {"chat_template": "x"}, "chat_template_kwargs"),
    ("chat_template_kwargs", {"messages": "x"}, "chat_template_kwargs"),
    ("chat_template_kwargs", {"self": "x"}, "chat_template_kwargs"),
    ("chat_template_kwargs", {f"x{n}": 1 for n in range(65)}, "chat_template_kwargs"),
    ("chat_template_kwargs", {"__class__": "x"}, "chat_template_kwargs"),
    ("continue_final_message", True, "continue_final_message"),
    ("top_logprobs", 3, "top_logprobs"),
    ("top_logprobs", 21, "top_logprobs"),
    ("logprobs", 1, "logprobs"),
    ("tool_choice", "required", "tool_choice"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}, "tool_choice"),
    ("response_format", {"type": "xml"}, "response_format.type"),
    ("response_format", "text", "response_format"),
]


@pytest.mark.parametrize(("field", "value", "param"), WRONG_VALUES)
def test_a_wrong_value_is_refused_under_its_path(field: str, value: Any, param: str) -> None:
    refused = refusal(**{field: value})
    assert refused.param == param
    assert len(refused.message) <= 500


@pytest.mark.parametrize("field", ["model", "messages"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat({name: value for name, value in QUESTION.items() if name != field})
    assert (caught.value.param, caught.value.code) == (field, "missing_required_parameter")


NOT_BUILT: list[tuple[str, Any]] = [
    ("audio", {"voice": "alloy"}),
    ("modalities", ["text", "audio"]),
    ("web_search_options", {}),
    ("guided_json", {"type": "object"}),
    ("min_tokens", 5),
    ("best_of", 2),
    ("chat_template", "{{ messages }}"),
    ("repeat_penalty", 1.2),
]


@pytest.mark.parametrize(("field", "value"), NOT_BUILT)
def test_a_field_that_would_change_the_answer_is_refused_by_name(field: str, value: Any) -> None:
    refused = refusal(**{field: value})
    assert (refused.param, refused.code) == (field, "unsupported_parameter")


@pytest.mark.parametrize("kind", ["file", "video_url"])
def test_parts_that_nothing_here_takes_are_refused_at_their_place(kind: str) -> None:
    part = {"type": kind, kind: {"url": "data:,"}}
    refused = refusal(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}, part]}])
    assert (refused.param, refused.code) == (f"messages.0.content.1.{kind}", "unsupported_parameter")


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_only_users_and_tools_show_pictures(role: str) -> None:
    refused = refusal(messages=[{"role": role, "content": [IMAGE]}, USER])
    assert refused.param == "messages.0.content.0.image_url"


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url"}, "image_url"),
        ({"type": "image_url", "image_url": {}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": 5}}, "image_url.url"),
        ({"type": "image_url", "image_url": ["x"]}, "image_url"),
        ({"type": "input_audio"}, "input_audio"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "input_audio.data"),
        ({"type": "input_audio", "input_audio": {"data": "x", "format": "exe"}}, "input_audio.format"),
    ],
)
def test_parts_of_the_wrong_shape_are_refused_at_the_field(part: dict[str, Any], param: str) -> None:
    refused = refusal(messages=[{"role": "user", "content": [part]}])
    assert refused.param == f"messages.0.content.0.{param}"


def test_a_picture_may_be_a_plain_string_and_its_detail_is_ignored() -> None:
    plain = {"type": "image_url", "image_url": "data:,"}
    detailed = {"type": "image_url", "image_url": {"url": "data:,", "detail": "high"}}
    asked = parse(messages=[{"role": "user", "content": [plain, detailed]}])
    first, second = asked.messages[0].content or []
    assert first == second
    assert "data:" not in repr(asked)


IGNORED: list[tuple[str, Any]] = [
    ("user", "someone"),
    ("metadata", {"a": "b"}),
    ("store", True),
    ("service_tier", "auto"),
    ("safety_identifier", "x"),
    ("prompt_cache_key", "x"),
    ("verbosity", "low"),
    ("prediction", {"type": "content", "content": "x"}),
    ("tools", None),
    ("functions", None),
    ("top_logprobs", None),
    ("modalities", ["text"]),
    ("best_of", 1),
    ("no_such_field", {"deep": [1]}),
]


@pytest.mark.parametrize(("field", "value"), IGNORED)
def test_a_field_that_cannot_change_the_answer_is_passed_over(field: str, value: Any) -> None:
    assert parse(**{field: value}) == parse()


@pytest.mark.parametrize(
    "fields",
    [
        {"parallel_tool_calls": False},
        {"tools": []},
        {"tool_choice": "none"},
        {"tool_choice": "auto"},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"response_format": {"type": "text"}},
    ],
)
async def test_a_form_that_asks_for_nothing_changes_nothing(
    scripted: ScriptedEngine, fields: dict[str, Any]
) -> None:
    asked = parse(**fields)
    assert asked.template_variables == parse().template_variables
    assert await form_of(asked, scripted) == AnswerForm()


def test_null_means_the_default_everywhere() -> None:
    nulls = dict.fromkeys(set(ChatRequest.model_fields) - {"model", "messages", "stop"})
    assert parse(**nulls) == parse(stop=None) == parse()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from([*ChatRequest.model_fields, *NOT_BUILT_FIELDS, "top_logprobs", "response_format"])


@patient
@given(st.dictionaries(FIELDS, JSON, max_size=4))
def test_whatever_a_field_holds_it_is_accepted_or_refused(fields: dict[str, Any]) -> None:
    try:
        parse(**fields)
    except ApiError as refused:
        assert refused.status == 400


@patient
@given(st.dictionaries(st.sampled_from([*ChatMessage.model_fields]), JSON | st.just("tool"), max_size=5))
def test_whatever_a_message_holds_it_is_accepted_or_refused(message: dict[str, Any]) -> None:
    try:
        parse(messages=[{"role": "user", "content": "x"} | message])
    except ApiError as refused:
        assert str(refused.param).startswith("messages")


def test_reasoning_effort_is_a_variable_of_the_template_and_the_callers_flags_win() -> None:
    assert parse(reasoning_effort="none").template_variables == {
        "reasoning_effort": "none",
        "enable_thinking": False,
        "thinking": False,
    }
    flags = {"enable_thinking": True}
    assert parse(reasoning_effort="none", chat_template_kwargs=flags).template_variables["enable_thinking"]


def test_prompts_do_not_show_in_a_requests_repr() -> None:
    assert "hello" not in repr(parse())


def test_refusals_never_quote_values() -> None:
    assert "secret" not in refusal(temperature="secret").message
    assert "secret" not in refusal(messages=[{"role": "secret", "content": "secret"}]).message


# What reaches the engine -----------------------------------------------------------------------------------


async def test_the_first_of_both_token_limits_wins(served: Served, scripted: ScriptedEngine) -> None:
    await served.ask(max_completion_tokens=3, max_tokens=7)
    await served.ask(max_tokens=7)
    assert [request.max_tokens for request in scripted.requests] == [3, 7]


@pytest.mark.parametrize("limit", [None, 10**8, 10**30])
async def test_a_huge_or_absent_limit_is_the_context_left(
    served: Served, scripted: ScriptedEngine, limit: int | None
) -> None:
    await served.ask(max_tokens=limit)
    request = scripted.requests[0]
    assert request.max_tokens == scripted.max_positions - len(request.prompt_ids)


async def test_sampling_reaches_the_engine(served: Served, scripted: ScriptedEngine) -> None:
    await served.ask(
        temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, presence_penalty=1, frequency_penalty=-1, seed=-5,
        repetition_penalty=1.5, logit_bias={"7": -100, "3": 2.5},
    )  # fmt: skip
    sampling = scripted.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (
        1,
        -1,
        1.5,
    )
    assert (sampling.seed, sampling.logit_bias) == (-5, ((3, 2.5), (7, -100.0)))
    sampling.validate()


async def test_without_a_seed_every_request_draws_its_own(served: Served, scripted: ScriptedEngine) -> None:
    await served.ask()
    await served.ask()
    first, second = (request.sampling for request in scripted.requests)
    assert first.seed != second.seed
    assert not first.is_greedy


async def test_choices_share_a_seed_and_have_streams_of_their_own(
    served: Served, scripted: ScriptedEngine
) -> None:
    await served.ask(n=3, seed=11)
    assert [(one.sampling.seed, one.sampling.stream) for one in scripted.requests] == [
        (11, 0),
        (11, 1),
        (11, 2),
    ]
    assert len({one.request_id for one in scripted.requests}) == 3


async def test_a_biased_token_outside_the_vocabulary_is_refused(served: Served) -> None:
    response = await served.ask(logit_bias={"400": 1})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "logit_bias"


async def test_too_many_choices_are_refused_not_cut(serve: Serve) -> None:
    async with serve(max_choices=2) as served:
        response = await served.ask(n=3)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")


async def test_a_trailing_assistant_message_is_continued(served: Served, scripted: ScriptedEngine) -> None:
    messages = [USER, {"role": "assistant", "content": "The quick"}]
    await served.ask(messages=messages)
    await served.ask(messages=messages, continue_final_message=False)
    continued, fresh = scripted.requests
    assert continued.continues_text
    assert scripted.tokenizer.decode(continued.prompt_ids).endswith("assistant\nThe quick")
    assert not fresh.continues_text
    assert scripted.tokenizer.decode(fresh.prompt_ids).endswith("assistant\n")


async def test_stop_tokens_are_the_models_unless_told_to_go_on(
    served: Served, scripted: ScriptedEngine
) -> None:
    await served.ask()
    await served.ask(ignore_eos=True)
    assert [request.stop_token_ids for request in scripted.requests] == [frozenset({2}), frozenset()]


@pytest.mark.parametrize("length", [300, 10**6])
async def test_a_prompt_beyond_the_context_is_refused_in_the_usual_words(served: Served, length: int) -> None:
    response = await served.ask(messages=[{"role": "user", "content": "x" * length}])
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "This model's maximum context length is 256 tokens" in error["message"]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "x" * 50_000}] * 20},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "x" * 1_000_000}}],
        },
        {"role": "user", "content": "hello", "name": "x" * 1_000_000},
    ],
)
async def test_text_that_cannot_fit_is_refused_unrendered(
    served: Served, scripted: ScriptedEngine, message: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripted.tokenizer, "render", None)
    response = await served.ask(messages=[message, USER])
    assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-6])
async def test_a_temperature_next_to_nothing_is_none(
    served: Served, scripted: ScriptedEngine, temperature: float
) -> None:
    assert (await served.ask(temperature=temperature)).status_code == 200
    assert scripted.requests[-1].sampling.is_greedy


def test_what_the_template_call_takes_itself_cannot_be_set() -> None:
    taken = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"kwargs"}
    assert taken <= TEMPLATE_RESERVED
