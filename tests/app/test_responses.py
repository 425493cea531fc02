"""`/v1/responses`: the official client's helpers, the order of events, refusals by name, and bodies made to hurt."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from app.api.responses_reply import ResponseEvent, ResponseObject
from app.engine.request import GenerationRequest
from app.engine.tokenizer import ChatTokenizer
from routing.errors import ErrorCode, NoRouteError, remote_error
from tests.app.conftest import ANSWER, Serve
from tests.app.test_failures import fail_at
from tests.support.api_server import Served, settles
from tests.support.local_engine import ScriptedEngine, saying

PATH = "/v1/responses"
ASKED: dict[str, Any] = {"model": "scripted", "input": "hello"}
LIFECYCLE = ("response.created", "response.in_progress", "response.completed")
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0K"}


async def ask(served: Served, **changes: Any) -> Any:
    return await served.http.post(PATH, json=ASKED | changes)


async def stream(served: Served, **changes: Any) -> list[dict[str, Any]]:
    """Return the events of a stream; each block holds a name and what it names, and nothing else."""
    response = await ask(served, stream=True, **changes)
    assert response.status_code == 200, response.text
    assert response.text.endswith("\n\n")
    return [event_of(block) for block in response.text.removesuffix("\n\n").split("\n\n")]


def event_of(block: str) -> dict[str, Any]:
    name, data = block.split("\n")
    event: dict[str, Any] = json.loads(data.removeprefix("data: "))
    assert name == f"event: {event['type']}"
    return event


def prompt_of(scripted: ScriptedEngine) -> str:
    return scripted.tokenizer.decode(scripted.requests[-1].prompt_ids)


# The official client --------------------------------------------------------------------------------------


async def test_a_whole_answer(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model="scripted", input="hello")
    assert answer.output_text == ANSWER
    assert answer.status == "completed"
    assert answer.id.startswith("resp_")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + 9
    assert answer.usage.input_tokens_details.cached_tokens == 0
    assert (answer.model, answer.error, answer.temperature) == ("scripted", None, 1.0)
    assert answer.model_extra is not None
    assert answer.model_extra["store"] is False


async def test_the_stream_helper_puts_the_final_response_together(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(model="scripted", input="hello", instructions="be brief") as events:
        text = "".join([event.delta async for event in events if event.type == "response.output_text.delta"])
        final = await events.get_final_response()
    assert text == final.output_text == ANSWER
    assert final.instructions == "be brief"
    assert final.usage is not None
    assert final.usage.output_tokens == 9


async def test_the_tutorial_loop(client: openai.AsyncOpenAI) -> None:
    events = await client.responses.create(model="scripted", input="hello", stream=True)
    kinds = [event.type async for event in events]
    assert kinds[:4] == [*LIFECYCLE[:2], "response.output_item.added", "response.content_part.added"]
    assert kinds[-1] == "response.completed"


async def test_an_answer_goes_back_as_input(client: openai.AsyncOpenAI, scripted: ScriptedEngine) -> None:
    first = await client.responses.create(model="scripted", input="hello")
    turns: list[Any] = [
        {"role": "user", "content": "hello"},
        *first.output,
        {"role": "user", "content": "more"},
    ]
    await client.responses.create(model="scripted", input=turns)
    prompt = prompt_of(scripted)
    assert prompt.index("hello") < prompt.index(ANSWER) < prompt.index("more")


async def test_a_stream_that_breaks_is_no_final_response(
    client: openai.AsyncOpenAI, scripted: ScriptedEngine
) -> None:
    fail_at(scripted, 3, remote_error(ErrorCode.HOP_LOST, hop=1))
    with pytest.raises(RuntimeError, match=r"response\.completed"):
        async with client.responses.stream(model="scripted", input="hello") as events:
            await events.get_final_response()


async def test_a_refusal_is_the_clients_own_exception(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="scripted", input="hello", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


# Events ---------------------------------------------------------------------------------------------------


async def test_the_events_of_a_text_in_their_order(served: Served) -> None:
    events = await stream(served)
    kinds = [event["type"] for event in events if event["type"] != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_deltas_name_their_item_and_join_to_its_text(served: Served) -> None:
    events = await stream(served)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    item = events[-1]["response"]["output"][0]
    assert {(one["item_id"], one["output_index"], one["content_index"]) for one in deltas} == {
        (item["id"], 0, 0)
    }
    assert "".join(one["delta"] for one in deltas) == item["content"][0]["text"] == ANSWER
    assert item["status"] == "completed"


async def test_every_event_is_as_described(served: Served) -> None:
    for event in await stream(served):
        assert set(event) <= set(ResponseEvent.model_fields)
        ResponseEvent.model_validate(event, strict=False)
    body = (await ask(served)).text
    assert ResponseObject.model_validate_json(body).model_dump_json() == body


async def test_stream_and_whole_answer_say_the_same(served: Served) -> None:
    ours = {"id", "created_at", "completed_at", "timings", "output"}
    whole = (await ask(served, seed=1)).json()
    streamed = (await stream(served, seed=1))[-1]["response"]
    assert {name: whole[name] for name in whole if name not in ours} == {
        name: streamed[name] for name in streamed if name not in ours
    }
    assert whole["output"][0]["content"] == streamed["output"][0]["content"]


async def test_an_answer_that_is_cut_is_incomplete(served: Served) -> None:
    events = await stream(served, max_output_tokens=3)
    response = events[-1]["response"]
    assert events[-1]["type"] == "response.incomplete"
    assert response["status"] == response["output"][0]["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["completed_at"] is None
    assert (await ask(served, max_output_tokens=3)).json()["status"] == "incomplete"


async def test_an_answer_without_a_word_has_an_empty_message(serve: Serve, tokenizer: ChatTokenizer) -> None:
    async with serve(ScriptedEngine(tokenizer, saying(tokenizer, ""))) as served:
        events = await stream(served)
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""
    assert events[-1]["type"] == "response.completed"


async def test_a_stream_that_fails_says_so_as_its_last_event(
    served: Served, scripted: ScriptedEngine
) -> None:
    fail_at(scripted, 3, remote_error(ErrorCode.HOP_LOST, "secret", hop=1))
    *_, last = await stream(served)
    response = last["response"]
    assert (last["type"], response["status"]) == ("response.failed", "failed")
    assert response["error"]["code"] == "node_lost"
    assert response["output"][0]["status"] == "incomplete"
    assert "secret" not in json.dumps(last)
    assert served.metric("diffuse_request_errors_total", endpoint=PATH, code="node_lost") == 1


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_failure_before_the_first_event_is_an_error_response(
    served: Served, scripted: ScriptedEngine, is_stream: bool
) -> None:
    fail_at(scripted, -1, NoRouteError([(10, 20)], "scripted"))
    response = await ask(served, stream=is_stream)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_route")


async def test_a_silent_stream_gets_comments_and_numbered_events(
    serve: Serve, scripted: ScriptedEngine
) -> None:
    go = asyncio.Event()
    scripted.prefill_steps = 3
    scripted.before_token = lambda number: go.wait() if number == 0 else None
    parts: list[str] = []
    async with (
        serve(keepalive_s=0.02, heartbeat_s=0.08) as served,
        served.http.stream("POST", PATH, json=ASKED | {"stream": True}) as response,
    ):
        buffered = ""
        async for text in response.aiter_text():
            buffered += text
            *complete, buffered = buffered.split("\n\n")
            parts += complete
            if any('"prefill"' in part for part in parts):
                go.set()
    events = [event_of(part) for part in parts if not part.startswith(":")]
    assert any(part.startswith(":") for part in parts)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    told = next(event for event in events if "prefill" in event)
    assert (told["type"], told["prefill"]) == ("response.in_progress", {"done": 3, "total": 3})


@pytest.mark.parametrize("is_stream", [False, True])
async def test_leaving_frees_the_session(served: Served, scripted: ScriptedEngine, is_stream: bool) -> None:
    scripted.before_token = lambda number: asyncio.Event().wait() if number == 2 else None
    writer = await served.begin(PATH, ASKED | {"stream": is_stream})
    await settles(lambda: scripted.num_open == 1)
    writer.close()
    await settles(lambda: scripted.num_open == 0 and served.gateway.num_running == 0)
    assert served.metric("diffuse_requests_aborted_total", endpoint=PATH) == 1


async def test_the_record_of_an_answer_is_found_by_its_id(served: Served) -> None:
    answer = (await ask(served)).json()
    record = (await served.http.get(f"/v1/requests/{answer['id']}")).json()
    assert record["endpoint"] == PATH


# Functions and forms --------------------------------------------------------------------------------------


class Look(BaseModel):
    """Look at a place."""

    place: str


LOOK: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "description": "Look at a place",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    "strict": False,
}
TOOLS: Any = [LOOK | {"strict": True}]  # typed by the client as one of sixteen kinds
CALLING = """well<tool_call>
{"name": "look", "arguments": {"place": "hello"}}
</tool_call><tool_call>
{"name": "look", "arguments": {"place": "world"}}
</tool_call>"""


@pytest.fixture
async def calling(serve: Serve, tokenizer: ChatTokenizer) -> AsyncIterator[Served]:
    """An engine that calls functions until it is given an answer."""

    def script(request: GenerationRequest) -> list[int]:
        is_answered = "seen" in tokenizer.decode(request.prompt_ids)
        return saying(tokenizer, ANSWER if is_answered else CALLING)(request)

    async with serve(ScriptedEngine(tokenizer, script, max_positions=2000)) as served:
        yield served


async def test_calls_are_items_with_events_of_their_own(calling: Served) -> None:
    events = await stream(calling, tools=[LOOK])
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "function_call"]
    assert [json.loads(item["arguments"]) for item in output[1:]] == [{"place": "hello"}, {"place": "world"}]
    assert output[1]["call_id"] != output[2]["call_id"]
    assert output[1]["call_id"] != output[1]["id"]
    for index, item in enumerate(output):
        told = [event for event in events if event.get("output_index") == index]
        assert told[0]["type"] == "response.output_item.added"
        assert told[0]["item"]["status"] == "in_progress"
        assert told[-1] | {"sequence_number": 0} == {
            "type": "response.output_item.done", "sequence_number": 0, "output_index": index, "item": item,
        }  # fmt: skip
        deltas = [event["delta"] for event in told if event["type"].endswith("arguments.delta")]
        assert "".join(deltas) == item.get("arguments", "")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_whole_answers_have_the_same_calls(calling: Served) -> None:
    output = (await ask(calling, tools=[LOOK])).json()["output"]
    assert [item.get("name") for item in output] == [None, "look", "look"]
    assert json.loads(output[2]["arguments"]) == {"place": "world"}


async def test_the_tool_loop_of_the_official_client(calling: Served) -> None:
    turns: list[Any] = [{"role": "user", "content": "hello"}]
    async with calling.openai() as client:
        first = await client.responses.create(model="scripted", input=turns, tools=TOOLS)
        turns += first.output
        for item in first.output:
            if item.type == "function_call":
                turns.append({"type": "function_call_output", "call_id": item.call_id, "output": "seen"})
        second = await client.responses.create(model="scripted", input=turns, tools=TOOLS)
    assert second.output_text == ANSWER


async def test_the_stream_helper_parses_arguments(calling: Served) -> None:
    async with (
        calling.openai() as client,
        client.responses.stream(model="scripted", input="hello", tools=TOOLS) as events,
    ):
        final = await events.get_final_response()
    assert [item.parsed_arguments for item in final.output if item.type == "function_call"] == [
        {"place": "hello"},
        {"place": "world"},
    ]


async def test_an_answer_held_to_a_schema_is_parsed(serve: Serve, tokenizer: ChatTokenizer) -> None:
    engine = ScriptedEngine(tokenizer, saying(tokenizer, '{"place": "fox"}'), max_positions=2000)
    async with (
        serve(engine) as served,
        served.openai() as client,
    ):
        answer = await client.responses.parse(model="scripted", input="hello", text_format=Look)
    assert answer.output_parsed == Look(place="fox")
    assert engine.requests[-1].grammar is not None
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.type == "json_schema"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"tools": [LOOK | {"name": "a b"}]}, "tools.0.name"),
        ({"tools": [LOOK, LOOK]}, "tools.1.name"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "odd"}}}},
         "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x",
                              "schema": {"properties": {}, "required": [[]], "format": []}}}}, "text.format.schema"),
    ],
)  # fmt: skip
async def test_what_a_chat_finds_wrong_is_named_as_it_is_here(
    served: Served, wrong: dict[str, Any], param: str
) -> None:
    response = await ask(served, **wrong)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert "response_format" not in error["message"]
    assert ".function" not in error["message"]


# Input ----------------------------------------------------------------------------------------------------


async def test_text_and_items_make_the_same_prompt(served: Served, scripted: ScriptedEngine) -> None:
    content = [{"type": "input_text", "text": "hello"}]
    for told in (
        "hello",
        [{"role": "user", "content": "hello"}],
        [{"type": "message", "role": "user", "content": content}],
    ):
        assert (await ask(served, input=told)).status_code == 200
    assert len({request.prompt_ids for request in scripted.requests}) == 1
    await served.ask()
    assert scripted.requests[-1].prompt_ids == scripted.requests[0].prompt_ids


async def test_instructions_and_the_system_messages_behind_them_are_one(
    served: Served, scripted: ScriptedEngine
) -> None:
    turns = [{"role": "developer", "content": "second"}, {"role": "user", "content": "hello"}]
    assert (await ask(served, instructions="first", input=turns)).status_code == 200
    assert prompt_of(scripted).count("system") == 1
    assert prompt_of(scripted).index("first") < prompt_of(scripted).index("second")


async def test_an_assistants_last_item_is_not_continued(served: Served, scripted: ScriptedEngine) -> None:
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "well"}]
    assert (await ask(served, input=turns)).status_code == 200
    assert not scripted.requests[-1].continues_text


async def test_calls_their_answers_and_reasoning_are_taken(served: Served, scripted: ScriptedEngine) -> None:
    turns = [
        {"role": "user", "content": "hello"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "look", "arguments": "{}"},
        {"type": "function_call", "id": "fc_2", "call_id": "call_2", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "the quick"},
        {
            "type": "function_call_output",
            "call_id": "call_2",
            "output": [{"type": "input_text", "text": "fox"}],
        },
    ]
    assert (await ask(served, input=turns)).status_code == 200
    assert prompt_of(scripted).index("the quick") < prompt_of(scripted).index("fox")


async def test_sampling_goes_on_and_is_told_back(served: Served, scripted: ScriptedEngine) -> None:
    answer = (await ask(served, temperature=0.5, top_p=0.9, top_k=7, seed=3, presence_penalty=1)).json()
    sampling = scripted.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 7, 3)
    assert (answer["temperature"], answer["top_p"], answer["presence_penalty"]) == (0.5, 0.9, 1.0)


@pytest.mark.parametrize(
    "ignored",
    [
        {"store": True},
        {"background": False},
        {"include": ["reasoning.encrypted_content"]},
        {"truncation": "disabled"},
        {"metadata": {"a": "b"}, "user": "u", "service_tier": "auto", "prompt_cache_key": "k"},
        {"text": {"format": {"type": "text"}, "verbosity": "low"}},
        {"reasoning": {"effort": "low", "summary": "auto"}},
        {"tools": [], "tool_choice": "auto"},
        {"previous_response_id": None, "conversation": None, "unheard_of": [1]},
    ],
)
async def test_what_cannot_change_the_answer_is_passed_over(served: Served, ignored: dict[str, Any]) -> None:
    answer = (await ask(served, **ignored)).json()
    assert (answer["status"], answer["store"], answer["background"]) == ("completed", False, False)
    assert answer["metadata"] == ignored.get("metadata", {})


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools.0.type"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.type"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input.0.type"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
         "input.0.content.0.file_id"),
        ({"input": [{"role": "user", "content": [PICTURE]}], "instructions": "x"}, "input.0.content.0.image_url"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": [PICTURE]}]},
         "input.0.output.0.image_url"),
        ({"input": [{"role": "system", "content": [PICTURE]}]}, "input.0.content.0.image_url"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input.0.arguments"),
        ({"input": [{"type": "reasoning", "summary": []}, CALL]}, "input.1"),
        ({"input": "x " * 3000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"messages": []}, "input"),
        ({"n": 2}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": -7}, "top_k"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
    ],
)  # fmt: skip
async def test_a_refusal_names_the_field(served: Served, wrong: dict[str, Any], param: str) -> None:
    body = ASKED | wrong
    if "messages" in wrong:
        body = {"model": "scripted", **wrong}
    response = await served.http.post(PATH, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert "'messages" not in error["message"]


async def test_an_unknown_model_is_not_found(served: Served) -> None:
    response = await ask(served, model="other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


# Bodies that were made to hurt ----------------------------------------------------------------------------

FULL: dict[str, Any] = ASKED | {
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}, PICTURE]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
    ],
    "instructions": "x",
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "metadata": {"a": "b"},
    "include": ["message.output_text.logprobs"],
    "max_output_tokens": 5,
    "top_logprobs": 3,
    "stream": True,
    "stream_options": {},
}
ODD: list[Any] = [
    None, True, -1, 0, 2**70, 1e300, "", "x", "\x00", "auto", [], [[]], {}, {"type": "message"}, {"type": []}, [None],
    ["x"] * 50, {"": {}}, "{{", "message",
]  # fmt: skip


def mutated(draw: random.Random, value: Any) -> Any:
    """Return a copy with something in it exchanged, dropped, doubled or put elsewhere."""
    if draw.random() < 0.15:
        return draw.choice(ODD)
    if isinstance(value, dict) and value:
        chosen = draw.choice(list(value))
        rest = {name: inner for name, inner in value.items() if name != chosen}
        return rest if draw.random() < 0.2 else value | {chosen: mutated(draw, value[chosen])}
    if isinstance(value, list) and value:
        place = draw.randrange(len(value))
        changed = mutated(draw, value[place])
        return [*value[:place], changed, *value[place + (draw.random() < 0.7) :]]
    return draw.choice(ODD)


async def test_mutated_bodies_get_an_answer_or_an_enveloped_refusal(served: Served) -> None:
    draw = random.Random(7)
    refused = 0
    for _ in range(600):
        body = FULL
        for _ in range(draw.randint(1, 4)):
            body = mutated(draw, body)
        if draw.random() < 0.5 and isinstance(body, dict):  # else nearly all stumble over the same fields
            body = {name: body[name] for name in body if draw.random() < 0.6} | {"model": "scripted"}
        response = await served.http.post(PATH, json=body)
        if response.status_code == 200:
            continue
        refused += 1
        assert 400 <= response.status_code < 500, (response.text, body)
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "Traceback" not in error["message"]
        assert len(response.content) < 1200
    assert refused > 200
    assert served.gateway.num_running == 0
