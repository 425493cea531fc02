"""How models write tool calls: in which form a model's own chat template shows them, and the grammar of that form.

Pure: texts and rules. Reading calls in an answer is `app.api.call_parser`'s.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["hermes", "mistral", "mistral_args", "llama", "plain"]
TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
TOOL_CALLS, ARGS = "[TOOL_CALLS]", "[ARGS]"
PYTHON_TAG = "<|python_tag|>"
MARKERS = (TOOL_CALL, END_TOOL_CALL, TOOL_CALLS, ARGS, PYTHON_TAG)
MAX_CALLS = 8  # in one answer that a grammar holds

Literals = Callable[[str], str]  # a text as a grammar's tokens


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

    def call_of(self, name: str, arguments: str) -> str:
        """A call as the model would write it; `arguments` is a JSON text."""
        if self.kind == "mistral_args":
            return f"{name}{ARGS}{arguments}"
        return f'{{"name": {json.dumps(name)}, "{self.arguments_key}": {arguments}}}'

    def text_of(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls as the model would write them, one after the other."""
        return self.opener + self.separator.join(self.call_of(*call) for call in calls) + self.closer

    def rules(self, tools: Sequence[tuple[str, str]], most: int, literal: Literals) -> list[str]:
        """Rules of a grammar for `calls`: one to `most`, of these names with arguments by these rules."""
        rules, names = [], []
        for number, (name, arguments) in enumerate(tools):
            head, tail = self.call_of(name, "\0").split("\0")
            names.append(f"call_{number}")
            rules.append(f"call_{number}: {_joined(literal(head), f'arguments_{number}', literal(tail))}")
            rules.append(f"arguments_{number}: {arguments}")
        more = f"({_joined(literal(self.separator), 'call')}){{0,{most - 1}}}" if most > 1 else ""
        rules.append(f"call: {' | '.join(names)}")
        return [f"calls: {_joined(literal(self.opener), 'call', more, literal(self.closer))}", *rules]


HERMES = ToolStyle(
    "hermes",
    f"{TOOL_CALL}\n",
    f"\n{END_TOOL_CALL}\n{TOOL_CALL}\n",
    f"\n{END_TOOL_CALL}",
    stop=END_TOOL_CALL,
)
MISTRAL = ToolStyle("mistral", f"{TOOL_CALLS}[", ", ", "]", id_length=9)
MISTRAL_ARGS = ToolStyle("mistral_args", TOOL_CALLS, TOOL_CALLS, id_length=9)
LLAMA = ToolStyle("llama", separator="; ", arguments_key="parameters")
PLAIN = ToolStyle("plain")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What an answer may call: names of tools, and how many calls at most; None: any number.

    `shown_ids` are special tokens that belong to a call's form: they are part of the answer's text.
    """

    style: ToolStyle
    names: frozenset[str] = field(repr=False)
    most: int | None = None
    shown_ids: frozenset[int] = frozenset()


def style_of(shown: str, source: str) -> ToolStyle:
    """The form in which a template shows a call: by `shown`, a rendered call, else by its `source`."""
    text = shown or source
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


def _joined(*tokens: str) -> str:
    return " ".join(token for token in tokens if token)
