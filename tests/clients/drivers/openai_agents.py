"""openai-agents: its default, the Responses endpoint, and chat completions."""

from __future__ import annotations

import openai
import report
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai.types.responses import ResponseTextDeltaEvent
from pydantic import BaseModel
from report import MODEL, tried

set_tracing_disabled(True)
BOTH = (OpenAIResponsesModel, OpenAIChatCompletionsModel)
asked: list[str] = []


class Person(BaseModel):
    name: str
    age: int


@function_tool
def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    asked.append(city)
    return "sunny"


def agent(made, name: str = MODEL, key: str = report.API_KEY, choice: str | None = None, **told) -> Agent:
    client = openai.AsyncOpenAI(base_url=report.BASE_URL, api_key=key, max_retries=0)
    settings = ModelSettings(max_tokens=300, temperature=0, tool_choice=choice, include_usage=True)
    return Agent(name="one", model=made(name, openai_client=client), model_settings=settings, **told)


async def streamed(one: Agent, text: str) -> str:
    running = Runner.run_streamed(one, text)
    said = ""
    async for event in running.stream_events():
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent):
            said += event.data.delta
    return said


async def fails(one: Agent, kind: type[Exception], text: str = report.HELLO) -> None:
    try:
        await Runner.run(one, text)
    except kind as error:
        assert error.body is not None
    else:
        raise AssertionError("no error")


@tried("chat")
async def _() -> None:
    for made in BOTH:
        report.answered((await Runner.run(agent(made), report.HELLO)).final_output)


@tried("streaming")
async def _() -> None:
    for made in BOTH:
        report.answered(await streamed(agent(made), report.HELLO))


@tried("unicode")
async def _() -> None:
    if not report.IS_SCRIPTED:
        raise report.Skipped("what a model writes cannot be foreseen")
    for made in BOTH:
        report.same(await streamed(agent(made), f"Say: {report.UNICODE}"), report.UNICODE)


@tried("usage")
async def _() -> None:
    for made in BOTH:
        usage = (await Runner.run(agent(made), report.HELLO)).context_wrapper.usage
        report.same(usage.total_tokens, usage.input_tokens + usage.output_tokens)
        assert usage.output_tokens > 0
        running = Runner.run_streamed(agent(made), report.HELLO)
        _ = [event async for event in running.stream_events()]
        assert running.context_wrapper.usage.output_tokens > 0


@tried("tools")
async def _() -> None:
    if not report.IS_SCRIPTED:
        one = agent(
            OpenAIResponsesModel,
            choice="required",
            tools=[get_weather],
            tool_use_behavior="stop_on_first_tool",
        )
        report.same((await Runner.run(one, report.WEATHER)).final_output, "sunny")
        return
    for made in BOTH:
        asked.clear()
        ended = await Runner.run(agent(made, tools=[get_weather]), report.WEATHER, max_turns=4)
        report.same(asked, ["Paris"])
        report.is_told(ended.final_output)


@tried("parallel tools")
async def _() -> None:
    if not report.IS_SCRIPTED:
        raise report.Skipped("a free choice: whether a tool is called hangs on the model's wit")
    for made in BOTH:
        asked.clear()
        said = await streamed(agent(made, tools=[get_weather]), report.WEATHERS)
        report.same(sorted(asked), ["Paris", "Rome"])
        report.same(said, "The tools said: sunny; sunny")


@tried("structured")
async def _() -> None:
    for made in BOTH:
        ended = await Runner.run(agent(made, output_type=Person), report.PERSON)
        report.is_person(ended.final_output.model_dump())


@tried("wrong key")
async def _() -> None:
    if report.API_KEY == "none":
        raise report.Skipped("this gateway has no key")
    for made in BOTH:
        await fails(agent(made, key="wrong"), openai.AuthenticationError)


@tried("unknown model")
async def _() -> None:
    for made in BOTH:
        await fails(agent(made, "nobody"), openai.NotFoundError)


@tried("overflow")
async def _() -> None:
    for made in BOTH:
        await fails(agent(made), openai.BadRequestError, report.TOO_LONG)


@tried("broken stream")
async def _() -> None:
    if not report.IS_SCRIPTED:
        raise report.Skipped("no node is lost here")
    for made in BOTH:
        try:
            await streamed(agent(made), "Break")
        except Exception as error:
            assert "layers 10:20" in str(error), f"{made.__name__}: {error}"
        else:
            raise AssertionError(f"{made.__name__}: the loss was not seen")


@tried("responses")
async def _() -> None:
    report.answered((await Runner.run(agent(OpenAIResponsesModel), report.HELLO)).final_output)
