"""Renders messages to prompt ids with the model's own chat template, in the sandbox of transformers.

Knows the shape of OpenAI's messages and what templates trip over; does not validate them
(`app/api/protocol.py` does). Templates come with the model, never with a request.

Text of a message cannot become a control token: transformers marks the control tokens it finds in message
strings and encodes them as plain text. Three gaps remain by its design: a template that builds control tokens
from pieces of a message, added tokens that are neither special nor named in the template, and dictionary
keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from app.engine.reasoning import CALL, RETURN, reasoning_style_of
from app.engine.request import RequestError
from app.engine.template_values import as_text, keys, only, text_parts, thinking_parts, with_parsed_arguments
from app.engine.tool_style import PLAIN, style_of

Message = Mapping[str, Any]
MEDIA_PARTS = ("image", "audio")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # rising
HARMONY_EFFORTS = ("low", "medium", "high")
THOUGHT_NAMES = ("reasoning_content", "reasoning", "thinking")  # of a message's field, as templates have it
THINKING_PART = "thinking part"  # in place of such a field: a part of the content
PROBE = "Zq7probe"  # a word that no template writes by itself
TOOLS_TEXT = "You may call these functions. Each line describes one, its parameters as a JSON schema:"
CALLS_TEXT = "To call one, answer with nothing but its name and arguments in this form:"
MAX_TEMPLATE_MESSAGE = 200  # characters of a template's own complaint that are passed on


class ChatTemplate:
    """The chat template of one model, with what a probe found out about it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        source = _template_source(tokenizer)
        self.exists = bool(source)
        self._knows_developer = "developer" in source
        self._wants_parts = self.exists and not self._shows(PROBE) and self._shows(text_parts(PROBE))
        added = [token.content for token in tokenizer.added_tokens_decoder.values()]
        self.reasoning_style = reasoning_style_of(source, added) if self.exists else None
        self._thought_name: str | None = None
        self._wants_text_arguments = False
        self._thought_name = self._find_thought_name()
        self._efforts = self._find_efforts(source)
        self._knows_tools = self._shows_tools(description=PROBE)
        self._wants_descriptions = self._knows_tools and not self._shows_tools()
        call = self._shown_call()
        self._knows_calls = bool(call) or "tool_calls" in source
        self.tool_style = style_of(call, source if self._knows_tools else "") if self.exists else PLAIN

    def render(
        self,
        messages: Sequence[Message],
        *,
        continue_final: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Return the prompt's token ids. Raises `RequestError` when the template refuses the messages.

        With `continue_final` the last message stays open and the model writes on; otherwise its own turn
        begins.
        """
        if not self.exists:
            raise RequestError("messages", "no_chat_template", "the model has no chat template")
        told, variables = self.told([self.prepare(message) for message in messages], variables or {})
        thinks = variables.get("enable_thinking") is not False
        try:
            rendered: Any = self._tokenizer.apply_chat_template(
                told,
                add_generation_prompt=not continue_final,
                continue_final_message=continue_final,
                sanitize_control_tokens=True,
                return_dict=False,
                **variables,
            )
            ids = tuple(rendered)
        except Exception as error:  # the template is foreign code: whatever it does is a refusal
            raise RequestError("messages", "invalid_messages", complaint(error)) from None
        return ids if thinks or continue_final else (*ids, *self._closing(ids))

    def _closing(self, ids: Sequence[int]) -> list[int]:
        """What ends a thought that the template opened all the same, for a model that is not to think."""
        style = self.reasoning_style
        if style is None or style.is_harmony:
            return []
        end = str(self._tokenizer.decode(list(ids[-8:]), skip_special_tokens=False))
        if not end.rstrip().endswith(style.opener):
            return []
        return list(self._tokenizer.encode(f"\n{style.closer}\n\n", add_special_tokens=False))

    def told(
        self, prepared: Sequence[dict[str, Any]], variables: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Write tools, and calls of the conversation, into messages that were prepared where the template shows none.

        Raises `RequestError` where the name of a parameter is a control token: names cannot be made plain text.
        """
        told, left = list(prepared), dict(variables)
        tools = left.get("tools")
        if left.get("reasoning_effort") in EFFORTS:
            left["reasoning_effort"] = self._nearest_effort(left["reasoning_effort"])
        self._refuse_control_keys(tools)
        if not self._knows_calls:
            told = [self._with_calls_as_text(message) for message in told]
        if tools and self._wants_descriptions:
            left["tools"] = [tool | {"function": {"description": "", **tool["function"]}} for tool in tools]
        if tools and not self._knows_tools:
            del left["tools"]
            told = self._with_tools_as_text(told, tools)
        return told, left

    def _with_calls_as_text(self, message: dict[str, Any]) -> dict[str, Any]:
        calls = message.get("tool_calls")
        if not calls:
            return message
        functions = [call["function"] for call in calls]
        text = self.tool_style.text_of(
            [(function["name"], as_text(function["arguments"])) for function in functions]
        )
        said = text_of(message.get("content"))
        content = f"{said}\n{text}" if said else text
        left = {name: value for name, value in message.items() if name != "tool_calls"}
        return left | {"content": text_parts(content) if self._wants_parts else content}

    def _with_tools_as_text(self, told: list[dict[str, Any]], tools: Any) -> list[dict[str, Any]]:
        """Tell of the tools at the end of the system's message, or in one of its own."""
        lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
        form = self.tool_style.text_of([("NAME", "{...}")])
        text = "\n".join([TOOLS_TEXT, *lines, "", f"{CALLS_TEXT} {form}"])
        has_system = bool(told) and told[0]["role"] == "system"
        said = text_of(told[0].get("content")) if has_system else ""
        content = f"{said}\n\n{text}" if said else text
        system = {"role": "system", "content": text_parts(content) if self._wants_parts else content}
        return [system, *told[has_system:]]

    def _refuse_control_keys(self, tools: Any) -> None:
        tokens = {token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        if any(token in key for key in keys(tools) for token in tokens):
            text = "the name of a parameter holds a control token of the model"
            raise RequestError("tools", "invalid_value", text)

    def _shows_tools(self, **described: str) -> bool:
        function = {"name": PROBE, **described, "parameters": {"type": "object", "properties": {}}}
        messages = [self.prepare({"role": "user", "content": "hi"})] if self.exists else []
        return PROBE in self._render_text(messages, tools=[{"type": "function", "function": function}])

    def _shown_call(self) -> str:
        """A call in the assistant's turn as the template shows it, or ""."""
        if not self.exists:
            return ""
        for arguments in ({"key": 1}, '{"key": 1}'):  # some templates want the arguments as a text
            function = {"name": PROBE, "arguments": arguments}
            call = {"id": "a1b2c3d4e", "type": "function", "function": function}
            turns = [
                self.prepare({"role": "user", "content": "hi"}),
                {"role": "assistant", "content": "", "tool_calls": [call]},
                self.prepare({"role": "tool", "content": "one", "tool_call_id": call["id"], "name": PROBE}),
            ]
            for length in (3, 2):  # some want the answer to a call, others refuse that role
                shown = self._render_text(turns[:length])
                if PROBE in shown:
                    self._wants_text_arguments = isinstance(arguments, str)
                    return shown
        return ""

    def _find_thought_name(self) -> str | None:
        """The field of an assistant's message that the template shows as its thought, if it shows one."""
        for name in THOUGHT_NAMES:
            turns: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
            turns.append({"role": "assistant", "content": "hello", name: PROBE})
            if PROBE in self._render_text([self.prepare(turn) | only(turn, name) for turn in turns]):
                return name
        turns = [self.prepare({"role": "user", "content": "hi"})]
        turns.append({"role": "assistant", "content": thinking_parts(PROBE, "hello")})
        return THINKING_PART if PROBE in self._render_text(turns) else None

    def _find_efforts(self, source: str) -> tuple[str, ...]:
        """The efforts that the template takes; all of them where it does not look."""
        if self.reasoning_style is not None and self.reasoning_style.is_harmony:
            return HARMONY_EFFORTS
        if "reasoning_effort" not in source:
            return EFFORTS
        turns = [self.prepare({"role": "user", "content": PROBE})]
        return tuple(one for one in EFFORTS if PROBE in self._render_text(turns, reasoning_effort=one))

    def _nearest_effort(self, effort: str) -> str:
        """The effort itself where the template takes it, else the one next to it."""
        asked = EFFORTS.index(effort)
        others = [one for one in self._efforts if (one == "none") == (effort == "none")]
        return min(others or self._efforts or EFFORTS, key=lambda one: abs(EFFORTS.index(one) - asked))

    def end_of_turn_ids(self) -> frozenset[int]:
        """Return the added token that the template writes behind an assistant message, if it writes one."""
        added = self._tokenizer.added_tokens_decoder
        if (
            self.reasoning_style is not None and self.reasoning_style.is_harmony
        ):  # a message's end is no turn's
            return frozenset(number for number, token in added.items() if token.content in (CALL, RETURN))
        turns = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
        _, _, tail = self._render_text([self.prepare(turn) for turn in turns]).rpartition(PROBE)
        ids = self._tokenizer.encode(tail.lstrip(), add_special_tokens=False)
        return frozenset(ids[:1]) & frozenset(added) if tail.strip() else frozenset()

    def prepare(self, message: Message) -> dict[str, Any]:
        """Return a message as this template wants it: parts or one text, arguments of tool calls as objects."""
        prepared = dict(message)
        if prepared["role"] == "developer" and not self._knows_developer:
            prepared["role"] = "system"
        if prepared["role"] == "function":
            prepared["role"] = "tool"
        prepared["content"] = self._content(prepared.get("content"))
        if prepared.get("tool_calls") and not self._wants_text_arguments:
            prepared["tool_calls"] = [with_parsed_arguments(call) for call in prepared["tool_calls"]]
        thought = prepared.pop("reasoning_content", None)
        if thought and self._thought_name is not None:
            if self._thought_name == THINKING_PART:
                return prepared | {"content": thinking_parts(thought, text_of(prepared["content"]))}
            prepared[self._thought_name] = thought
            if (
                prepared.get("tool_calls")
                and self.reasoning_style is not None
                and self.reasoning_style.is_harmony
            ):
                said = text_of(prepared["content"])  # beside a call there is place for one of the two
                prepared |= {"content": "", self._thought_name: f"{thought}\n\n{said}" if said else thought}
        return prepared

    def _content(self, content: Any) -> str | list[dict[str, Any]]:
        """Keep the parts where one is a picture or a recording, in their order."""
        if isinstance(content, list) and any(part.get("type") in MEDIA_PARTS for part in content):
            return content
        text = text_of(content)
        return text_parts(text) if self._wants_parts else text

    def _shows(self, content: str | list[dict[str, str]]) -> bool:
        return PROBE in self._render_text([{"role": "user", "content": content}])

    def _render_text(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        if not self.exists:
            return ""
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **variables))
        except Exception:  # foreign code again; a template that refuses a probe shows nothing
            return ""


def _template_source(tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:
        return ""


def text_of(content: Any) -> str:
    """Join text parts; None (an assistant that only called tools) is empty, since templates concatenate."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text") or part.get("refusal") or "" for part in content)


def complaint(error: Exception) -> str:
    """A template's `raise_exception` is written for users; other texts may quote the prompt."""
    if type(error) is jinja2.TemplateError:
        return f"the model's chat template refuses these messages: {str(error)[:MAX_TEMPLATE_MESSAGE]}"
    if isinstance(error, ValueError) and str(error).startswith("Can't sanitize"):
        return "a message holds a control token of the model that cannot be written as plain text"
    return "the model's chat template cannot render these messages"
