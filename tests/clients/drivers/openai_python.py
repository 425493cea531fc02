"""openai-python, versions 1 and 3."""

from __future__ import annotations

import asyncio
import base64
import json

import openai
import report
from pydantic import BaseModel
from report import CHAT_TOOL, HELLO, MAX_TOKENS, MODEL, TOOL, tried

client = openai.OpenAI(base_url=report.BASE_URL, api_key=report.API_KEY, max_retries=0)
SHORT = {"max_output_tokens": 300, "temperature": 0}
USER = [{"role": "user", "content": HELLO}]


class Person(BaseModel):
    name: str
    age: int


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def ask(text: str = HELLO, **fields):
    told = {"model": MODEL, "messages": user(text), "max_tokens": MAX_TOKENS, "temperature": 0, **fields}
    return client.chat.completions.create(**told)


def calls_of(message) -> list[tuple[str, dict[str, object]]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


@tried("chat")
def _() -> None:
    answer = ask(max_tokens=100)
    report.answered(answer.choices[0].message.content)
    assert answer._request_id
    if report.IS_SCRIPTED:
        report.same(answer.choices[0].finish_reason, "stop")


@tried("usage")
def _() -> None:
    usage = ask().usage
    assert usage.prompt_tokens > 0
    assert usage.completion_tokens > 0
    report.same(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    report.same(chunks[-1].choices, [])
    report.same(chunks[-1].usage, usage)
    assert all(chunk.usage is None for chunk in chunks[:-1])


@tried("streaming")
def _() -> None:
    report.answered(
        "".join(chunk.choices[0].delta.content or "" for chunk in ask(stream=True, max_tokens=100))
    )
    with client.chat.completions.stream(model=MODEL, messages=USER, max_tokens=100, temperature=0) as stream:
        report.answered(stream.get_final_completion().choices[0].message.content)


@tried("async")
async def _() -> None:
    async with openai.AsyncOpenAI(base_url=report.BASE_URL, api_key=report.API_KEY) as many:
        told = {"model": MODEL, "messages": USER, "max_tokens": MAX_TOKENS, "temperature": 0}
        answers = await asyncio.gather(*(many.chat.completions.create(**told) for _ in range(3)))
    report.same(len({answer.choices[0].message.content for answer in answers}), 1)


@tried("unicode")
def _() -> None:
    if not report.IS_SCRIPTED:
        raise report.Skipped("what a model writes cannot be foreseen")
    asked = f"Say: {report.UNICODE}"
    report.same(
        "".join(c.choices[0].delta.content or "" for c in ask(asked, stream=True, max_tokens=200)),
        report.UNICODE,
    )


@tried("tools")
def _() -> None:
    choices = ("auto", "required") if report.IS_SCRIPTED else ("required",)
    for choice in choices:
        answer = ask(
            report.WEATHER, tools=[CHAT_TOOL], tool_choice=choice, max_tokens=300, parallel_tool_calls=False
        )
        report.are_calls(calls_of(answer.choices[0].message), "Paris")
        report.same(answer.choices[0].finish_reason, "tool_calls")
    with client.chat.completions.stream(
        model=MODEL, messages=user(report.WEATHER), tools=[CHAT_TOOL], tool_choice="required", max_tokens=600
    ) as stream:
        report.are_calls(calls_of(stream.get_final_completion().choices[0].message), "Paris")


@tried("parallel tools")
def _() -> None:
    if not report.IS_SCRIPTED:
        raise report.Skipped("how many calls are made hangs on the model's wit")
    asked = {"tools": [CHAT_TOOL], "tool_choice": "required", "max_tokens": 900}
    report.are_calls(calls_of(ask(report.WEATHERS, **asked).choices[0].message), "Paris", "Rome")
    whole = {}
    for chunk in ask(report.WEATHERS, stream=True, **asked):
        for delta in chunk.choices[0].delta.tool_calls or ():
            call = whole.setdefault(delta.index, ["", "", ""])
            call[0] += delta.id or ""
            call[1] += delta.function.name or ""
            call[2] += delta.function.arguments or ""
    report.same(sorted(whole), list(range(len(whole))))
    report.same(len({call[0] for call in whole.values()}), len(whole))
    report.are_calls([(call[1], json.loads(call[2])) for call in whole.values()], "Paris", "Rome")


@tried("tool result")
def _() -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
    }
    turns = [*user(report.WEATHER), {"role": "assistant", "content": None, "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_call_id": "call_1", "content": "sunny"})
    told = {"model": MODEL, "messages": turns, "tools": [CHAT_TOOL], "max_tokens": MAX_TOKENS}
    report.is_told(client.chat.completions.create(**told).choices[0].message.content)


@tried("structured")
def _() -> None:
    told = {"model": MODEL, "messages": user(report.PERSON), "response_format": Person, "max_tokens": 200}
    parse = (
        client.chat.completions.parse
        if hasattr(client.chat.completions, "parse")
        else client.beta.chat.completions.parse
    )
    report.is_person(parse(**told).choices[0].message.parsed.model_dump())
    with client.chat.completions.stream(**told) as stream:
        report.is_person(stream.get_final_completion().choices[0].message.parsed.model_dump())


@tried("wrong key")
def _() -> None:
    if not report.API_KEY or report.API_KEY == "none":
        raise report.Skipped("this gateway has no key")
    try:
        openai.OpenAI(base_url=report.BASE_URL, api_key="wrong", max_retries=0).models.list()
    except openai.AuthenticationError as error:
        report.same(error.code, "invalid_api_key")
    else:
        raise AssertionError("no error")


@tried("unknown model")
def _() -> None:
    try:
        client.chat.completions.create(model="nobody", messages=USER)
    except openai.NotFoundError as error:
        report.same((error.code, error.param), ("model_not_found", "model"))
        assert error.request_id
    else:
        raise AssertionError("no error")


@tried("overflow")
def _() -> None:
    try:
        ask(report.TOO_LONG)
    except openai.BadRequestError as error:
        report.same(error.code, "context_length_exceeded")
    else:
        raise AssertionError("no error")


@tried("broken stream")
def _() -> None:
    if not report.IS_SCRIPTED:
        raise report.Skipped("no node is lost here")
    try:
        list(ask("Break", stream=True))
    except openai.APIError as error:
        assert "layers 10:20" in error.message, error.message
    else:
        raise AssertionError("the loss was not seen")


@tried("responses")
def _() -> None:
    answer = client.responses.create(model=MODEL, input=HELLO, **SHORT)
    report.answered(answer.output_text)
    with client.responses.stream(model=MODEL, input=HELLO, **SHORT) as stream:
        report.answered(stream.get_final_response().output_text)
    made = client.responses.create(
        model=MODEL,
        input=report.WEATHER,
        tools=[{"type": "function", **TOOL, "strict": True}],
        tool_choice="required",
    )
    calls = [item for item in made.output if item.type == "function_call"]
    report.are_calls([(call.name, json.loads(call.arguments)) for call in calls[:1]], "Paris")
    if report.IS_SCRIPTED:
        result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "sunny"}
        turns = [*user(report.WEATHER), *(item.model_dump(exclude_none=True) for item in made.output), result]
        report.is_told(client.responses.create(model=MODEL, input=turns).output_text)
    parsed = client.responses.parse(model=MODEL, input=report.PERSON, text_format=Person, **SHORT)
    report.is_person(parsed.output_parsed.model_dump())


