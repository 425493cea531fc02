"""The marks around tool calls in an answer's text, for each form in which models write them. Pure text."""

from __future__ import annotations

import re

from app.engine.reasoning import CALL, RECIPIENT
from app.engine.tool_style import (
    DEEPSEEK_CALL,
    DEEPSEEK_CALLS,
    END_DEEPSEEK_CALL,
    END_DEEPSEEK_CALLS,
    END_KIMI_CALL,
    END_KIMI_CALLS,
    END_MINIMAX_CALLS,
    END_TOOL_CALL,
    KIMI_CALL,
    KIMI_CALLS,
    MINIMAX_CALLS,
    PYTHON_TAG,
    TOOL_CALL,
    TOOL_CALLS,
)

OPENERS = {
    "hermes": (TOOL_CALL,),
    "mistral": (TOOL_CALLS,),
    "mistral_args": (TOOL_CALLS,),
    "llama": (PYTHON_TAG,),
    "plain": (TOOL_CALL,),
    "qwen_xml": (TOOL_CALL, "<function="),
    "glm": (TOOL_CALL,),
    "minimax": (MINIMAX_CALLS, '<invoke name="'),
    "deepseek": (DEEPSEEK_CALLS, DEEPSEEK_CALL),
    "kimi": (KIMI_CALLS, KIMI_CALL),
    "harmony": (RECIPIENT,),
}
# Forms whose head is all that stands before a mark: the mark, and the head with the function's name.
HEADS = {
    "qwen_xml": (">", re.compile(r"\s*(?:<function=)?([\w.-]+)")),
    "glm": ("<", re.compile(r"\s*([\w.-]+)\s*")),
    "minimax": (">", re.compile(r'\s*(?:<invoke name=")?([\w.-]+)"')),
    "deepseek": (
        "{",
        re.compile(
            r"\s*(?:<｜tool▁call▁begin｜>)?\s*(?:function<｜tool▁sep｜>)?([\w.-]+)\s*(?:<｜tool▁sep｜>|```json)\s*"
        ),
    ),
    "kimi": (
        "{",
        re.compile(
            r"\s*(?:<\|tool_call_begin\|>)?\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*"
        ),
    ),
    "harmony": ("{", re.compile(r"([\w.-]+)(?:[ \w]|<\|(?:channel|constrain)\|>)*<\|message\|>\s*")),
}
MAX_HEAD = 300  # characters; what is longer is none
CLOSERS = {
    "qwen_xml": (END_TOOL_CALL,),
    "glm": (END_TOOL_CALL,),
    "minimax": (END_MINIMAX_CALLS,),
    "deepseek": ("```", END_DEEPSEEK_CALL, END_DEEPSEEK_CALLS),
    "kimi": (END_KIMI_CALL, END_KIMI_CALLS),
    "harmony": (CALL,),
}
