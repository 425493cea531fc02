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

from app.engine.request import RequestError

Message = Mapping[str, Any]
MEDIA_PARTS = ("image", "audio")
PROBE = "Zq7probe"  # a word that no template writes by itself
MAX_TEMPLATE_MESSAGE = 200  # characters of a template's own complaint that are passed on


class ChatTemplate:
    """The chat template of one model, with what a probe found out about it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        source = _template_source(tokenizer)
        self.exists = bool(source)
        self._knows_developer = "developer" in source
        self._wants_parts = self.exists and not self._shows(PROBE) and self._shows(_parts(PROBE))

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
        try:
            ids = self._tokenizer.apply_chat_template(
                [self.prepare(message) for message in messages],
                add_generation_prompt=not continue_final,
                continue_final_message=continue_final,
                sanitize_control_tokens=True,
                return_dict=False,
                **(variables or {}),
            )
        except Exception as error:  # the template is foreign code: whatever it does is a refusal
            raise RequestError("messages", "invalid_messages", complaint(error)) from None
        return tuple(ids)

    def end_of_turn_ids(self) -> frozenset[int]:
        """Return the added token that the template writes behind an assistant message, if it writes one."""
        turns = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
        _, _, tail = self._render_text([self.prepare(turn) for turn in turns]).rpartition(PROBE)
        ids = self._tokenizer.encode(tail.lstrip(), add_special_tokens=False)
        added = self._tokenizer.added_tokens_decoder
        return frozenset(ids[:1]) & frozenset(added) if tail.strip() else frozenset()

    def prepare(self, message: Message) -> dict[str, Any]:
        """Return a message as this template wants it: parts or one text, arguments of tool calls as objects."""
        prepared = dict(message)
        if prepared["role"] == "developer" and not self._knows_developer:
            prepared["role"] = "system"
        if prepared["role"] == "function":
            prepared["role"] = "tool"
        prepared["content"] = self._content(prepared.get("content"))
        if prepared.get("tool_calls"):
            prepared["tool_calls"] = [_with_parsed_arguments(call) for call in prepared["tool_calls"]]
        return prepared

    def _content(self, content: Any) -> str | list[dict[str, Any]]:
        """Keep the parts where one is a picture or a recording, in their order."""
        if isinstance(content, list) and any(part.get("type") in MEDIA_PARTS for part in content):
            return content
        text = text_of(content)
        return _parts(text) if self._wants_parts else text

    def _shows(self, content: str | list[dict[str, str]]) -> bool:
        return PROBE in self._render_text([{"role": "user", "content": content}])

    def _render_text(self, messages: list[dict[str, Any]]) -> str:
        if not self.exists:
            return ""
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception:  # foreign code again; a template that refuses a probe shows nothing
            return ""


def _template_source(tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:
        return ""


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def text_of(content: Any) -> str:
    """Join text parts; None (an assistant that only called tools) is empty, since templates concatenate."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text") or part.get("refusal") or "" for part in content)


def _with_parsed_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Templates want the arguments as an object; OpenAI sends them as a JSON string."""
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments or "{}")
        except (ValueError, RecursionError):  # the model wrote it; the template gets it as it is
            function["arguments"] = arguments
    return {**call, "function": function}


def complaint(error: Exception) -> str:
    """A template's `raise_exception` is written for users; other texts may quote the prompt."""
    if type(error) is jinja2.TemplateError:
        return f"the model's chat template refuses these messages: {str(error)[:MAX_TEMPLATE_MESSAGE]}"
    if isinstance(error, ValueError) and str(error).startswith("Can't sanitize"):
        return "a message holds a control token of the model that cannot be written as plain text"
    return "the model's chat template cannot render these messages"