@tried("completions")
def _() -> None:
    made = client.completions.create(model=MODEL, prompt="once", max_tokens=5)
    report.same(made.usage.completion_tokens, 5)
    whole = client.completions.create(model=MODEL, prompt="once", max_tokens=5, seed=1).choices[0].text
    stream = client.completions.create(model=MODEL, prompt="once", max_tokens=5, seed=1, stream=True)
    report.same("".join(chunk.choices[0].text for chunk in stream), whole)


@tried("models")
def _() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    report.same(client.models.retrieve(MODEL).id, MODEL)


@tried("embeddings")
def _() -> None:
    model = report.model_for("embeddings")
    plain = client.embeddings.create(model=model, input=["one", "two"], encoding_format="float")
    packed = client.embeddings.create(model=model, input=["one", "two"])
    assert len(packed.data[0].embedding) > 1
    for one, other in zip(plain.data, packed.data, strict=True):
        near = zip(one.embedding, other.embedding, strict=True)
        assert all(abs(left - right) < 1e-5 * (1 + abs(left)) for left, right in near)
    assert packed.usage.total_tokens > 0


@tried("images")
def _() -> None:
    model = report.model_for("image")
    steps = {} if report.IS_SCRIPTED else {"steps": 2}
    made = client.images.generate(model=model, prompt="a red circle", n=2, extra_body={"seed": 7, **steps})
    report.same(len(made.data), 2)
    assert base64.b64decode(made.data[0].b64_json).startswith(b"\x89PNG")
    types = [
        event.type
        for event in client.images.generate(
            model=model, prompt="a red circle", stream=True, partial_images=1, extra_body=steps
        )
    ]
    report.same(types, ["image_generation.partial_image", "image_generation.completed"])


@tried("transcription")
def _() -> None:
    model = report.model_for("text", takes="audio")
    file = ("silence.wav", report.a_recording())
    text = client.audio.transcriptions.create(model=model, file=file).text
    told = client.audio.transcriptions.create(model=model, file=file, response_format="verbose_json")
    report.same(told.text, text)
    report.same(round(float(told.duration)), 1)
    kinds = [event.type for event in client.audio.transcriptions.create(model=model, file=file, stream=True)]
    report.same(kinds[-1], "transcript.text.done")


@tried("speech")
def _() -> None:
    model = report.model_for("audio")
    with client.audio.speech.with_streaming_response.create(
        model=model, voice="alloy", input="rain", response_format="wav"
    ) as made:
        assert b"".join(made.iter_bytes()).startswith(b"RIFF")
    assert len(client.audio.speech.create(model=model, voice="alloy", input="rain").content) > 100
