"""JSON schemas as grammar rules: bounded, without free whitespace, and closed where nobody said otherwise.

What comes out validates against the schema as it was sent. Pure: texts and dictionaries.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from app.engine.request import RequestError

MAX_SCHEMA_CHARS = 256 << 10
MAX_DEPTH = 64
MAX_VALUES = 50_000  # of all kinds, in one schema
MAX_BRANCHES = 128  # of a oneOf: each is held against each
# As `json.dumps` writes, which models have read much of: no token is spent on layout, and none can be lost in it.
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
FORMATS = frozenset(  # any other is a remark, as JSON Schema has it
    {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLES = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
REMARKS = frozenset({"$ref", "title", "description", "default", "examples", "deprecated", "$comment"})
REMARKS |= {"readOnly", "writeOnly", "$defs", "definitions", "$schema", "$id"}


def schema_rule(schema: Mapping[str, Any], param: str) -> str:
    """Return the right side of a rule for texts that validate. Raises `RequestError` naming `param`."""
    check_size(schema, param)
    nodes = list(_nodes(schema))
    for node in nodes:
        _check_branches(node.get("oneOf"), schema, param)
    merges = any("allOf" in node or ("$ref" in node and node.keys() - REMARKS) for node in nodes)
    told = _prepared(schema, closes=not merges)
    text = json.dumps({**told, "x-guidance": {**LAYOUT, "coerce_one_of": True}})
    if len(text) > MAX_SCHEMA_CHARS:
        raise RequestError(
            param, "grammar_too_complex", f"a schema has at most {MAX_SCHEMA_CHARS} characters"
        )
    return f"%json {text}"


def _prepared(schema: Any, *, closes: bool) -> Any:
    """Copy a schema: close its objects, drop formats that say nothing."""
    if not isinstance(schema, Mapping):
        return schema
    made = {key: value for key, value in schema.items() if key != "x-guidance"}
    if "format" in made and not (isinstance(made["format"], str) and made["format"] in FORMATS):
        made.pop("format", None)
    branches_close = closes and not ("properties" in made or "required" in made)
    for key in MAPS:
        if isinstance(made.get(key), Mapping):
            made[key] = {name: _prepared(inner, closes=closes) for name, inner in made[key].items()}
    for key in LISTS:
        if isinstance(made.get(key), list):
            inner_closes = closes if key == "prefixItems" else branches_close
            made[key] = [_prepared(inner, closes=inner_closes) for inner in made[key]]
    for key in SINGLES:
        if key in made:
            made[key] = _prepared(made[key], closes=closes)
    if closes and _can_close(made):
        made["additionalProperties"] = False
    return made


def _can_close(schema: Mapping[str, Any]) -> bool:
    """Whether an object that lists its properties may be taken to have no others, as the strict form has it."""
    stated = schema.get("properties")
    others = ("additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties")
    if not isinstance(stated, Mapping) or any(key in schema for key in (*others, *LISTS, "$ref")):
        return False
    required = schema.get("required", [])
    return isinstance(required, list) and all(isinstance(name, str) and name in stated for name in required)


def check_size(schema: Mapping[str, Any], param: str) -> None:
    """Refuse a schema that takes long to look at. Raises `RequestError` naming `param`."""
    level, count = [schema], 0
    for _ in range(MAX_DEPTH):
        level = [inner for value in level for inner in _children(value)]
        count += len(level)
        if not level:
            return
        if count > MAX_VALUES:
            raise RequestError(param, "grammar_too_complex", f"a schema holds at most {MAX_VALUES} values")
    raise RequestError(param, "grammar_too_complex", f"a schema is nested at most {MAX_DEPTH} deep")


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _nodes(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and all schemas inside it; what are data (`enum`, `default`) are none."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    for key in MAPS:
        if isinstance(schema.get(key), Mapping):
            for inner in schema[key].values():
                yield from _nodes(inner)
    for key in LISTS:
        if isinstance(schema.get(key), list):
            for inner in schema[key]:
                yield from _nodes(inner)
    for key in SINGLES:
        yield from _nodes(schema.get(key))


def _check_branches(branches: Any, root: Mapping[str, Any], param: str) -> None:
    """Refuse a oneOf of which a value could fit two branches: nothing here could hold it to one."""
    if not isinstance(branches, list):
        return
    if len(branches) > MAX_BRANCHES:
        text = f"a 'oneOf' has at most {MAX_BRANCHES} branches"
        raise RequestError(param, "grammar_too_complex", text)
    resolved = [_resolved(branch, root) for branch in branches]
    if not all(_are_apart(one, other) for one, other in combinations(resolved, 2)):
        text = "'oneOf' is supported where types or a required property's 'const' or 'enum' tell its branches apart"
        raise RequestError(param, "unsupported_parameter", text)


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    for _ in range(8):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        found: Any = root
        for step in reference[2:].split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
        schema = found
    return schema if isinstance(schema, Mapping) else {}


def _are_apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    types = _types(one), _types(other)
    if types[0] and types[1] and not types[0] & types[1]:
        return True
    values = _values(one), _values(other)
    if values[0] and values[1] and not values[0] & values[1]:
        return True
    shared = [name for name in _required(one) if name in _required(other)]
    for name in shared:
        inner = [schema.get("properties", {}).get(name) or {} for schema in (one, other)]
        if all(isinstance(schema, Mapping) for schema in inner):
            first, second = map(_values, inner)
            if first and second and not first & second and types == ({"object"}, {"object"}):
                return True
    return False


def _required(schema: Mapping[str, Any]) -> list[Any]:
    required = schema.get("required")
    if not isinstance(required, list) or not isinstance(schema.get("properties"), Mapping):
        return []
    return [name for name in required if isinstance(name, str)]


def _types(schema: Mapping[str, Any]) -> set[str]:
    stated = schema.get("type")
    names = [stated] if isinstance(stated, str) else stated if isinstance(stated, list) else []
    return {"number" if name == "integer" else str(name) for name in names}


def _values(schema: Mapping[str, Any]) -> set[str]:
    stated = [schema["const"]] if "const" in schema else schema.get("enum")
    return {json.dumps(value, sort_keys=True) for value in stated} if isinstance(stated, list) else set()
