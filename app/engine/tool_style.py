"""How models write tool calls: in which form a model's own chat template shows them, and the grammar of that form.

Pure: texts and rules. Reading calls in an answer is `app.api.call_parser`'s.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from app.engine.reasoning import CHANNEL, CONSTRAIN, MESSAGE, RECIPIENT

Kind = Literal[
    "hermes",
    "mistral",
    "mistral_args",
    "llama",
    "plain",
    "qwen_xml",
    "glm",
    "minimax",
    "deepseek",
    "kimi",
    "harmony",
]
TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
TOOL_CALLS, ARGS = "[TOOL_CALLS]", "[ARGS]"
PYTHON_TAG = "<|python_tag|>"
GLM_MARKS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
DEEPSEEK_CALLS, END_DEEPSEEK_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
END_DEEPSEEK_CALL = "<｜tool▁call▁end｜>"
KIMI_CALLS, END_KIMI_CALLS = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_SEP, END_KIMI_CALL = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
MINIMAX_CALLS, END_MINIMAX_CALLS = "<minimax:tool_call>", "</minimax:tool_call>"
MARKERS: tuple[str, ...] = (
    *(TOOL_CALL, END_TOOL_CALL, TOOL_CALLS, ARGS, PYTHON_TAG, *GLM_MARKS),
    *(DEEPSEEK_CALLS, END_DEEPSEEK_CALLS, DEEPSEEK_CALL, DEEPSEEK_SEP, END_DEEPSEEK_CALL),
    *(KIMI_CALLS, END_KIMI_CALLS, KIMI_CALL, KIMI_SEP, END_KIMI_CALL, MINIMAX_CALLS, END_MINIMAX_CALLS),
)
MAX_CALLS = 8  # in one answer that a grammar holds

Literals = Callable[[str], str]  # a text as a grammar's tokens


@dataclass(frozen=True, slots=True)
class Tags:
    """A call as tagged text: its name between two marks, and so each argument's name and value.

    `has_lines`: a value stands on lines of its own.
    """

    name: tuple[str, str]
    key: tuple[str, str]
    value_end: str
    end: str
    has_lines: bool = False

    def call_of(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as the model would write it."""
        told = [
            f"{self.key[0]}{key}{self.key[1]}{value if isinstance(value, str) else json.dumps(value)}{self.value_end}"
            for key, value in arguments.items()
        ]
        return f"{self.name[0]}{name}{self.name[1]}{''.join(told)}{self.end}"


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """One form of calls: what stands before the first, between two and behind the last, and around each."""

    kind: Kind
    opener: str = ""
    separator: str = "\n"
    closer: str = ""
    arguments_key: str = "arguments"
    stop: str | None = None  # what a model writes behind its first call
    id_length: int | None = None  # of a call's id, where the template insists on one
    around: tuple[str, str, str] | None = None  # before the name, between it and the arguments, behind them
    tags: Tags | None = None
    most: int = MAX_CALLS

    def call_of(self, name: str, arguments: str) -> str:
        """A call as the model would write it; `arguments` is a JSON text."""
        if self.tags is not None:
            return self.tags.call_of(name, _object(arguments))
        if self.around is not None:
            before, between, behind = self.around
            return f"{before}{name}{between}{arguments}{behind}"
        return f'{{"name": {json.dumps(name)}, "{self.arguments_key}": {arguments}}}'

    def text_of(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls as the model would write them, one after the other."""
        return self.opener + self.separator.join(self.call_of(*call) for call in calls) + self.closer

    def rules(self, tools: Sequence[tuple[str, str]], most: int, literal: Literals) -> list[str]:
        """Rules of a grammar for `calls`: one to `most`, of these names with arguments by these rules."""
        rules, names = [], []
        for number, (name, arguments) in enumerate(tools):
            head, tail = self._around(name)
            names.append(f"call_{number}")
            rules.append(f"call_{number}: {_joined(literal(head), f'arguments_{number}', literal(tail))}")
            rules.append(f"arguments_{number}: {arguments}")
        more = f"({_joined(literal(self.separator), 'call')}){{0,{most - 1}}}" if most > 1 else ""
        rules.append(f"call: {' | '.join(names)}")
        return [f"calls: {_joined(literal(self.opener), 'call', more, literal(self.closer))}", *rules]

    def _around(self, name: str) -> tuple[str, str]:
        """What stands before and behind the arguments of a call."""
        if self.tags is not None:
            return f"{self.tags.name[0]}{name}{self.tags.name[1]}", self.tags.end
        head, tail = self.call_of(name, "\0").split("\0")
        return head, tail


HERMES = ToolStyle(
    "hermes",
    f"{TOOL_CALL}\n",
    f"\n{END_TOOL_CALL}\n{TOOL_CALL}\n",
    f"\n{END_TOOL_CALL}",
    stop=END_TOOL_CALL,
)
MISTRAL = ToolStyle("mistral", f"{TOOL_CALLS}[", ", ", "]", id_length=9)
MISTRAL_ARGS = ToolStyle("mistral_args", TOOL_CALLS, TOOL_CALLS, id_length=9, around=("", ARGS, ""))
LLAMA = ToolStyle("llama", separator="; ", arguments_key="parameters")
PLAIN = ToolStyle("plain")
QWEN_XML = replace(
    HERMES,
    kind="qwen_xml",
    tags=Tags(
        ("<function=", ">\n"), ("<parameter=", ">\n"), "\n</parameter>\n", "</function>", has_lines=True
    ),
)
GLM = ToolStyle(
    "glm",
    TOOL_CALL,
    f"{END_TOOL_CALL}\n{TOOL_CALL}",
    END_TOOL_CALL,  # which ends the arguments, too: no stop string
    tags=Tags(("", "\n"), ("<arg_key>", "</arg_key>\n<arg_value>"), "</arg_value>\n", ""),
)
GLM_FLAT = replace(GLM, tags=Tags(("", ""), ("<arg_key>", "</arg_key><arg_value>"), "</arg_value>", ""))
MINIMAX = ToolStyle(
    "minimax",
    f"{MINIMAX_CALLS}\n",
    "\n",
    f"\n{END_MINIMAX_CALLS}",
    tags=Tags(('<invoke name="', '">\n'), ('<parameter name="', '">'), "</parameter>\n", "</invoke>"),
)
DEEPSEEK = ToolStyle(
    "deepseek",
    DEEPSEEK_CALLS,
    "",
    END_DEEPSEEK_CALLS,
    around=(DEEPSEEK_CALL, DEEPSEEK_SEP, END_DEEPSEEK_CALL),
)
DEEPSEEK_FENCED = replace(
    DEEPSEEK,
    separator="\n",
    around=(f"{DEEPSEEK_CALL}function{DEEPSEEK_SEP}", "\n```json\n", f"\n```{END_DEEPSEEK_CALL}"),
)
KIMI = ToolStyle(
    "kimi",
    KIMI_CALLS,
    "",
    END_KIMI_CALLS,
    around=(f"{KIMI_CALL}functions.", f":0{KIMI_SEP}", END_KIMI_CALL),
)
HARMONY_CALLS = ToolStyle(
    "harmony",
    f"{CHANNEL}commentary ",
    around=(RECIPIENT, f" {CONSTRAIN}json{MESSAGE}", ""),
    most=1,  # a call ends the answer
)
GLM_LINES = re.compile(r"<tool_call>\{[^{}]*\}\n<arg_key>")
# By what the template's call has in it; the first that fits.
SHOWN: tuple[tuple[str, ToolStyle], ...] = (
    (f"{CHANNEL}commentary", HARMONY_CALLS),
    (f"{DEEPSEEK_SEP}function", DEEPSEEK_FENCED),
    ("```json", DEEPSEEK_FENCED),
    (DEEPSEEK_CALL, DEEPSEEK),
    (KIMI_CALL, KIMI),
    (MINIMAX_CALLS, MINIMAX),
    ("<function=", QWEN_XML),
    ("\n<arg_key>", GLM),
    ("<arg_key>", GLM_FLAT),
)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What an answer may call: names of tools, and how many calls at most; None: any number.

    `shown_ids` are special tokens that belong to a call's form: they are part of the answer's text.
    """

    style: ToolStyle
    names: frozenset[str] = field(repr=False)
    most: int | None = None
    shown_ids: frozenset[int] = frozenset()
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)  # schemas, by name


def style_of(shown: str, source: str) -> ToolStyle:
    """The form in which a template shows a call: by `shown`, a rendered call, else by its `source`."""
    text = shown or source
    for mark, style in SHOWN:
        if mark in text and (mark != "```json" or DEEPSEEK_CALL in text):
            # A template that loops over arguments may lose the line breaks that its own words show.
            return GLM if style is GLM_FLAT and GLM_LINES.search(source) else style
    if TOOL_CALLS in text:
        if ARGS in text:
            return MISTRAL_ARGS
        has_space = f"{TOOL_CALLS} [" in text
        return ToolStyle("mistral", f"{TOOL_CALLS} [", ", ", "]", id_length=9) if has_space else MISTRAL
    if TOOL_CALL in text:
        return HERMES
    if '"parameters": {' in shown:
        return LLAMA
    return PLAIN


def _object(text: str) -> Mapping[str, Any]:
    """Arguments as a mapping; what is none is shown as one argument."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {"NAME": text}
    return value if isinstance(value, dict) else {"NAME": text}


def _joined(*tokens: str) -> str:
    return " ".join(token for token in tokens if token)
