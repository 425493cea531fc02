"""Arguments of calls that are written as tagged text, as grammar rules: each value is of the type that its schema asks.

Pure: texts and dictionaries. Values that are no strings are held as JSON is (`schema_rules`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from app.engine.request import RequestError
from app.engine.schema_rules import MAX_SCHEMA_CHARS, check_size, schema_rule
from app.engine.tagged_values import ALL_TYPES, resolved, types_of
from app.engine.tool_style import Tags

DEFINITIONS = ("$defs", "definitions")
MAX_DEPTH = 8  # of alternatives in alternatives
# What a text reads as, if its argument may be of that type.
READS_AS: Mapping[str, str] = {
    "number": r"/\s*-?[0-9][0-9.eE+-]*\s*/",
    "integer": r"/\s*-?[0-9][0-9.eE+-]*\s*/",
    "boolean": r"/\s*([Tt]rue|[Ff]alse)\s*/",
    "null": r"/\s*(null|None)\s*/",
    "object": r"/\s*\{(?s:.*)/",
    "array": r"/\s*\[(?s:.*)/",
}
WRITTEN: Mapping[str, str] = {
    "null": "null",
    "boolean": "true|false",
    "integer": "0|-?[1-9][0-9]{0,14}",
    "number": "-?(0|[1-9][0-9]{0,14})([.][0-9]{1,15})?",
}
BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
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
    check_size(schema, param)
    stated, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(stated, Mapping) or not isinstance(required, list):
        text = "the schema cannot be followed: 'properties' is an object, and 'required' a list of names"
        raise RequestError(param, "invalid_value", text)
    names = frozenset(name for name in required if isinstance(name, str))
    items: list[str] = []
    rules: list[str] = []
    num_chars = 0
    for number, (key, value) in enumerate(stated.items()):
        rule = f"{name}_{number}"
        head = literal(f"{tags.key[0]}{key}{tags.key[1]}")
        items.append(f"({head} {rule})" + ("" if key in names else "?"))
        told = _value(value if isinstance(value, Mapping) else {}, schema, tags, rule, param, literal)
        num_chars += sum(map(len, told))
        if num_chars > MAX_SCHEMA_CHARS:  # each argument has all definitions with it
            text = f"a schema makes at most {MAX_SCHEMA_CHARS} characters of rules"
            raise RequestError(param, "grammar_too_complex", text)
        rules += told
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
    if types_of(schema, root) == ALL_TYPES:  # whatever it reads as is allowed
        return _plain(resolved(schema, root), root, tags, name, param, literal)
    branches = list(_branches(schema, root))
    if len(branches) == 1:
        return _plain(branches[0], root, tags, name, param, literal)
    kinds = frozenset().union(*(types_of(branch, root) for branch in branches)) - {"string"}
    told = [one for one in (_as_text(branch, root, kinds) for branch in branches) if one]
    names = [f"{name.upper()}_{number}" for number in range(len(told))]
    parts = [f"{part}: {pattern}" for part, pattern in zip(names, told, strict=True)]
    return [*_text(name, f"({' | '.join(names)})", tags, literal), *parts]


def _branches(
    schema: Mapping[str, Any], root: Mapping[str, Any], seen: tuple[set[int], int] | None = None
) -> Iterator[Mapping[str, Any]]:
    """A schema as several, of which none mixes strings with other types; none is told twice."""
    known, depth = seen or (set(), 0)
    schema = resolved(schema, root)
    if id(schema) in known:
        return
    known.add(id(schema))
    types = types_of(schema, root)
    inner = schema.get("anyOf") or schema.get("oneOf")
    if "string" not in types or types == {"string"} or "enum" in schema or "const" in schema:
        yield schema
    elif isinstance(inner, list) and depth < MAX_DEPTH:
        for one in inner:
            yield from _branches(one if isinstance(one, Mapping) else {}, root, (known, depth + 1))
    else:
        yield {key: value for key, value in schema.items() if key != "type"} | {"type": "string"}
        others = sorted(types - {"string"} - ({"integer"} if "number" in types else set()))
        if others:
            yield dict(schema) | {"type": others}


def _plain(
    schema: Mapping[str, Any],
    root: Mapping[str, Any],
    tags: Tags,
    name: str,
    param: str,
    literal: Callable[[str], str],
) -> list[str]:
    """Rules for a value that is a string, or of other types alone."""
    end = literal(tags.value_end)
    if "string" not in types_of(schema, root):
        whole = {key: root[key] for key in DEFINITIONS if key in root} | dict(schema)
        return [f"{name}: {name}_json {end}", f"{name}_json: {schema_rule(whole, param)}"]
    if (values := _values(schema)) is not None:
        choices = " | ".join(literal(value) or '""' for value in values)
        return [f"{name}: ({choices}) {end}"]
    return _text(name, _pattern(schema), tags, literal)


def _text(name: str, pattern: str, tags: Tags, literal: Callable[[str], str]) -> list[str]:
    """Rules for a text up to the mark behind it."""
    end, terminal = literal(tags.value_end), f"{name.upper()}_TEXT"
    if end.startswith("<["):
        return [f"{name}: {terminal} {end}", f"{terminal}: {pattern}"]
    closer = _escaped(tags.value_end)
    return [
        f"{name}[suffix={json.dumps(tags.value_end)}]: {terminal}",
        f"{terminal}: {pattern} & ~/(?s:.*){closer}(?s:.*)/",
    ]


def _as_text(schema: Mapping[str, Any], root: Mapping[str, Any], others: frozenset[str]) -> str:
    """One of the alternatives beside a string as an expression; "" for what none can say, and is not drawn then."""
    types = types_of(schema, root)
    if (values := _values(schema)) is not None:
        return f"/{'|'.join(_escaped(value) for value in values)}/"
    if "string" in types:
        return " & ".join(
            [_pattern(schema), *(f"~{READS_AS[kind]}" for kind in sorted(others & READS_AS.keys()))]
        )
    if BOUNDS & schema.keys():
        return ""
    return (
        f"/{'|'.join(WRITTEN[kind] for kind in sorted(types) if kind in WRITTEN)}/"
        if types & WRITTEN.keys()
        else ""
    )


def _values(schema: Mapping[str, Any]) -> list[str] | None:
    """The texts of a schema that lists its values."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    return [value if isinstance(value, str) else json.dumps(value) for value in values]


def _pattern(schema: Mapping[str, Any]) -> str:
    """A string's own rules as regular expressions; what `format` says is a remark."""
    least, most = schema.get("minLength") or 0, schema.get("maxLength")
    bounds = f"{{{least},{most if isinstance(most, int) else ''}}}"
    told = [f"/(?s:.{bounds})/" if least or isinstance(most, int) else "/(?s:.*)/"]
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        begin = "" if pattern.startswith("^") else "(?s:.*)"
        end = "" if pattern.endswith("$") else "(?s:.*)"
        inner = pattern.removeprefix("^").removesuffix("$").replace("/", r"\/")
        told.append(f"/{begin}({inner}){end}/")
    return " & ".join(told)


def _escaped(text: str) -> str:
    """A text inside a regular expression of the grammar."""
    special = set(r"\^$.|?*+()[]{}/")
    return "".join("\\n" if one == "\n" else f"\\{one}" if one in special else one for one in text)
