"""Arguments of calls that are written as tagged text, as grammar rules: each value is of the type that its schema asks.

Pure: texts and dictionaries. Values that are no strings are held as JSON is (`schema_rules`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from app.engine.request import RequestError
from app.engine.schema_rules import schema_rule
from app.engine.tagged_values import resolved, types_of
from app.engine.tool_style import Tags

DEFINITIONS = ("$defs", "definitions")
MERGES = ("anyOf", "oneOf", "allOf", "$ref", "patternProperties", "if")


def tagged_rules(
    schema: Mapping[str, Any], tags: Tags, name: str, param: str, literal: Callable[[str], str]
) -> str:
    """Return the right side of a rule `name` for arguments that validate, and further rules below it.

    Raises `RequestError` naming `param` for what tagged text cannot be held to.
    """
    if any(key in schema for key in MERGES):
        text = "of this model's calls only arguments that are listed in 'properties' can be held to a schema"
        raise RequestError(param, "unsupported_parameter", text)
    stated: Mapping[str, Any] = schema.get("properties") or {}
    required = schema.get("required") or []
    items, rules = [], []
    for number, (key, value) in enumerate(stated.items()):
        rule = f"{name}_{number}"
        head = literal(f"{tags.key[0]}{key}{tags.key[1]}")
        items.append(f"({head} {rule})" + ("" if key in required else "?"))
        rules += _value(value if isinstance(value, Mapping) else {}, schema, tags, rule, param, literal)
    return "\n".join([" ".join(items) or '""', *rules])


def _value(
    schema: Mapping[str, Any],
    root: Mapping[str, Any],
    tags: Tags,
    name: str,
    param: str,
    literal: Callable[[str], str],
) -> list[str]:
    """Rules for one value and the mark behind it."""
    schema = resolved(schema, root)
    end = literal(tags.value_end)
    if "string" not in types_of(schema, root):
        whole = {key: root[key] for key in DEFINITIONS if key in root} | dict(schema)
        return [f"{name}: {name}_json {end}", f"{name}_json: {schema_rule(whole, param)}"]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        shown = [value if isinstance(value, str) else json.dumps(value) for value in values]
        choices = " | ".join(literal(value) or '""' for value in shown)
        return [f"{name}: ({choices}) {end}"]
    pattern = _pattern(schema)
    if end.startswith("<["):
        return [f"{name}: {name.upper()} {end}", f"{name.upper()}: {pattern}"]
    closer = _escaped(tags.value_end)
    terminal = f"{name.upper()}: {pattern} & ~/(?s:.*){closer}(?s:.*)/"
    return [f"{name}[suffix={json.dumps(tags.value_end)}]: {name.upper()}", terminal]


def _pattern(schema: Mapping[str, Any]) -> str:
    """A string's own rules as regular expressions; what `format` says is a remark."""
    least, most = schema.get("minLength") or 0, schema.get("maxLength")
    bounds = f"{{{least},{most if isinstance(most, int) else ''}}}"
    told = [f"/(?s:.{bounds})/" if least or isinstance(most, int) else "/(?s:.*)/"]
    pattern = schema.get("pattern")
    if schema.get("type") == "string" and isinstance(pattern, str):
        begin = "" if pattern.startswith("^") else "(?s:.*)"
        end = "" if pattern.endswith("$") else "(?s:.*)"
        inner = pattern.removeprefix("^").removesuffix("$").replace("/", r"\/")
        told.append(f"/{begin}({inner}){end}/")
    return " & ".join(told)


def _escaped(text: str) -> str:
    """A text inside a regular expression of the grammar."""
    special = set(r"\^$.|?*+()[]{}/")
    return "".join("\\n" if one == "\n" else f"\\{one}" if one in special else one for one in text)
