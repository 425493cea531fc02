"""Tool calls found in text, in each form that models write, however the text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.call_parser import CallArguments, CallParser, CallStart, Piece
from app.engine.tool_style import HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, PLAIN, ToolStyle, ToolUse
from tests.app.conftest import patient

NAMES = frozenset({"weather", "now"})
STYLES = [HERMES, MISTRAL, MISTRAL_ARGS, LLAMA, PLAIN]
STYLE_NAMES = [style.kind for style in STYLES]

Told = tuple[str, list[tuple[str, str]]]


def parsed(style: ToolStyle, pieces: list[str], most: int | None = None) -> tuple[Told, list[Piece]]:
    parser = CallParser(ToolUse(style, NAMES, most))
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


@pytest.mark.parametrize("style", STYLES, ids=STYLE_NAMES)
@pytest.mark.parametrize("calls", CALLS, ids=range(len(CALLS)))
def test_what_a_style_writes_is_read(style: ToolStyle, calls: list[tuple[str, str]]) -> None:
    assert told(style, style.text_of(calls)) == ("", calls)


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


@pytest.mark.parametrize("style", STYLES, ids=STYLE_NAMES)
def test_calls_beyond_the_most_are_left_out(style: ToolStyle) -> None:
    assert told(style, style.text_of(CALLS[2]), most=1) == ("", CALLS[2][:1])


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
