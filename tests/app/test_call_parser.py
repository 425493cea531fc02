"""Tool calls found in text, in each form that models write, however the text is cut."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.call_parser import CallArguments, CallParser, CallStart, Piece
from app.engine.tool_style import (
    DEEPSEEK,
    DEEPSEEK_FENCED,
    GLM,
    GLM_FLAT,
    HARMONY_CALLS,
    HERMES,
    KIMI,
    LLAMA,
    MINIMAX,
    MISTRAL,
    MISTRAL_ARGS,
    PLAIN,
    QWEN_XML,
    ToolStyle,
    ToolUse,
)
from tests.app.conftest import patient

NAMES = frozenset({"weather", "now"})
TAGGED = [QWEN_XML, GLM, GLM_FLAT, MINIMAX]
BESIDE = [DEEPSEEK, DEEPSEEK_FENCED, KIMI]  # JSON, and the name beside it
STYLES = [HERMES, MISTRAL, MISTRAL_ARGS, LLAMA, PLAIN, *BESIDE, *TAGGED, HARMONY_CALLS]
STYLE_NAMES = [style.kind for style in STYLES]
PARAMETERS = {
    "weather": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "share": {"type": "number"},
            "is_rain": {"type": "boolean"},
            "where": {"$ref": "#/$defs/where"},
            "label": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "kind": {"enum": ["1", "b"]},
            "any": {},
        },
        "$defs": {"where": {"type": "object"}},
    }
}

Told = tuple[str, list[tuple[str, str]]]


def parsed(style: ToolStyle, pieces: list[str], most: int | None = None) -> tuple[Told, list[Piece]]:
    parser = CallParser(ToolUse(style, NAMES, most, parameters=PARAMETERS))
    made = [piece for text in pieces for piece in parser.push(text)] + parser.finish()
    text = "".join(piece for piece in made if isinstance(piece, str))
    calls = [(piece.name, "") for piece in made if isinstance(piece, CallStart)]
    for piece in made:
        if isinstance(piece, CallArguments):
            calls[piece.index] = (calls[piece.index][0], calls[piece.index][1] + piece.text)
    return (text, calls), made


def told(style: ToolStyle, text: str, most: int | None = None) -> Told:
    """What a text says, which must not hang on where it is cut."""
    whole, _ = parsed(style, [text], most)
    assert parsed(style, list(text), most)[0] == whole
    return whole


CALLS = [
    [("weather", '{"city": "Paris"}')],
    [("now", "{}")],
    [("weather", '{"a": "}\\"]{", "b": [1, {"c": null}]}'), ("now", "{}")],
    [
        ("now", "{}"),
        ("weather", '{"text": "</tool_call> [TOOL_CALLS] ; , <tool_call>"}'),
        ("now", '{"é": "ü"}'),
    ],
]


JSON_STYLES = [style for style in STYLES if style.tags is None and style.most > 1]


@pytest.mark.parametrize("style", JSON_STYLES, ids=[style.kind for style in JSON_STYLES])
@pytest.mark.parametrize("calls", CALLS, ids=range(len(CALLS)))
def test_what_a_style_writes_is_read(style: ToolStyle, calls: list[tuple[str, str]]) -> None:
    assert told(style, style.text_of(calls)) == ("", calls)


TAGGED_CALLS = [
    [("now", "{}")],
    [("weather", '{"city": "Paris", "days": 3}')],
    [("weather", '{"city": " a\\n\\"b\\" <c> \\\\ ü "}'), ("now", "{}"), ("weather", '{"is_rain": true}')],
    [("weather", '{"where": {"a": [1, {"b": null}]}, "share": 0.5, "label": null, "kind": "1"}')],
    [("weather", '{"city": "", "other": "5", "any": [1]}')],
]


@pytest.mark.parametrize("style", TAGGED, ids=["qwen", "glm", "glm_flat", "minimax"])
@pytest.mark.parametrize("calls", TAGGED_CALLS, ids=range(len(TAGGED_CALLS)))
def test_tagged_calls_are_told_as_json_of_the_types_asked_for(
    style: ToolStyle, calls: list[tuple[str, str]]
) -> None:
    assert told(style, style.text_of(calls)) == ("", calls)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<tool_call>\n<function=weather>\n", "{}"),
        ("<tool_call>\n<function=weather>\n<parameter=days>\n3\n</parameter>\n", '{"days": 3}'),
        ("<tool_call>\n<function=weather>\n<parameter=days>\n3\n</parameter>\n</func", '{"days": 3}'),
        ("<tool_call>\n<function=weather>\n<parameter=city>\nOs", '{"city": "Os'),
    ],
)
def test_a_tagged_call_that_is_not_closed_has_what_came_whole(text: str, arguments: str) -> None:
    assert told(QWEN_XML, text) == ("", [("weather", arguments)])


def test_a_text_argument_is_told_as_it_comes() -> None:
    text = QWEN_XML.text_of([("weather", json.dumps({"city": "many words " * 9}))])
    _, made = parsed(QWEN_XML, list(text))
    assert sum(isinstance(piece, CallArguments) for piece in made) > 50


def test_a_harmony_call_is_read() -> None:
    for head in (" <|constrain|>json", "<|channel|>commentary json", ""):
        text = f'I look. to=functions.weather{head}<|message|>{{"city": "Oslo"}}<|call|>'
        assert told(HARMONY_CALLS, text) == ("I look.", [("weather", '{"city": "Oslo"}')])


@pytest.mark.parametrize("style", [HERMES, MISTRAL, MISTRAL_ARGS], ids=["hermes", "mistral", "mistral_args"])
def test_text_before_and_behind_calls_is_text(style: ToolStyle) -> None:
    call = style.text_of(CALLS[0])
    assert told(style, f"I will look.\n\n{call}") == ("I will look.", CALLS[0])
    assert told(style, f"\n\n{call}\n") == ("", CALLS[0])
    text, calls = told(style, f"First. {call} Then this.")
    assert (text.replace(" ", ""), calls) == ("First.Thenthis.", CALLS[0])


@pytest.mark.parametrize("style", STYLES, ids=STYLE_NAMES)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "  spaces before and behind \n",
        'a < b, <tool, [TOOL and { "name": 1 }',
        '{"name": "somebody", "arguments": {"age": 3}}',
        '{"name": "weather", "arguments": 3}',
        '{"no": "call"} and then text',
        '{"broken": ',
        '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
        "<tool_call>no json</tool_call>",
        "<tool_call>",
        "[TOOL_CALLS]",
        "[TOOL_CALLS] of what?",
        '[TOOL_CALLS][{"name": "nobody", "arguments": {}}]',
        "[TOOL_CALLS]nobody[ARGS]{}",
        "[TOOL_CALLS]weather",
        '<tool_call>\n{"name": "weather", "argu',
        "<tool_call>\n<function=nobody>\n</function>\n</tool_call>",
        "<tool_call>weather and more</tool_call>",
        '<invoke name="nobody"></invoke>',
        "<｜tool▁calls▁begin｜>nobody<｜tool▁sep｜>{}",
        "to=functions.weather but no call",
        "<function=weather",
    ],
)
def test_what_is_no_call_is_all_text(style: ToolStyle, text: str) -> None:
    assert told(style, text) == (text, [])


@pytest.mark.parametrize(
    ("style", "text"),
    [
        (HERMES, '<tool_call>{"arguments": {"city": "Oslo"}, "name": "weather"}</tool_call>'),
        (HERMES, '<tool_call>\n{"id": "1", "name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'),
        (HERMES, '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}</tool_call>'),
        (HERMES, '<tool_call>{"name":"weather","arguments":{"city": "Oslo"}}'),
        (HERMES, '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}, "id": "}"}</tool_call>'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}, "id": "abc"}]'),
        (MISTRAL, '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}'),
        (MISTRAL_ARGS, '[TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{"city": "Oslo"}'),
        (LLAMA, '<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}'),
        (LLAMA, '{"type": "function", "name": "weather", "parameters": {"city": "Oslo"}}'),
        (PLAIN, '\n <tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'),
        (PLAIN, '{"name": "weather", "parameters": {"city": "Oslo"}}'),
        (QWEN_XML, "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"),
        (QWEN_XML, "<tool_call><function=weather><parameter=city>Oslo</parameter></function></tool_call>"),
        (GLM, "<tool_call>weather<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value></tool_call>"),
        (MINIMAX, '<invoke name="weather"><parameter name="city">Oslo</parameter></invoke>'),
        (DEEPSEEK, '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>'),
        (KIMI, '<|tool_call_begin|>weather:12<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|>'),
    ],
)
def test_calls_are_read_as_models_vary_them(style: ToolStyle, text: str) -> None:
    said, calls = told(style, text)
    assert said == ""
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("weather", {"city": "Oslo"})]


def test_a_call_without_arguments_has_none() -> None:
    assert told(HERMES, '<tool_call>{"name": "now"}</tool_call>') == ("", [("now", "{}")])


def test_a_call_that_is_cut_keeps_what_came() -> None:
    text, calls = told(HERMES, 'Yes. <tool_call>\n{"name": "weather", "arguments": {"city": "Pa')
    assert (text, calls) == ("Yes.", [("weather", '{"city": "Pa')])


def test_a_name_comes_once_before_its_arguments_and_ids_differ() -> None:
    _, made = parsed(HERMES, list(HERMES.text_of(CALLS[2])))
    starts = [piece for piece in made if isinstance(piece, CallStart)]
    assert [(start.index, start.name) for start in starts] == [(0, "weather"), (1, "now")]
    assert len({start.id for start in starts}) == 2
    order = [piece.index for piece in made if not isinstance(piece, str)]
    assert order == sorted(order)


def test_mistral_ids_are_what_its_template_takes() -> None:
    _, made = parsed(MISTRAL, [MISTRAL.text_of(CALLS[0])])
    (start,) = [piece for piece in made if isinstance(piece, CallStart)]
    assert len(start.id) == 9
    assert start.id.isalnum()


MANY = [style for style in STYLES if style.most > 1]


@pytest.mark.parametrize("style", MANY, ids=[style.kind for style in MANY])
def test_calls_beyond_the_most_are_left_out(style: ToolStyle) -> None:
    calls = TAGGED_CALLS[2] if style.tags is not None else CALLS[2]
    assert told(style, style.text_of(calls), most=1) == ("", calls[:1])


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    '{"name": "weather", ',
    '"arguments": ',
    '{"city": "x"}',
    "}",
    "]",
    "[",
    "{",
    "\n",
    " ",
    ";",
    ",",
    "weather",
    "nobody",
    "<function=",
    "<parameter=city>",
    "</parameter>",
    "</function>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    '<invoke name="weather">',
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<|message|>",
    "to=functions.",
    ">",
    '"',
    "\\",
    "text",
    "<",
    "é",
]


@patient
@given(st.sampled_from(STYLES), st.lists(st.sampled_from(FRAGMENTS), max_size=14))
def test_no_text_is_lost_and_cuts_do_not_matter(style: ToolStyle, fragments: list[str]) -> None:
    text = "".join(fragments)
    said, calls = told(style, text)
    assert parsed(style, fragments)[0] == (said, calls)
    if not calls:
        assert said == text
    for name, _ in calls:
        assert name in NAMES


def test_an_answer_cut_where_another_call_begins_has_no_text() -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for rest in ("\n<", "\n<tool_ca", "\n"):
        assert told(HERMES, call + rest)[0] == ""
    assert told(HERMES, call + "\n<b>")[0].strip() == "<b>"
    assert told(HERMES, "<tool_ca")[0] == "<tool_ca"  # it may be what the answer is about


@pytest.mark.parametrize(
    ("style", "text"),
    [
        (PLAIN, '{"items": ["' + "a{b" * 10_000),
        (HERMES, '<tool_call>{"arguments": {"city": "' + "a" * 30_000),
        (MISTRAL_ARGS, "[TOOL_CALLS]" + "a" * 30_000),
        (MISTRAL_ARGS, "[TOOL_CALLS]weather" + " " * 30_000),
    ],
)
def test_what_may_yet_be_a_call_is_read_once(style: ToolStyle, text: str) -> None:
    began = time.thread_time()
    told, _ = parsed(style, [text[place : place + 4] for place in range(0, len(text), 4)])
    assert time.thread_time() - began < 2.0  # it took 8 s while each piece was read from the beginning
    assert told == (text, [])


def test_values_that_are_no_json_inside_lists_are_texts() -> None:
    text = "<tool_call>\n<function=weather>\n<parameter=any>\n[NaN, 1e999]\n</parameter>\n</function>\n</tool_call>"
    (_, [(_, arguments)]), _ = parsed(QWEN_XML, [text])
    assert json.loads(arguments, parse_constant=pytest.fail) == {"any": "[NaN, 1e999]"}
