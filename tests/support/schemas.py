"""Random JSON schemas, and a check of values against them that owes nothing to what makes the values."""

from __future__ import annotations

import datetime
import random
import re
from collections.abc import Mapping
from typing import Any

NAMES = ("city", "days", "is open", "größe", "a-b", "id", "tags", "x")
WORDS = ("red", "green", "hello world", "é", 'a "quoted" word', "back\\slash", "")
PATTERNS = ("^[a-z]{2,5}$", "^(yes|no)$", "^[0-9]{4}-[0-9]{2}$")
KINDS = (
    "string",
    "integer",
    "number",
    "boolean",
    "null",
    "enum",
    "const",
    "array",
    "object",
    "anyOf",
    "oneOf",
)
LEAVES = KINDS[:7]


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema whose values all end: strings and lists are bounded. An object in half of the cases."""
    inner = _object(rng, depth) if rng.random() < 0.5 else _schema(rng, depth)
    if rng.random() < 0.2:
        shared = _schema(rng, 1)
        inner = {
            "type": "object",
            "properties": {"one": {"$ref": "#/$defs/shared"}, "other": inner},
            "required": ["one", "other"],
            "$defs": {"shared": shared},
        }
    return inner


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    match rng.choice(KINDS if depth > 0 else LEAVES):
        case "string":
            return _string(rng)
        case "integer":
            return {"type": "integer"} | _range(rng, whole=True)
        case "number":
            return {"type": "number"} | _range(rng, whole=False)
        case "enum":
            return {"enum": rng.sample([*WORDS, 1, 2.5, True, None], rng.randint(1, 4))}
        case "const":
            return {"const": rng.choice([*WORDS, 0, -7, False, None, [1, "a"], {"k": "v"}])}
        case "array":
            least = rng.randint(0, 2)
            items = _schema(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(0, 3)}
        case "object":
            return _object(rng, depth)
        case "anyOf":
            return {"anyOf": [_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
        case "oneOf":
            return {
                "oneOf": [_string(rng), {"type": "integer"}, _object(rng, depth - 1)][: rng.randint(1, 3)]
            }
        case kind:
            return {"type": kind} if rng.random() < 0.7 else {"type": sorted({kind, "null"})}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 4))
    made: dict[str, Any] = {
        "type": "object",
        "properties": {name: _schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
    }
    if rng.random() < 0.5:
        made["additionalProperties"] = False
    if rng.random() < 0.3:
        made |= {"title": "T", "description": "of no consequence", "default": {}}
    return made


def _string(rng: random.Random) -> dict[str, Any]:
    match rng.randint(0, 3):
        case 0:
            return {"type": "string", "pattern": rng.choice(PATTERNS)}
        case 1:
            return {"type": "string", "format": "date"}
        case 2:
            return {"type": "string", "maxLength": rng.randint(0, 12), "format": "of no consequence"}
        case _:
            least = rng.randint(0, 4)
            return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 8)}


def _range(rng: random.Random, *, whole: bool) -> dict[str, Any]:
    low = rng.randint(-50, 50) if whole else round(rng.uniform(-5, 5), 2)
    bounds = {"minimum": low, "maximum": low + rng.randint(0, 90)}
    return {name: value for name, value in bounds.items() if rng.random() < 0.6}


def is_valid(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> bool:
    """Whether a value fits a schema of `random_schema`'s kinds."""
    root = schema if root is None else root
    if "$ref" in schema:
        return is_valid(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    checks = [
        "type" not in schema or any(_is_type(value, kind) for kind in _listed(schema["type"])),
        "enum" not in schema or any(_same(value, one) for one in schema["enum"]),
        "const" not in schema or _same(value, schema["const"]),
        "anyOf" not in schema or any(is_valid(value, one, root) for one in schema["anyOf"]),
        "oneOf" not in schema or sum(is_valid(value, one, root) for one in schema["oneOf"]) == 1,
    ]
    if isinstance(value, str):
        checks += [
            schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**9),
            "pattern" not in schema or re.search(schema["pattern"], value) is not None,
            schema.get("format") != "date" or _is_date(value),
        ]
    if isinstance(value, int | float) and not isinstance(value, bool):
        checks.append(schema.get("minimum", value) <= value <= schema.get("maximum", value))
    if isinstance(value, list):
        checks.append(schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 10**9))
        checks += [is_valid(item, schema.get("items", {}), root) for item in value]
    if isinstance(value, dict):
        stated = schema.get("properties", {})
        checks += [name in value for name in schema.get("required", ())]
        checks += [is_valid(value[name], stated[name], root) for name in value if name in stated]
        checks.append(schema.get("additionalProperties", True) is True or value.keys() <= stated.keys())
    return all(checks)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _is_type(value: Any, kind: str) -> bool:
    match kind:
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return not isinstance(value, bool) and isinstance(value, int | float) and value == int(value)
        case "number":
            return not isinstance(value, bool) and isinstance(value, int | float)
        case "null":
            return value is None
    return isinstance(value, {"string": str, "array": list, "object": dict}[kind])


def _is_date(text: str) -> bool:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True
