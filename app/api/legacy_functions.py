"""`functions` and `function_call`, the old words for `tools` and `tool_choice`: a request in the old words in the new.

At most one function is called, as the old answer has place for no more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from app.api.errors import ApiError, invalid

NAMES = ("functions", "function_call")
NEW_NAMES = ("tools", "tool_choice", "parallel_tool_calls")
WORDS = ("none", "auto")


def uses_functions(body: Mapping[str, Any]) -> bool:
    """Whether a request speaks of functions. Raises `ApiError` 400 where it does so in old and new words."""
    if body.get("function_call") in (None, *WORDS) and not body.get("functions"):
        return False
    new = next((name for name in NEW_NAMES if body.get(name)), None)
    if new is not None:
        raise invalid("functions", f"give 'functions' or '{new}', not both")
    if not isinstance(body.get("functions"), list):
        name = "function_call" if body.get("functions") is None else "functions"
        raise invalid(name, "'functions' is a list of functions to choose from")
    return True


def in_tools(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request in the new words. Raises `ApiError` 400."""
    choice = body.get("function_call")
    if choice is not None and choice not in WORDS:
        if not isinstance(choice, Mapping):
            raise invalid("function_call", "it is 'none', 'auto', or an object with a name")
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    told = {name: value for name, value in body.items() if name not in (*NAMES, *NEW_NAMES)}
    told["tools"] = [{"type": "function", "function": function} for function in body["functions"]]
    return told | {"tool_choice": choice, "parallel_tool_calls": False}


def in_functions(failure: ApiError) -> ApiError:
    """Return a refusal under the names that the request has."""
    old = failure.param or ""
    new = re.sub(r"^tools\.(\d+)(?:\.function)?\b", r"functions.\1", old)
    new = re.sub(r"^tool_choice(?:\.function)?\b", "function_call", re.sub(r"^tools\b", "functions", new))
    message = failure.message.replace(f"'{old}'", f"'{new}'")
    return ApiError(failure.status, failure.code, message, param=new or None, headers=failure.headers)
