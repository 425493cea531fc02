"""LiteLLM, as `openai/MODEL` with an `api_base`."""

from __future__ import annotations

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # its table of prices comes with it: nothing is fetched

import litellm
import report
from pydantic import BaseModel
from report import CHAT_TOOL, MODEL, TOOL, tried

litellm.drop_params = False
litellm.telemetry = False
WHERE = {"api_base": report.BASE_URL, "api_key": report.API_KEY, "max_retries": 0}


class Person(BaseModel):
    name: str
    age: int


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def ask(text: str, **fields):
    told = {
        "model": f"openai/{MODEL}",
        "messages": user(text),
        "max_tokens": 300,
        "temperature": 0,
        **WHERE,
        **fields,
    }
    return litellm.completion(**told)


def calls_of(message) -> list[tuple[str, dict[str, object]]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def streamed(text: str, **fields):
    """The whole answer, put together by LiteLLM's own builder."""
    return litellm.stream_chunk_builder(list(ask(text, stream=True, **fields)), messages=user(text))


@tried("chat")
def _() -> None:
    report.answered(ask(report.HELLO).choices[0].message.content)


@tried("streaming")
def _() -> None:
    report.answered(streamed(report.HELLO).choices[0].message.content)


@tried("async")
async def _() -> None:
    stream = await litellm.acompletion(
        model=f"openai/{MODEL}",
        messages=user(report.HELLO),
        max_tokens=300,
        temperature=0,
        stream=True,
        **WHERE,
    )
    report.answered("".join([chunk.choices[0].delta.content or "" async for chunk in stream]))


@tried("unicode")
def _() -> None:
    if not report.IS_SCRIPTED:
        raise report.Skipped("what a model writes cannot be foreseen")
    report.same(streamed(f"Say: {report.UNICODE}").choices[0].message.content, report.UNICODE)


@tried("usage")
def _() -> None:
    usage = ask(report.HELLO, seed=1).usage
    report.same(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
    told = streamed(report.HELLO, seed=1, stream_options={"include_usage": True}).usage
    report.same((told.prompt_tokens, told.completion_tokens), (usage.prompt_tokens, usage.completion_tokens))


@tried("tools")
def _() -> None:
    for choice in ("auto", "required") if report.IS_SCRIPTED else ("required",):
        told = {"tools": [CHAT_TOOL], "tool_choice": choice, "parallel_tool_calls": False}
        report.are_calls(calls_of(ask(report.WEATHER, **told).choices[0].message), "Paris")
        report.are_calls(calls_of(streamed(report.WEATHER, **told).choices[0].message), "Paris")


@tried("parallel tools")
def _() -> None:
    if not report.IS_SCRIPTED:
        raise report.Skipped("how many calls are made hangs on the model's wit")
    told = {"tools": [CHAT_TOOL], "tool_choice": "required", "max_tokens": 900}
    report.are_calls(calls_of(ask(report.WEATHERS, **told).choices[0].message), "Paris", "Rome")
    report.are_calls(calls_of(streamed(report.WEATHERS, **told).choices[0].message), "Paris", "Rome")


@tried("tool result")
def _() -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
    }
    turns = [*user(report.WEATHER), {"role": "assistant", "content": None, "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_call_id": "call_1", "content": "sunny"})
    report.is_told(ask("", messages=turns, tools=[CHAT_TOOL]).choices[0].message.content)


@tried("structured")
def _() -> None:
    report.is_person(json.loads(ask(report.PERSON, response_format=Person).choices[0].message.content))


@tried("wrong key")
def _() -> None:
    if report.API_KEY == "none":
        raise report.Skipped("this gateway has no key")
    try:
        ask(report.HELLO, api_key="wrong")
    except litellm.AuthenticationError:
        return
    raise AssertionError("no error")


@tried("unknown model")
def _() -> None:
    try:
        ask(report.HELLO, model="openai/nobody")
    except litellm.NotFoundError:
        return
    raise AssertionError("no error")


@tried("overflow")
def _() -> None:
    try:
        ask(report.TOO_LONG)
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("no error")


@tried("broken stream")
def _() -> None:
    if not report.IS_SCRIPTED:
        raise report.Skipped("no node is lost here")
    try:
        list(ask("Break", stream=True))
    except Exception as error:  # which class it is depends on how far it came
        assert "layers 10:20" in str(error), str(error)
    else:
        raise AssertionError("the loss was not seen")


@tried("responses")
def _() -> None:
    told = {"model": f"openai/{MODEL}", "temperature": 0, "max_output_tokens": 300, **WHERE}
    report.answered(litellm.responses(input=report.HELLO, **told).output_text)
    kinds = [
        str(getattr(event.type, "value", event.type))
        for event in litellm.responses(input=report.HELLO, stream=True, **told)
    ]
    report.same(kinds[-1], "response.completed")
    made = litellm.responses(
        input=report.WEATHER,
        tools=[{"type": "function", **TOOL, "strict": True}],
        tool_choice="required",
        **told,
    )
    calls = [item for item in made.output if item.type == "function_call"]
    report.are_calls([(call.name, json.loads(call.arguments)) for call in calls[:1]], "Paris")


@tried("completions")
def _() -> None:
    told = {"model": f"text-completion-openai/{MODEL}", "prompt": "once", "max_tokens": 5, **WHERE}
    report.same(litellm.text_completion(**told).usage.completion_tokens, 5)


@tried("embeddings")
def _() -> None:
    model = report.model_for("embeddings")
    made = litellm.embedding(model=f"openai/{model}", input=["one", "two"], encoding_format="float", **WHERE)
    report.same(len(made.data), 2)
    assert len(made.data[0]["embedding"]) > 1


@tried("images")
def _() -> None:
    steps = {} if report.IS_SCRIPTED else {"extra_body": {"steps": 2}}
    made = litellm.image_generation(
        model=f"openai/{report.model_for('image')}", prompt="a red circle", n=1, **steps, **WHERE
    )
    assert made.data[0].b64_json


@tried("transcription")
def _() -> None:
    model = report.model_for("text", takes="audio")
    made = litellm.transcription(model=f"openai/{model}", file=("silence.wav", report.a_recording()), **WHERE)
    assert isinstance(made.text, str)


@tried("speech")
def _() -> None:
    made = litellm.speech(model=f"openai/{report.model_for('audio')}", voice="alloy", input="rain", **WHERE)
    assert len(made.content) > 100
