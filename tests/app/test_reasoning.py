"""Models that think before they answer, as clients see them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AddedToken, AutoTokenizer

from app.api.answer_form import literal, thinking_first
from app.engine.grammar import GrammarRules
from app.engine.tokenizer import ChatTokenizer
from tests.app.conftest import Serve
from tests.app.test_tools import HARMONY, HARMONY_MARKS
from tests.support.api_server import Served, chunks_of, text_of
from tests.support.local_engine import LocalEngine, ScriptedEngine
from tests.support.tiny_tokenizer import write_tiny_tokenizer

TURNS = """{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content or '' }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
"""
# As Qwen3 has it: the model opens its thought, and the template writes an empty one where it is not to think.
QWEN = TURNS + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
OPENED = TURNS + "<think>\n{% endif %}"  # as DeepSeek-R1 has it, without a switch
MAGISTRAL = OPENED.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")

NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["a"],
}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


def tokenizer_with(
    folder: Path, template: str, marks: tuple[str, ...] = (), *, special: bool = True
) -> ChatTokenizer:
    write_tiny_tokenizer(folder, template=template)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks], special)
    tokenizer.save_pretrained(folder)
    return ChatTokenizer.load(folder)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return tokenizer_with(tmp_path_factory.mktemp("qwen"), QWEN, ("<think>", "</think>"), special=False)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return tokenizer_with(tmp_path_factory.mktemp("opened"), OPENED)  # the marks are several tokens


@pytest.fixture(scope="module")
def magistral(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return tokenizer_with(tmp_path_factory.mktemp("magistral"), MAGISTRAL, ("[THINK]", "[/THINK]"))


def scripted(tokenizer: ChatTokenizer, text: str) -> ScriptedEngine:
    ids = tokenizer._tokenizer.encode(text, add_special_tokens=False)
    return ScriptedEngine(
        tokenizer, lambda request: [*ids, min(tokenizer.stop_token_ids)], max_positions=4096
    )


PARTS = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{{ '[THINK]' + part.thinking + '[/THINK]' if part.type == 'thinking' else part.text }}\
{% endfor %}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_a_template_may_take_thoughts_as_parts_of_the_content(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, PARTS, ("[THINK]", "[/THINK]"))
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello", "reasoning_content": "the fox"},
        {"role": "user", "content": "and?"},
    ]
    assert "[THINK]the fox[/THINK]hello" in tokenizer.decode_all(tokenizer.render(history))


def thought_of(events: list[dict[str, Any] | str], name: str = "reasoning_content") -> str:
    choices = [choice for chunk in chunks_of(events) for choice in chunk["choices"]]
    return "".join(choice["delta"].get(name) or "" for choice in choices)


@pytest.mark.parametrize("which", ["qwen", "opened", "magistral"])
async def test_thoughts_are_told_apart_streamed_or_not(
    serve: Serve, request: pytest.FixtureRequest, which: str
) -> None:
    tokenizer = request.getfixturevalue(which)
    text = {
        "qwen": "<think>\nhello world?\n\nyes\n</think>\n\nthe fox",
        "opened": "hello world?\n\nyes\n</think>\n\nthe fox",
        "magistral": "hello world?\n\nyes[/THINK]the fox",
    }[which]
    async with serve(scripted(tokenizer, text)) as served:
        answer = (await served.ask(n=2)).json()
        for choice in answer["choices"]:
            message = choice["message"]
            assert message["content"] == "the fox"
            assert message["reasoning_content"] == message["reasoning"] == "hello world?\n\nyes"
        thinking = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        num_said = len(tokenizer.encode("the fox")) + 1
        assert 0 < thinking <= answer["usage"]["completion_tokens"] - 2 * num_said
        events = await served.stream(stream_options={"include_usage": True})
        assert text_of(events) == "the fox"
        assert thought_of(events) == thought_of(events, "reasoning") == "hello world?\n\nyes"
        usage = chunks_of(events)[-1]["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] * 2 == thinking


async def test_without_a_thought_there_is_no_such_field(serve: Serve, qwen: ChatTokenizer) -> None:
    async with serve(scripted(qwen, "hello")) as served:
        message = (await served.ask()).json()["choices"][0]["message"]
        assert not {"reasoning", "reasoning_content"} & message.keys()
        deltas = [
            choice["delta"] for chunk in chunks_of(await served.stream()) for choice in chunk["choices"]
        ]
        assert not any({"reasoning", "reasoning_content"} & delta.keys() for delta in deltas)


async def test_an_answer_cut_inside_its_thought_has_no_text(serve: Serve, qwen: ChatTokenizer) -> None:
    async with serve(scripted(qwen, "<think>\nhello world, the fox")) as served:
        answer = (await served.ask(max_tokens=5)).json()
        choice = answer["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
        assert choice["message"]["reasoning_content"].startswith("hello")
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5
        events = await served.stream(max_tokens=5)
        assert thought_of(events) == choice["message"]["reasoning_content"]


async def test_stop_strings_are_not_looked_for_in_thoughts(serve: Serve, qwen: ChatTokenizer) -> None:
    async with serve(scripted(qwen, "<think>STOP? no</think>hello STOP there")) as served:
        message = (await served.ask(stop="STOP")).json()["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("STOP? no", "hello ")


async def test_probabilities_are_those_of_the_answer(serve: Serve, qwen: ChatTokenizer) -> None:
    async with serve(scripted(qwen, "<think>\nhm ü\n</think>\n\n the ü")) as served:
        choice = (await served.ask(logprobs=True)).json()["choices"][0]
        told = choice["logprobs"]["content"]
        assert (
            b"".join(bytes(one["bytes"]) for one in told).decode() == choice["message"]["content"] == "the ü"
        )
        events = chunks_of(await served.stream(logprobs=True))
        pieces = [choice for chunk in events for choice in chunk["choices"]]
        streamed = [one for piece in pieces for one in (piece["logprobs"] or {"content": []})["content"]]
        assert streamed == told


@pytest.mark.parametrize("how", [{"include_reasoning": False}, {"reasoning_format": "none"}])
async def test_thoughts_can_be_left_out_or_left_in(
    serve: Serve, qwen: ChatTokenizer, how: dict[str, Any]
) -> None:
    text = "<think>\nhm\n</think>\n\nhello"
    async with serve(scripted(qwen, text)) as served:
        message = (await served.ask(**how)).json()["choices"][0]["message"]
        assert "reasoning" not in message
        assert message["content"] == (text if "reasoning_format" in how else "hello")
        events = await served.stream(**how)
        assert (thought_of(events), text_of(events)) == ("", message["content"])


async def test_effort_reaches_the_template_and_none_closes_the_thought(
    serve: Serve, qwen: ChatTokenizer, opened: ChatTokenizer
) -> None:
    for tokenizer in (qwen, opened):
        engine = scripted(tokenizer, "hello")
        async with serve(engine) as served:
            for effort in ("none", "high"):
                assert (await served.ask(reasoning_effort=effort)).status_code == 200
            ends = [tokenizer.decode_all(request.prompt_ids[-30:]) for request in engine.requests]
            assert ends[0].rstrip().endswith("</think>")
            assert not ends[1].rstrip().endswith("</think>")
            assert engine.requests[0].thoughts is None
            assert (await served.ask(reasoning_effort="much")).json()["error"]["param"] == "reasoning_effort"


async def test_effort_may_be_said_in_an_object(serve: Serve, qwen: ChatTokenizer) -> None:
    """As llm-comply and clients of OpenRouter do."""
    engine = scripted(qwen, "<think>hm</think>hello")
    async with serve(engine) as served:
        for wish in ({"summary": "auto"}, {"effort": "none"}, {"enabled": False}):
            assert (await served.ask(reasoning=wish)).status_code == 200
        closed = [
            qwen.decode_all(one.prompt_ids[-30:]).rstrip()[-8:] == "</think>" for one in engine.requests
        ]
        assert closed == [False, True, True]
        message = (await served.ask(reasoning={"exclude": True})).json()["choices"][0]["message"]
        assert "reasoning" not in message
        refused = await served.ask(reasoning={"effort": "low"}, reasoning_effort="high")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reasoning")
        counted = (await served.ask(reasoning={"max_tokens": 100})).json()["error"]
        assert (counted["param"], counted["code"]) == ("reasoning.max_tokens", "unsupported_parameter")


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_thoughts_of_earlier_turns_reach_the_template(
    serve: Serve, qwen: ChatTokenizer, name: str
) -> None:
    engine = scripted(qwen, "hello")
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello", name: "the quick fox"},
        {"role": "user", "content": "and?"},
    ]
    async with serve(engine) as served:
        assert (await served.ask(messages=history)).status_code == 200
    assert "<think>\nthe quick fox\n</think>" in qwen.decode_all(engine.requests[-1].prompt_ids)


@pytest.mark.parametrize(
    ("said", "answer", "thought", "content"),
    [
        ("<think>\nhm, ", "well</think>so", "well", "so"),
        ("I say", " <think>so", None, " <think>so"),
    ],
)
async def test_a_continued_message_may_stand_inside_a_thought(
    serve: Serve, qwen: ChatTokenizer, said: str, answer: str, thought: str | None, content: str
) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": said}]
    async with serve(scripted(qwen, answer)) as served:
        message = (await served.ask(messages=messages)).json()["choices"][0]["message"]
        assert (message.get("reasoning"), message["content"]) == (thought, content)


async def test_calls_follow_thoughts(serve: Serve, qwen: ChatTokenizer) -> None:
    async with serve(scripted(qwen, f"<think>\n{CALL}?\n</think>\n\n{CALL}")) as served:
        choice = (await served.ask(tools=[NOW])).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["reasoning"] == f"{CALL}?"
        assert len(choice["message"]["tool_calls"]) == 1
        assert choice["message"]["content"] is None


@pytest.fixture
async def held(serve: Serve, qwen: ChatTokenizer) -> AsyncIterator[Served]:
    async with serve(LocalEngine(qwen, max_positions=512)) as served:
        yield served


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_forms_hold_only_what_follows_the_thought(held: Served, qwen: ChatTokenizer, seed: int) -> None:
    """A random model with a liking for the marks: what it thinks is anything, what it answers is held."""
    marks = {str(qwen.marker_ids[mark]): bias for mark, bias in (("<think>", 12), ("</think>", 4))}
    told: dict[str, Any] = {"model": "tiny", "seed": seed, "max_tokens": 400, "logit_bias": marks}
    choice = (await held.ask(response_format=FORM, **told)).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert "reasoning" in choice["message"]
    assert json.loads(choice["message"]["content"]).keys() == {"a"}
    called = (await held.ask(tools=[NOW], tool_choice="required", **told)).json()["choices"][0]
    assert called["finish_reason"] == "tool_calls"
    assert "reasoning" in called["message"]


@pytest.mark.parametrize("which", ["qwen", "opened", "magistral"])
def test_a_grammar_lets_a_thought_come_first(request: pytest.FixtureRequest, which: str) -> None:
    tokenizer: ChatTokenizer = request.getfixturevalue(which)
    prompt = tokenizer.render([{"role": "user", "content": "hi"}])
    thoughts = tokenizer.thoughts(prompt)
    assert thoughts is not None
    rules = thinking_first('start: "yes" | "no"', thoughts, lambda text: literal(tokenizer, 400, text))
    grammar = tokenizer.grammars.compile(GrammarRules("response_format", rules), 400)
    opener, closer = thoughts.style.opener, thoughts.style.closer
    good = [f"\nyes or {closer[:3]}no?\n{closer}\n\nyes", f"{closer}no"]
    good = good if thoughts.is_open else [*(f"{opener}{text}" for text in good), "yes"]
    for text in good:
        assert accepts(tokenizer, grammar, text), text
    for text in (
        f"{good[0]}!",
        f"{good[0][:-3]}maybe",
        "maybe" if not thoughts.is_open else f"{closer}maybe",
    ):
        assert not accepts(tokenizer, grammar, text), text


def accepts(tokenizer: ChatTokenizer, grammar: Any, text: str) -> bool:
    walk = grammar.walk()
    ids = tokenizer._tokenizer.encode(text, add_special_tokens=False)
    for token_id in [*ids, 2]:
        if torch.isinf(walk.masked(torch.zeros(400))[token_id]):
            return False
        walk.take(token_id)
    return True


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return tokenizer_with(tmp_path_factory.mktemp("harmony"), HARMONY, HARMONY_MARKS)


ANALYSIS = "<|channel|>analysis<|message|>the fox?<|end|><|start|>assistant"


async def test_channels_of_harmony_are_thoughts_and_answers(serve: Serve, harmony: ChatTokenizer) -> None:
    said = f"{ANALYSIS}<|channel|>final<|message|>hello<|return|>"
    async with serve(scripted(harmony, said)) as served:
        answer = (await served.ask(logprobs=True)).json()
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("the fox?", "hello")
        assert [one["token"] for one in choice["logprobs"]["content"]] == ["hello"]
        events = await served.stream()
        assert (thought_of(events), text_of(events)) == ("the fox?", "hello")


async def test_a_call_of_harmony_follows_its_analysis(serve: Serve, harmony: ChatTokenizer) -> None:
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"
    async with serve(scripted(harmony, f"{ANALYSIS}{call}")) as served:
        choice = (await served.ask(tools=[NOW])).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        assert choice["message"]["reasoning"] == "the fox?"
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}


async def test_thoughts_and_efforts_reach_harmony_by_its_own_names(
    serve: Serve, harmony: ChatTokenizer
) -> None:
    engine = scripted(harmony, "<|channel|>final<|message|>hello<|return|>")
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello", "reasoning": "quick fox"},
        {"role": "user", "content": "and?"},
    ]
    async with serve(engine) as served:
        for asked, told in (("none", "low"), ("medium", "medium"), ("max", "high")):
            assert (await served.ask(messages=history, reasoning_effort=asked)).status_code == 200
            prompt = harmony.decode_all(engine.requests[-1].prompt_ids)
            assert f"Reasoning: {told}" in prompt
            assert "<|channel|>analysis<|message|>quick fox<|end|>" in prompt


def test_a_grammar_of_harmony_holds_the_final_channel(harmony: ChatTokenizer) -> None:
    thoughts = harmony.thoughts(harmony.render([{"role": "user", "content": "hi"}]))
    assert thoughts is not None
    rules = thinking_first('start: "yes" | "no"', thoughts, lambda text: literal(harmony, 400, text))
    grammar = harmony.grammars.compile(GrammarRules("response_format", rules), 400)
    assert accepts(harmony, grammar, f"{ANALYSIS}<|channel|>final<|message|>yes")
    assert accepts(harmony, grammar, "<|channel|>final<|message|>no")
    assert not accepts(harmony, grammar, f"{ANALYSIS}<|channel|>final<|message|>maybe")


async def test_the_official_client_streams_reasoning_items(serve: Serve, qwen: ChatTokenizer) -> None:
    text = "<think>\nhello world\n</think>\n\nthe fox"
    async with serve(scripted(qwen, text)) as served:
        async with served.openai() as client:
            whole = await client.responses.create(model="scripted", input="hi")
            kinds = [item.type for item in whole.output]
            assert kinds == ["reasoning", "message"]
            assert whole.output_text == "the fox"
            assert whole.usage is not None
            assert whole.usage.output_tokens_details.reasoning_tokens > 0
            events = [
                event
                async for event in await client.responses.create(model="scripted", input="hi", stream=True)
            ]
        deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == "hello world"
        done = [event.type for event in events if event.type.endswith("item.done")]
        assert len(done) == 2
        assert events[-1].type == "response.completed"


async def test_what_other_servers_call_it_is_refused_by_name(serve: Serve, qwen: ChatTokenizer) -> None:
    async with serve(scripted(qwen, "hello")) as served:
        for name, value in (
            ("enable_thinking", False),
            ("thinking_budget", 5),
        ):
            error = (await served.ask(**{name: value})).json()["error"]
            assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert (await served.ask(reasoning_format="deepseek-legacy")).status_code == 400
