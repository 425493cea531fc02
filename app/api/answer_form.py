"""From what a request says about the form of its answer to a grammar, and to what may be called in which form.

The grammar is compiled in a thread; what it may cost is bounded there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from app.api.tool_fields import FormFields, Tool
from app.engine.grammar import MAX_CHARS, Grammar, GrammarPart, GrammarRules
from app.engine.reasoning import CHANNEL, END, MESSAGE, START, Thoughts
from app.engine.request import RequestError, TextEngine
from app.engine.schema_rules import ANY_OBJECT, NO_ARGUMENTS, schema_rule
from app.engine.tagged_rules import tagged_rules
from app.engine.tokenizer import ChatTokenizer
from app.engine.tool_style import MARKERS, Tags, ToolUse

FORMAT_FIELD = "response_format"
SCHEMA_FIELD = "response_format.json_schema.schema"


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form of an answer. `stops` end it, and are no text of it."""

    grammar: Grammar | None = field(default=None, repr=False)
    tools: ToolUse | None = field(default=None, repr=False)
    stops: tuple[str, ...] = ()


async def form_of(asked: FormFields, engine: TextEngine, thoughts: Thoughts | None = None) -> AnswerForm:
    """Find the form that is asked for; thoughts may come before it.

    Raises `RequestError` naming the field, and what of it is not supported.
    """
    has_format = asked.response_format is not None and asked.response_format.type != "text"
    if not asked.offered and not has_format:
        return AnswerForm()
    return await asyncio.to_thread(_form, asked, engine, thoughts)


def _form(asked: FormFields, engine: TextEngine, thoughts: Thoughts | None) -> AnswerForm:
    tokenizer = engine.tokenizer
    use = _use(asked, tokenizer)
    literals = partial(literal, tokenizer, engine.vocab_size)
    rules = _rules(asked, use, literals)
    if rules is not None and thoughts is not None:
        rules = replace(rules, lark=thinking_first(rules.lark, thoughts, literals))
    grammar = None if rules is None else tokenizer.grammars.compile(rules, engine.vocab_size)
    ends_early = use is not None and use.most == 1 and grammar is None and use.style.stop
    return AnswerForm(grammar, use, (use.style.stop,) if ends_early and use and use.style.stop else ())


def _use(asked: FormFields, tokenizer: ChatTokenizer) -> ToolUse | None:
    if not asked.offered:
        return None
    names = frozenset(tool.function.name for tool in asked.offered)
    shown = frozenset(
        token_id
        for mark, token_id in tokenizer.marker_ids.items()
        if mark in MARKERS and tokenizer.is_special(token_id)
    )
    parameters = {tool.function.name: tool.function.parameters or {} for tool in asked.offered}
    return ToolUse(tokenizer.tool_style, names, asked.most_calls, shown, parameters)


def _rules(asked: FormFields, use: ToolUse | None, literal_of: Callable[[str], str]) -> GrammarRules | None:
    """The grammar that holds the answer: calls where one must be made, else the format, or calls in its place."""
    text = None if use is not None and asked.must_call else _text_part(asked)
    if use is None or (text is None and not asked.must_call):
        return None if text is None else GrammarRules(FORMAT_FIELD, text.lark, (text,))
    places = {tool.function.name: number for number, tool in enumerate(asked.tools or ())}
    tools: list[tuple[str, GrammarPart]] = []
    num_chars = 0
    for number, tool in enumerate(asked.offered):
        part = _arguments(tool, places, use.style.tags, number, literal_of)
        num_chars += len(part.lark)
        if num_chars > MAX_CHARS:  # the rest would be made for nothing
            told = f"schemas have at most {MAX_CHARS} characters together"
            raise RequestError(part.param, "grammar_too_complex", told)
        tools.append((tool.function.name, part))
    most = min(use.most or use.style.most, use.style.most)
    lines = use.style.rules(
        [(name, part.lark.removeprefix("start: ")) for name, part in tools], most, literal_of
    )
    parts = tuple(part for _, part in tools)
    if text is None:
        return GrammarRules("tool_choice", "\n".join(["start: calls", *lines]), parts)
    lines = ["start: answer | calls", text.lark.replace("start: ", "answer: ", 1), *lines]
    return GrammarRules(FORMAT_FIELD, "\n".join(lines), (text, *parts))


