"""Arguments of calls that are written as tagged text: the types that their schemas ask for, and values made of texts.

Pure: texts, schemas and JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

WORDS: Mapping[str, Any] = {"True": True, "False": False, "None": None}  # as templates print them
ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
MAX_STEPS = 8  # of references to references, and of nested alternatives


def property_of(parameters: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """The schema of an argument; None for one that is not stated."""
    stated = parameters.get("properties")
    schema = stated.get(name) if isinstance(stated, Mapping) else None
    return schema if isinstance(schema, Mapping) else {} if schema is True else None


def types_of(schema: Mapping[str, Any], root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema lets through, as far as it says so."""
    return _types_of(schema, root, MAX_STEPS, set())


def _types_of(
    schema: Mapping[str, Any], root: Mapping[str, Any], steps: int, seen: set[int]
) -> frozenset[str]:
    """`seen` are the schemas that were looked at: alternatives that name each other are no work of an exponent."""
    schema = resolved(schema, root)
    if id(schema) in seen:
        return frozenset()
    seen.add(id(schema))
    stated = schema.get("type")
    if isinstance(stated, str):
        return frozenset({stated})
    if isinstance(stated, list):
        return frozenset(name for name in stated if isinstance(name, str))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(type_of(value) for value in values)
    branches = [one for key in ("anyOf", "oneOf") for one in _list(schema.get(key))]
    if branches and steps:
        found = [_types_of(one, root, steps - 1, seen) for one in branches if isinstance(one, Mapping)]
        return frozenset().union(*found)
    return ALL_TYPES


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema, or the one in `root` that it points at."""
    for _ in range(MAX_STEPS):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        found: Any = root
        for step in reference[2:].split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
        schema = found if isinstance(found, Mapping) else {}
    return schema


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def json_of(text: str, types: frozenset[str]) -> str:
    """A value's text as JSON: of one of the types where it can be read so, else a string."""
    bare = text.strip()
    value = WORDS[bare] if bare in WORDS else _parsed(bare)
    kind = type_of(value) if not isinstance(value, Unread) else "string"
    if kind != "string" and (kind in types or (kind == "integer" and "number" in types)):
        if kind == "integer" and "number" not in types:
            value = int(value)
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str) and "string" not in types and bool(types):
        return json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)


class Unread:
    """What is no JSON."""


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refused, parse_float=_finite)
    except (ValueError, RecursionError):
        return Unread()


def _finite(text: str) -> float:
    """A number that JSON can say, wherever it stands. Raises ValueError."""
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value


def _refused(text: str) -> None:
    raise ValueError(text)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
