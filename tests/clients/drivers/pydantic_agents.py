"""pydantic-ai: agents over chat completions, and over Responses, which `openai:` means."""

from __future__ import annotations

import report
from openai import APIError
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, UsageLimits
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from report import MODEL, tried

SETTINGS = {"max_tokens": 300, "temperature": 0}


class Person(BaseModel):
    name: str
    age: int


def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    asked.append(city)
    return "sunny"


asked: list[str] = []


def agent(name: str = MODEL, key: str = report.API_KEY, made=OpenAIChatModel, **told) -> Agent:
    provider = OpenAIProvider(base_url=report.BASE_URL, api_key=key)
    return Agent(made(name, provider=provider), model_settings=SETTINGS, **told)


async def fails(run, status: int, words: str) -> None:
    try:
        await run
    except ModelHTTPError as error:
        report.same(error.status_code, status)
        assert words in str(error.body), str(error.body)
    else:
        raise AssertionError("no error")


@tried("chat")
async def _() -> None:
    report.answered((await agent().run(report.HELLO)).output)


@tried("streaming")
async def _() -> None:
    async with agent().run_stream(report.HELLO) as stream:
        report.answered("".join([piece async for piece in stream.stream_text(delta=True)]))


@tried("unicode")
async def _() -> None:
    if not report.IS_SCRIPTED:
        raise report.Skipped("what a model writes cannot be foreseen")
    async with agent().run_stream(f"Say: {report.UNICODE}") as stream:
        report.same(await stream.get_output(), report.UNICODE)


@tried("usage")
async def _() -> None:
    made = await agent().run(report.HELLO)
    usage = made.usage() if callable(made.usage) else made.usage
    assert usage.input_tokens > 0
    assert usage.output_tokens > 0


@tried("tools")
async def _() -> None:
    if not report.IS_SCRIPTED:
        raise report.Skipped("a free choice: whether a tool is called hangs on the model's wit")
    asked.clear()
    made = await agent(tools=[get_weather]).run(report.WEATHER, usage_limits=UsageLimits(request_limit=5))
    report.same(asked, ["Paris"])
    report.is_told(made.output)


@tried("parallel tools")
async def _() -> None:
    if not report.IS_SCRIPTED:
        raise report.Skipped("a free choice: whether a tool is called hangs on the model's wit")
    asked.clear()
    async with agent(tools=[get_weather]).run_stream(report.WEATHERS) as stream:
        report.same(await stream.get_output(), "The tools said: sunny; sunny")
    report.same(sorted(asked), ["Paris", "Rome"])


@tried("structured")
async def _() -> None:
    made = await agent(output_type=NativeOutput(Person)).run(report.PERSON)
    report.is_person(made.output.model_dump())
    by_tool = await agent(output_type=Person, retries=3).run(report.PERSON)
    report.is_person(by_tool.output.model_dump())


@tried("wrong key")
async def _() -> None:
    if report.API_KEY == "none":
        raise report.Skipped("this gateway has no key")
    await fails(agent(key="wrong").run(report.HELLO), 401, "invalid_api_key")


@tried("unknown model")
async def _() -> None:
    await fails(agent("nobody").run(report.HELLO), 404, "model_not_found")


@tried("overflow")
async def _() -> None:
    await fails(agent().run(report.TOO_LONG), 400, "context_length_exceeded")


@tried("broken stream")
async def _() -> None:
    if not report.IS_SCRIPTED:
        raise report.Skipped("no node is lost here")
    try:
        async with agent().run_stream("Break") as stream:
            await stream.get_output()
    except (APIError, ModelHTTPError, Exception) as error:
        assert "layers 10:20" in str(error), str(error)
    else:
        raise AssertionError("the loss was not seen")


@tried("responses")
async def _() -> None:
    report.answered((await agent(made=OpenAIResponsesModel).run(report.HELLO)).output)
    async with agent(made=OpenAIResponsesModel).run_stream(report.HELLO) as stream:
        report.answered(await stream.get_output())
    held = agent(made=OpenAIResponsesModel, output_type=NativeOutput(Person))
    report.is_person((await held.run(report.PERSON)).output.model_dump())
    if report.IS_SCRIPTED:
        made = await agent(made=OpenAIResponsesModel, tools=[get_weather]).run(report.WEATHER)
        report.is_told(made.output)