def thinking_first(lark: str, thoughts: Thoughts, literal_of: Callable[[str], str]) -> str:
    """Rules that let a thought come before what the rules hold: nothing is held of it."""
    style = thoughts.style
    held = lark.replace("start: ", "held: ", 1)
    if style.is_harmony:
        final = f'{literal_of(CHANNEL)} "final" {literal_of(MESSAGE)} '
        if held.startswith("held: answer | calls"):
            held = held.replace("\nanswer: ", f"\nanswer: {final}", 1)
        elif not held.startswith("held: calls"):
            held = held.replace("held: ", f"held: {final} final\nfinal: ", 1)
        begin = f'{literal_of(CHANNEL)} "analysis" {literal_of(MESSAGE)}'
        end = f'{literal_of(END)} {literal_of(START)} "assistant"'
        return f"start: ({begin} thought)? held\n{text_until(end, 'thought', is_token='<[' in end)}\n{held}"
    closer = literal_of(style.closer)
    is_token = closer.startswith("<[")
    rule = text_until(closer if is_token else style.closer, "thought", is_token=is_token)
    first = "thought gap" if thoughts.is_open else f"({literal_of(style.opener)} thought gap)?"
    return f"start: {first} held\n{rule}\ngap: /\\n{{0,2}}/\n{held}"


def text_until(end: str, name: str, *, is_token: bool) -> str:
    """A rule for any text up to its end, which is tokens that no text makes, or a text of its own."""
    if is_token:
        return f"{name}: /(?s:.*)/ {end}"
    return f"{name}[suffix={json.dumps(end)}]: /(?s:.*)/"


def _text_part(asked: FormFields) -> GrammarPart | None:
    wanted = asked.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.json_schema is None:
        return GrammarPart(FORMAT_FIELD, f"start: {schema_rule(ANY_OBJECT, FORMAT_FIELD)}")
    return GrammarPart(SCHEMA_FIELD, f"start: {schema_rule(wanted.json_schema.schema_ or {}, SCHEMA_FIELD)}")


def _arguments(
    tool: Tool, places: dict[str, int], tags: Tags | None, number: int, literal_of: Callable[[str], str]
) -> GrammarPart:
    param = f"tools.{places[tool.function.name]}.function.parameters"
    stated: dict[str, Any] = tool.function.parameters or dict(NO_ARGUMENTS)
    if tags is not None:
        return GrammarPart(
            param, f"start: {tagged_rules(stated, tags, f'argument_{number}', param, literal_of)}"
        )
    return GrammarPart(param, f"start: {schema_rule({'type': 'object'} | stated, param)}")


def literal(tokenizer: ChatTokenizer, vocab_size: int, text: str) -> str:
    """A text as tokens of a grammar: marks that no text makes by their ids, all else in quotes."""
    pieces = [text]
    for mark, token_id in tokenizer.marker_ids.items():
        if mark not in text or not tokenizer.grammars.is_special(token_id, vocab_size):
            continue
        pieces = [
            part
            for piece in pieces
            for part in ([piece] if piece.startswith("<[") else _split(piece, mark, f"<[{token_id}]>"))
        ]
    return " ".join(piece if _is_id(piece) else json.dumps(piece) for piece in pieces if piece)


def _split(text: str, mark: str, stand_in: str) -> list[str]:
    """A text with a stand-in for each mark, as an item of its own."""
    first, *rest = text.split(mark)
    return [first, *(part for piece in rest for part in (stand_in, piece))]


def _is_id(piece: str) -> bool:
    return piece.startswith("<[") and piece.endswith("]>")
