"""langchain-openai: ChatOpenAI over chat completions and over Responses, and OpenAIEmbeddings."""

from __future__ import annotations

import openai
import report
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel
from report import MODEL, tried


class Person(BaseModel):
    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    return "sunny"


def model(**settings) -> ChatOpenAI:
    told = {"base_url": report.BASE_URL, "api_key": report.API_KEY, "model": MODEL, "max_retries": 0}
    return ChatOpenAI(**{**told, "max_tokens": 300, "temperature": 0, "stream_usage": True, **settings})


def calls_of(message) -> list[tuple[str, dict[str, object]]]:
    return [(call["name"], call["args"]) for call in message.tool_calls]


def together(chunks):
    whole = None
    for chunk in chunks:
        whole = chunk if whole is None else whole + chunk
    return whole


@tried("chat")
def _() -> None:
    report.answered(model().invoke(report.HELLO).text)


@tried("streaming")
async def _() -> None:
    report.answered(together(model().stream(report.HELLO)).text)
    report.answered(together([chunk async for chunk in model().astream(report.HELLO)]).text)


@tried("unicode")
def _() -> None:
    if not report.IS_SCRIPTED:
        raise report.Skipped("what a model writes cannot be foreseen")
    report.same(together(model().stream(f"Say: {report.UNICODE}")).text, report.UNICODE)


@tried("usage")
def _() -> None:
    for answer in (model().invoke(report.HELLO), together(model().stream(report.HELLO))):
        usage = answer.usage_metadata
        assert usage["input_tokens"] > 0
        report.same(usage["total_tokens"], usage["input_tokens"] + usage["output_tokens"])


@tried("tools")
def _() -> None:
    for choice in ("auto", "any") if report.IS_SCRIPTED else ("any",):
        bound = model().bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False)
        report.are_calls(calls_of(bound.invoke(report.WEATHER)), "Paris")
        report.are_calls(calls_of(together(bound.stream(report.WEATHER))), "Paris")


@tried("parallel tools")
def _() -> None:
    if not report.IS_SCRIPTED:
        raise report.Skipped("how many calls are made hangs on the model's wit")
    bound = model(max_tokens=900).bind_tools([get_weather], tool_choice="any")
    report.are_calls(calls_of(bound.invoke(report.WEATHERS)), "Paris", "Rome")
    report.are_calls(calls_of(together(bound.stream(report.WEATHERS))), "Paris", "Rome")


@tried("tool result")
def _() -> None:
    call = {"name": "get_weather", "args": {"city": "Paris"}, "id": "call_1", "type": "tool_call"}
    turns = [
        HumanMessage(report.WEATHER),
        AIMessage("", tool_calls=[call]),
        ToolMessage("sunny", tool_call_id="call_1"),
    ]
    report.is_told(model().bind_tools([get_weather]).invoke(turns).text)


@tried("structured")
def _() -> None:
    for method in ("json_schema", "function_calling"):
        held = model().with_structured_output(Person, method=method)
        report.is_person(held.invoke(report.PERSON).model_dump())


@tried("wrong key")
def _() -> None:
    if report.API_KEY == "none":
        raise report.Skipped("this gateway has no key")
    try:
        model(api_key="wrong").invoke(report.HELLO)
    except openai.AuthenticationError:
        return
    raise AssertionError("no error")


@tried("unknown model")
def _() -> None:
    try:
        model(model="nobody").invoke(report.HELLO)
    except openai.NotFoundError:
        return
    raise AssertionError("no error")


@tried("overflow")
def _() -> None:
    try:
        model().invoke(report.TOO_LONG)
    except ContextOverflowError:
        return
    raise AssertionError("no error")


@tried("broken stream")
def _() -> None:
    if not report.IS_SCRIPTED:
        raise report.Skipped("no node is lost here")
    try:
        list(model().stream("Break"))
    except openai.APIError as error:
        assert "layers 10:20" in str(error), str(error)
    else:
        raise AssertionError("the loss was not seen")


@tried("responses")
def _() -> None:
    newer = model(use_responses_api=True)
    report.answered(newer.invoke(report.HELLO).text)
    report.answered(together(newer.stream(report.HELLO)).text)
    bound = newer.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    report.are_calls(calls_of(bound.invoke(report.WEATHER)), "Paris")
    report.is_person(newer.with_structured_output(Person).invoke(report.PERSON).model_dump())


@tried("embeddings")
def _() -> None:
    told = {"base_url": report.BASE_URL, "api_key": report.API_KEY, "model": report.model_for("embeddings")}
    vectors = OpenAIEmbeddings(**told, check_embedding_ctx_length=False).embed_documents(["one", "two"])
    report.same(len(vectors), 2)
    assert len(vectors[0]) > 1
