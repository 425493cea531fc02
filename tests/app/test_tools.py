"""Functions that an answer may call, and answers held to a schema, as clients see them."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from transformers import AutoTokenizer

from app.engine.request import RequestError
from app.engine.tokenizer import ChatTokenizer
from app.stream_shapes import ChatChunk
from tests.app.conftest import Serve
from tests.support.api_server import Served, chunks_of, text_of
from tests.support.local_engine import LocalEngine, ScriptedEngine, saying
from tests.support.tiny_tokenizer import write_tiny_tokenizer

CALLS_SHOWN = """{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}"""
TEMPLATE = """{% if tools %}<|im_start|>system
Tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}CALLS<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
HERMES = TEMPLATE.replace("CALLS", CALLS_SHOWN)
MISTRAL = TEMPLATE.replace(
    "CALLS",
    """{% if message.tool_calls %}[TOOL_CALLS][{% for call in message.tool_calls %}\
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}{% endfor %}]{% endif %}""",
)
LLAMA = TEMPLATE.replace(
    "CALLS",
    """{% for call in message.tool_calls or [] %}{"name": "{{ call.function.name }}", \
"parameters": {{ call.function.arguments | tojson }}}{% endfor %}""",
)

QWEN_XML = TEMPLATE.replace(
    "CALLS",
    """{% for call in message.tool_calls or [] %}<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments | items %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}""",
)
GLM = TEMPLATE.replace(
    "CALLS",
    """{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}
{% for key, value in call.function.arguments | items %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>{% endfor %}""",
)
DEEPSEEK = TEMPLATE.replace(
    "CALLS",
    """{% for call in message.tool_calls or [] %}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>\
{{ call.function.name + '<｜tool▁sep｜>' + call.function.arguments }}<｜tool▁call▁end｜>\
<｜tool▁calls▁end｜>{% endfor %}""",
)
HARMONY = """Reasoning: {{ reasoning_effort }}\
{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}<|start|>{{ message.role }}\
{% if message.tool_calls %} to=functions.{{ message.tool_calls[0].function.name }}<|channel|>commentary json<|message|>\
{{ message.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}\
{% if message.thinking %}<|channel|>analysis<|message|>{{ message.thinking }}<|end|><|start|>assistant{% endif %}\
{{ '<|channel|>final' if message.role == 'assistant' else '' }}<|message|>{{ message.content }}<|end|>\
{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
HARMONY_MARKS = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "tells the weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
FREE: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TOOLS = [WEATHER, NOW]
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'


def tokenizer_with(folder: Path, template: str, *marks: str) -> ChatTokenizer:
    write_tiny_tokenizer(folder, template=template)
    if marks:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
        tokenizer.save_pretrained(folder)
    return ChatTokenizer.load(folder)


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return tokenizer_with(tmp_path_factory.mktemp("hermes"), HERMES)


@pytest.fixture
def random_engine(hermes: ChatTokenizer) -> LocalEngine:
    return LocalEngine(hermes, max_positions=1024)


@pytest.fixture
async def held(serve: Serve, random_engine: LocalEngine) -> AsyncIterator[Served]:
    async with serve(random_engine) as served:
        yield served


@pytest.fixture
async def client(held: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with held.openai() as made:
        yield made


def streamed_calls(events: list[dict[str, Any] | str]) -> list[dict[str, Any]]:
    """Put calls together as careful clients do: by index, names and ids once."""
    calls: list[dict[str, Any]] = []
    for chunk in chunks_of(events):
        for choice in chunk["choices"]:
            for delta in choice["delta"].get("tool_calls", ()):
                if delta["index"] == len(calls):
                    assert delta["function"]["arguments"] == ""
                    assert delta["type"] == "function"
                    calls.append({"id": delta["id"], "name": delta["function"]["name"], "arguments": ""})
                else:
                    assert delta.keys() == {"index", "function"}
                    assert delta["function"].keys() == {"arguments"}
                    calls[delta["index"]]["arguments"] += delta["function"]["arguments"]
    return calls


def are_as_described(chunks: list[dict[str, Any]]) -> None:
    for chunk in chunks:
        assert ChatChunk.model_validate(chunk).model_dump(exclude_unset=True) == chunk


def named(calls: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("seed", range(4))
async def test_a_call_that_must_be_made_is_made_streamed_or_not(held: Served, choice: Any, seed: int) -> None:
    told = {"model": "tiny", "tools": TOOLS, "tool_choice": choice, "seed": seed, "max_tokens": 900}
    answer = (await held.ask(**told)).json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] is None
    calls = answer["message"]["tool_calls"]
    for name, arguments in named(calls):
        value = json.loads(arguments)
        assert (name, list(value)) in (("weather", ["city", "days"]), ("now", []))
    if choice is NAMED:
        assert [name for name, _ in named(calls)] == ["weather"]
    events = await held.stream(**told)
    assert [(call["name"], call["arguments"]) for call in streamed_calls(events)] == named(calls)
    assert text_of(events) == ""
    reasons = [choice["finish_reason"] for chunk in chunks_of(events) for choice in chunk["choices"]]
    assert [reason for reason in reasons if reason] == ["tool_calls"]


@pytest.mark.parametrize(
    ("template", "marks", "kind"),
    [
        (HERMES, (), "hermes"),
        (HERMES, ("<tool_call>", "</tool_call>"), "hermes"),
        (MISTRAL, ("[TOOL_CALLS]",), "mistral"),
        (LLAMA, (), "llama"),
        (QWEN_XML, (), "qwen_xml"),
        (QWEN_XML, ("<tool_call>", "</tool_call>"), "qwen_xml"),
        (
            GLM,
            ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            "glm",
        ),
        (GLM, (), "glm"),
        (DEEPSEEK, (), "deepseek"),
        (HARMONY, HARMONY_MARKS, "harmony"),
        (None, (), "plain"),
    ],
)
async def test_a_call_is_made_in_the_form_that_the_template_shows(
    serve: Serve, tmp_path: Path, template: str | None, marks: tuple[str, ...], kind: str
) -> None:
    shown = TEMPLATE.replace("CALLS", "") if template is None else template
    tokenizer = tokenizer_with(tmp_path, shown, *marks)
    assert tokenizer.tool_style.kind == kind
    engine = LocalEngine(tokenizer, max_positions=1024)
    async with serve(engine) as served:
        told: dict[str, Any] = {"model": "tiny", "tools": TOOLS, "tool_choice": NAMED, "seed": 5}
        ends_thoughts = {str(tokenizer.marker_ids["<|end|>"]): 9} if kind == "harmony" else {}
        told |= {"max_tokens": 600, "logit_bias": ends_thoughts}
        whole = (await served.ask(**told)).json()["choices"][0]
        assert [name for name, _ in named(whole["message"]["tool_calls"])] == ["weather"]
        arguments = json.loads(named(whole["message"]["tool_calls"])[0][1])
        assert list(arguments) == ["city", "days"]
        assert isinstance(arguments["city"], str)
        assert len(arguments["city"]) <= 8
        assert 1 <= arguments["days"] <= 9
        events = await served.stream(**told)
        (call,) = streamed_calls(events)
        assert call["arguments"] == named(whole["message"]["tool_calls"])[0][1]


async def test_no_parallel_calls_means_one(held: Served) -> None:
    for seed in range(6):
        told = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
        answer = (await held.ask(model="tiny", **told)).json()["choices"][0]
        assert len(answer["message"]["tool_calls"]) == 1


async def test_allowed_tools_leave_the_others_out(held: Served, random_engine: LocalEngine) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    answer = await held.ask(model="tiny", tools=TOOLS, tool_choice=choice, max_tokens=900)
    calls = answer.json()["choices"][0]["message"]["tool_calls"]
    assert {name for name, _ in named(calls)} == {"now"}
    assert "weather" not in random_engine.tokenizer.decode(random_engine.requests[-1].prompt_ids)


async def test_the_official_client_goes_round_the_tool_loop(client: openai.AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    told: dict[str, Any] = {"model": "tiny", "tools": TOOLS, "seed": 3, "max_tokens": 500}
    whole = await client.chat.completions.create(messages=messages, tool_choice="required", **told)
    async with client.chat.completions.stream(messages=messages, tool_choice="required", **told) as stream:
        final = await stream.get_final_completion()
    made, streamed = (answer.choices[0].message.tool_calls or [] for answer in (whole, final))
    assert [(call.function.name, call.function.arguments) for call in made] == [
        (call.function.name, call.function.arguments) for call in streamed
    ]
    assert made
    messages.append(whole.choices[0].message.model_dump(exclude_none=True))
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in made]
    told["max_tokens"] = 8
    after = await client.chat.completions.create(messages=messages, **told)
    assert after.choices[0].message.content is not None
    assert after.usage is not None
    assert after.usage.prompt_tokens > (whole.usage.prompt_tokens if whole.usage else 0)


class Trip(BaseModel):
    """What the official client parses answers into."""

    class Stop(BaseModel):
        """One stop."""

        city: Literal["Oslo", "Rome"]
        nights: int

    stops: list[Stop]
    is_booked: bool | None


async def test_the_official_client_parses_an_answer_held_to_a_model(client: openai.AsyncOpenAI) -> None:
    parsed = await client.chat.completions.parse(
        model="tiny",
        messages=[{"role": "user", "content": "hello"}],
        response_format=Trip,
        seed=1,
        max_tokens=900,
    )
    assert isinstance(parsed.choices[0].message.parsed, Trip)
    tools = [openai.pydantic_function_tool(Trip)]
    called = await client.chat.completions.parse(
        model="tiny",
        messages=[{"role": "user", "content": "hello"}],
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        seed=1,
        max_tokens=900,
    )
    (call,) = called.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Trip)


async def test_json_object_gives_an_object(held: Served) -> None:
    ends = []
    for seed in range(6):
        told = {"response_format": {"type": "json_object"}, "seed": seed, "max_tokens": 400}
        choice = (await held.ask(model="tiny", **told)).json()["choices"][0]
        ends.append(choice["finish_reason"])
        assert choice["message"]["content"].startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)
    assert "stop" in ends


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}},
        {"tools": [FREE], "tool_choice": "required", "parallel_tool_calls": False},
    ],
    ids=["object", "schema", "call"],
)
async def test_line_ends_that_a_model_loves_get_nowhere(
    held: Served, hermes: ChatTokenizer, fields: dict[str, Any]
) -> None:
    blanks = {str(token_id): 90 for text in ("\n", "\t", "\r") for token_id in hermes.encode(text)}
    for seed in range(3):
        told = {"model": "tiny", "seed": seed, "max_tokens": 120, "logit_bias": blanks, **fields}
        message = (await held.ask(**told)).json()["choices"][0]["message"]
        said = message["content"] or named(message["tool_calls"])[0][1]
        assert said
        assert not re.search(r"[\n\t\r]", said)


async def test_an_answer_of_a_schema_is_the_same_streamed_and_in_each_choice(held: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    told = {"model": "tiny", "response_format": wanted, "seed": 9, "n": 3}
    choices = (await held.ask(**told)).json()["choices"]
    texts = [choice["message"]["content"] for choice in choices]
    assert [list(json.loads(text)) for text in texts] == [["a", "b"]] * 3
    events = await held.stream(**told)
    assert [text_of(events, index) for index in range(3)] == texts
    assert (await held.ask(**told | {"n": None})).json()["choices"][0]["message"]["content"] == texts[0]


async def test_a_free_answer_may_be_text_of_a_schema_or_a_call(held: Served) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["red", "blue"]}}}
    kinds = set()
    for seed in range(12):
        told = {"tools": [NOW], "response_format": wanted, "seed": seed, "temperature": 2, "max_tokens": 900}
        choice = (await held.ask(model="tiny", **told)).json()["choices"][0]
        kinds.add(choice["finish_reason"])
        if choice["finish_reason"] == "stop":
            assert json.loads(choice["message"]["content"]) in ("red", "blue")
        elif choice["finish_reason"] == "tool_calls":
            assert {name for name, _ in named(choice["message"]["tool_calls"])} == {"now"}
    assert {"stop", "tool_calls"} <= kinds


MANY_KINDS: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "many",
        "parameters": {
            "type": "object",
            "properties": {
                "code": {"type": "string", "pattern": "^[A-C]{2}$"},
                "unit": {"enum": ["km", "mile"]},
                "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
                "where": {"$ref": "#/$defs/place"},
            },
            "required": ["code", "unit", "flags", "where"],
            "$defs": {
                "place": {
                    "type": "object",
                    "properties": {"x": {"type": "integer", "maximum": 99, "minimum": 0}},
                    "required": ["x"],
                }
            },
        },
    },
}


@pytest.mark.parametrize("template", [QWEN_XML, GLM], ids=["qwen", "glm"])
async def test_arguments_in_tags_are_held_to_their_schema(
    serve: Serve, tmp_path: Path, template: str
) -> None:
    engine = LocalEngine(tokenizer_with(tmp_path, template), max_positions=2048)
    async with serve(engine) as served:
        told = {"model": "tiny", "tools": [MANY_KINDS], "tool_choice": "required", "max_tokens": 900}
        told["parallel_tool_calls"] = False
        for seed in range(3):
            choice = (await served.ask(**told, seed=seed)).json()["choices"][0]
            arguments = json.loads(named(choice["message"]["tool_calls"])[0][1])
            assert re.fullmatch("[A-C]{2}", arguments["code"])
            assert arguments["unit"] in ("km", "mile")
            assert all(isinstance(flag, bool) for flag in arguments["flags"])
            assert isinstance(arguments["where"]["x"], int)
        merged: dict[str, Any] = {"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}
        told["tools"] = function(parameters=merged)["tools"]
        error = (await served.ask(**told)).json()["error"]
        assert (error["param"], error["code"]) == ("tools.0.function.parameters", "unsupported_parameter")


# Free answers, by a script -------------------------------------------------------------------------------------


def scripted(tokenizer: ChatTokenizer, text: str) -> ScriptedEngine:
    return ScriptedEngine(tokenizer, saying(tokenizer, text), max_positions=4096)


async def test_calls_in_a_free_answer_are_told_apart_from_its_text(
    serve: Serve, hermes: ChatTokenizer
) -> None:
    async with serve(scripted(hermes, f"Let me look.\n{CALL}\n{CALL}")) as served:
        choice = (await served.ask(tools=TOOLS)).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Let me look."
        assert named(choice["message"]["tool_calls"]) == [("weather", '{"city": "Paris", "days": 2}')] * 2
        events = await served.stream(tools=TOOLS, stream_options={"include_usage": True})
        assert text_of(events) == "Let me look."
        assert [call["name"] for call in streamed_calls(events)] == ["weather", "weather"]
        assert len({call["id"] for call in streamed_calls(events)}) == 2


async def test_each_choice_of_a_stream_has_calls_and_one_end_of_its_own(
    serve: Serve, hermes: ChatTokenizer
) -> None:
    async with serve(scripted(hermes, f"Let me look.\n{CALL}\n{CALL}")) as served:
        chunks = chunks_of(await served.stream(tools=TOOLS, n=2))
    are_as_described(chunks)
    ids: set[str] = set()
    for index in range(2):
        own = [one for chunk in chunks for one in chunk["choices"] if one["index"] == index]
        assert [one["finish_reason"] for one in own if one["finish_reason"]] == ["tool_calls"]
        assert (own[-1]["delta"], own[-1]["finish_reason"]) == ({}, "tool_calls")
        calls = streamed_calls([{"choices": own}])
        assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
            ("weather", {"city": "Paris", "days": 2})
        ] * 2
        ids |= {call["id"] for call in calls}
    assert len(ids) == 4


@pytest.mark.parametrize("changes", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_without_tools_nothing_is_a_call(
    serve: Serve, hermes: ChatTokenizer, changes: dict[str, Any]
) -> None:
    engine = scripted(hermes, CALL)
    async with serve(engine) as served:
        choice = (await served.ask(**changes)).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
        assert "tool_calls" not in choice["message"]
        assert "weather" not in hermes.decode(engine.requests[-1].prompt_ids)


@pytest.mark.parametrize("choice", [None, "auto"])
async def test_a_request_that_says_functions_is_answered_in_its_words(
    serve: Serve, hermes: ChatTokenizer, choice: str | None
) -> None:
    told = {"functions": [WEATHER["function"], NOW["function"]], "function_call": choice}
    async with serve(scripted(hermes, f"Let me look.\n{CALL}\n{CALL}")) as served:
        answer = (await served.ask(**told)).json()["choices"][0]
        assert answer["finish_reason"] == "function_call"
        assert answer["message"]["function_call"] == {
            "name": "weather",
            "arguments": '{"city": "Paris", "days": 2}',
        }
        assert "tool_calls" not in answer["message"]
        chunks = chunks_of(await served.stream(**told))
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        calls = [delta["function_call"] for delta in deltas if "function_call" in delta]
        assert calls[0] == {"name": "weather", "arguments": ""}
        assert "".join(call["arguments"] for call in calls) == answer["message"]["function_call"]["arguments"]
        assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"
        are_as_described(chunks)


async def test_a_function_that_is_named_is_called(held: Served) -> None:
    told = {"functions": [WEATHER["function"], NOW["function"]], "function_call": {"name": "now"}}
    answer = (await held.ask(model="tiny", **told, max_tokens=400)).json()["choices"][0]
    assert answer["message"]["function_call"] == {"name": "now", "arguments": "{}"}
    none = (await held.ask(model="tiny", **told | {"function_call": "none"}, max_tokens=4)).json()["choices"][
        0
    ]
    assert "function_call" not in none["message"]


async def test_a_call_of_an_unknown_function_is_text(serve: Serve, hermes: ChatTokenizer) -> None:
    async with serve(scripted(hermes, CALL)) as served:
        choice = (await served.ask(tools=[NOW])).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
        assert text_of(await served.stream(tools=[NOW])) == CALL


async def test_a_free_answer_stops_after_one_call_where_one_is_allowed(
    serve: Serve, hermes: ChatTokenizer
) -> None:
    async with serve(scripted(hermes, f"{CALL}\n{CALL} and more")) as served:
        answer = (await served.ask(tools=TOOLS, parallel_tool_calls=False)).json()
        choice = answer["choices"][0]
        assert len(choice["message"]["tool_calls"]) == 1
        assert choice["finish_reason"] == "tool_calls"
        assert answer["usage"]["completion_tokens"] <= len(hermes.encode(CALL))


async def test_a_call_that_is_cut_says_so(serve: Serve, hermes: ChatTokenizer) -> None:
    async with serve(scripted(hermes, CALL)) as served:
        choice = (await served.ask(tools=TOOLS, max_tokens=len(hermes.encode(CALL)) - 20)).json()["choices"][
            0
        ]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"city"')


async def test_forced_tokens_are_counted(serve: Serve, hermes: ChatTokenizer) -> None:
    engine = scripted(hermes, "hello")
    engine.forced = 3
    async with serve(engine) as served:
        usage = (await served.ask(n=2)).json()["usage"]
        assert usage["completion_tokens_details"]["forced_tokens"] == 6
        assert served.metric("diffuse_forced_tokens_total", model="scripted") == 6


# What the model is told ----------------------------------------------------------------------------------------

HISTORY = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "snow"},
]


async def test_a_template_is_given_tools_and_calls(serve: Serve, hermes: ChatTokenizer) -> None:
    engine = scripted(hermes, "hello")
    async with serve(engine) as served:
        assert (await served.ask(messages=HISTORY, tools=TOOLS)).status_code == 200
    prompt = hermes.decode(engine.requests[-1].prompt_ids)
    assert '"description": "tells the weather"' in prompt
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in prompt
    assert "snow" in prompt


def test_a_template_that_needs_descriptions_is_given_empty_ones(tmp_path: Path) -> None:
    shown = "{{ '// ' + tool.function.description }}{{ tool.function.name }}"
    shown = "{% for tool in tools or [] %}" + shown + "{% endfor %}"
    tokenizer = tokenizer_with(tmp_path, shown + TEMPLATE.replace("CALLS", ""))
    prompt = tokenizer.render([{"role": "user", "content": "hi"}], variables={"tools": [NOW]})
    assert "// now" in tokenizer.decode(prompt)


async def test_a_template_that_knows_no_tools_has_them_written_into_messages(
    serve: Serve, tokenizer: ChatTokenizer
) -> None:
    engine = scripted(tokenizer, '{"name": "weather", "arguments": {"city": "Rome"}}')
    async with serve(engine) as served:
        choice = (await served.ask(messages=HISTORY, tools=TOOLS)).json()["choices"][0]
        assert named(choice["message"]["tool_calls"]) == [("weather", '{"city": "Rome"}')]
    prompt = tokenizer.decode(engine.requests[-1].prompt_ids)
    assert (
        prompt.index("be brief")
        < prompt.index("tells the weather")
        < prompt.index("Oslo")
        < prompt.index("snow")
    )
    assert '{"name": "weather", "arguments": {"city": "Oslo"}}' in prompt


def test_text_of_tools_cannot_become_a_control_token(hermes: ChatTokenizer) -> None:
    tool = json.loads(json.dumps(NOW))
    tool["function"]["description"] = "<|im_end|>"
    messages = [{"role": "user", "content": "hello"}]
    plain = hermes.render(messages, variables={"tools": [NOW]})
    ends = [list(hermes.render(messages, variables={"tools": [tool]})).count(2), list(plain).count(2)]
    assert ends[0] == ends[1]
    tool["function"]["parameters"] = {"type": "object", "properties": {"<|im_end|>": {}}}
    with pytest.raises(RequestError, match="control token"):
        hermes.render(messages, variables={"tools": [tool]})


# Refusals ------------------------------------------------------------------------------------------------------


def schema_of(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f"} | fields}]}


@pytest.mark.parametrize(
    ("changes", "param", "code"),
    [
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "gone"}}},
            "tool_choice",
            "invalid_value",
        ),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": NAMED}, "tool_choice", "invalid_value"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", "invalid_value"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function", "invalid_value"),
        ({"tools": TOOLS, "tool_choice": 3}, "tool_choice", "invalid_value"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type", "unsupported_parameter"),
        ({"tools": [{"type": "custom", "custom": {"name": "c"}}]}, "tools.0.type", "unsupported_parameter"),
        ({"tools": [NOW, {"type": "web_search"}]}, "tools.1.type", "unsupported_parameter"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "missing_required_parameter"),
        ({"tools": [NOW, NOW]}, "tools.1.function.name", "invalid_value"),
        ({"tools": NOW}, "tools", "invalid_value"),
        (function(name="a b"), "tools.0.function.name", "invalid_value"),
        (function(name=""), "tools.0.function.name", "invalid_value"),
        (function(parameters={"type": "string"}), "tools.0.function.parameters.type", "invalid_value"),
        (
            function(parameters={"properties": {"a": {"not": {}}}}) | {"tool_choice": "required"},
            "tools.0.function.parameters",
            "unsupported_parameter",
        ),
        ({"functions": [{"name": "f"}], "tools": TOOLS}, "functions", "invalid_value"),
        ({"functions": [{"name": "a b"}]}, "functions.0.name", "invalid_value"),
        ({"functions": {"name": "f"}}, "functions", "invalid_value"),
        ({"function_call": {"name": "f"}}, "function_call", "invalid_value"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call", "invalid_value"),
        ({"functions": [{"name": "f"}], "function_call": "required"}, "function_call", "invalid_value"),
        ({"functions": [{"name": "f"}], "function_call": {}}, "function_call.name", "invalid_value"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_value"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
        ({"response_format": "json"}, "response_format", "invalid_value"),
        (schema_of({"uniqueItems": True}), "response_format.json_schema.schema", "unsupported_parameter"),
        (schema_of([]), "response_format.json_schema.schema", "invalid_value"),
        (schema_of({"type": "zzz"}), "response_format.json_schema.schema", "invalid_value"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "invalid_value"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_its_field(
    held: Served, changes: dict[str, Any], param: str, code: str
) -> None:
    response = await held.ask(model="tiny", **changes)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert "uniqueItems" in error["message"] or "uniqueItems" not in json.dumps(changes)
