"""Calls in tags that a grammar holds: whatever is drawn, what is read validates."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch

from app.api.answer_form import literal
from app.api.call_parser import CallArguments, CallParser
from app.engine.grammar import Grammar, GrammarRules
from app.engine.request import RequestError
from app.engine.tagged_rules import tagged_rules
from app.engine.tagged_values import types_of
from app.engine.tokenizer import ChatTokenizer
from app.engine.tool_style import GLM, MINIMAX, QWEN_XML, ToolStyle, ToolUse
from slicing.sampler import Sampler, SamplingParams
from tests.support.schemas import is_valid, random_schema

VOCAB_SIZE = 400


def compiled(tokenizer: ChatTokenizer, style: ToolStyle, schema: Mapping[str, Any]) -> Grammar:
    write = partial(literal, tokenizer, VOCAB_SIZE)
    assert style.tags is not None
    arguments = tagged_rules(schema, style.tags, "argument_0", "tools", write)
    lines = style.rules([("call", arguments)], 1, write)
    return tokenizer.grammars.compile(GrammarRules("tools", "\n".join(["start: calls", *lines])), VOCAB_SIZE)


def drawn(tokenizer: ChatTokenizer, grammar: Grammar, seed: int) -> str:
    """A text that the grammar lets through, by chance."""
    walk, sampler = grammar.walk(), Sampler(SamplingParams(seed=seed), VOCAB_SIZE)
    noise, text = torch.Generator().manual_seed(seed), tokenizer.answer_text()
    pieces = []
    for position in range(3000):
        logits = torch.randn(VOCAB_SIZE, generator=noise)
        token_id = sampler.sample(walk.masked(logits), position)
        if token_id in tokenizer.stop_token_ids:
            return "".join([*pieces, text.finish()])
        walk.take(token_id)
        pieces.append(text.push(token_id))
    raise AssertionError("it did not end")


def read(style: ToolStyle, schema: Mapping[str, Any], text: str) -> Any:
    parser = CallParser(ToolUse(style, frozenset({"call"}), parameters={"call": schema}))
    made = [*parser.push(text), *parser.finish()]
    assert not [piece for piece in made if isinstance(piece, str)], text
    return json.loads("".join(piece.text for piece in made if isinstance(piece, CallArguments)))


@pytest.mark.parametrize("style", [QWEN_XML, GLM, MINIMAX], ids=["qwen", "glm", "minimax"])
@pytest.mark.parametrize("seed", [1, 4, 9, 12])
def test_schemas_are_obeyed_by_calls_in_tags(tokenizer: ChatTokenizer, style: ToolStyle, seed: int) -> None:
    inner = [random_schema(random.Random(number)) for number in (seed, seed + 100)]
    schema = hoisted(
        {
            "type": "object",
            "properties": dict(zip(("one", "two words"), inner, strict=True)),
            "required": ["one"],
        }
    )
    text = drawn(tokenizer, compiled(tokenizer, style, schema), seed)
    assert is_valid(read(style, schema, text), schema), text


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"type": ["string", "null"], "maxLength": 3}, ["abc", "null", ""], ["abcd"]),
        (
            {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            ["12", "-3", "0", "x1", "3 apples"],
            ["1.5", "007"],
        ),
        ({"anyOf": [{"type": "integer", "minimum": 10}, {"type": "string"}]}, ["x1"], ["5", "12"]),
        ({"anyOf": [{"enum": ["a", "b"]}, {"type": "boolean"}]}, ["a", "true"], ["c", "True"]),
        ({"anyOf": [{"type": "object"}, {"type": "string"}]}, ["words"], ['{"a": 1}']),
        ({"type": "string", "pattern": "^a/b+$"}, ["a/bb"], ["xa/b", "a/bx"]),
        ({"enum": ["x y", 3, None]}, ["x y", "3", "null"], ["x", "4"]),
        ({"$ref": "#/$defs/word"}, ["red"], ["blue", "3"]),
        ({}, ["anything", "3", "{"], []),
    ],
)
def test_a_value_in_tags_is_what_its_schema_says(
    tokenizer: ChatTokenizer, schema: dict[str, Any], allowed: list[str], refused: list[str]
) -> None:
    whole = {"properties": {"a": schema}, "required": ["a"], "$defs": {"word": {"const": "red"}}}
    grammar = compiled(tokenizer, QWEN_XML, whole)
    for value in (*allowed, *refused):
        text = (
            f"<tool_call>\n<function=call>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
        )
        walk, is_allowed = grammar.walk(), True
        for token_id in tokenizer.encode(text):
            is_allowed = is_allowed and bool(torch.isfinite(walk.masked(torch.zeros(VOCAB_SIZE))[token_id]))
            if not is_allowed:
                break
            walk.take(token_id)
        assert is_allowed is (value in allowed), value


def hoisted(schema: dict[str, Any]) -> dict[str, Any]:
    """References count from the root: bring what they point at there."""
    found: dict[str, Any] = {}
    told = json.loads(json.dumps(schema))
    for number, inner in enumerate(told["properties"].values()):
        if "$defs" in inner:
            found[f"shared{number}"] = inner.pop("$defs")["shared"]
            inner["properties"]["one"] = {"$ref": f"#/$defs/shared{number}"}
    return told | ({"$defs": found} if found else {})


def test_alternatives_that_name_each_other_are_looked_at_once() -> None:
    again = [{"$ref": "#/properties/x"}] * 20
    schema = {"properties": {"x": {"anyOf": [*again, {"type": "string"}, {"type": "integer"}]}}}
    assert types_of(schema["properties"]["x"], schema) == {"string", "integer"}
    assert QWEN_XML.tags is not None
    rules = tagged_rules(schema, QWEN_XML.tags, "argument_0", "tools", repr)
    assert len(rules) < 1000  # 20^8 of them before


def test_definitions_that_many_arguments_name_are_no_work_of_minutes() -> None:
    inner = {f"p{number}": {"type": "string"} for number in range(10)}
    definitions = {f"d{number}": {"type": "object", "properties": inner} for number in range(300)}
    stated = {f"x{number}": {"$ref": "#/$defs/d1"} for number in range(1000)}
    assert QWEN_XML.tags is not None
    began = time.thread_time()
    with pytest.raises(RequestError, match="characters of rules") as refused:
        tagged_rules({"$defs": definitions, "properties": stated}, QWEN_XML.tags, "a", "tools.0", repr)
    assert refused.value.code == "grammar_too_complex"
    assert time.thread_time() - began < 3.0  # it took half a minute


@pytest.mark.parametrize("wrong", [{"properties": 5}, {"properties": {}, "required": "x"}])
def test_what_is_no_schema_of_arguments_is_its_callers_mistake(wrong: Mapping[str, Any]) -> None:
    assert QWEN_XML.tags is not None
    with pytest.raises(RequestError, match="cannot be followed"):
        tagged_rules(wrong, QWEN_XML.tags, "a", "tools.0", repr)


def test_types_that_nobody_knows_are_no_error_of_ours() -> None:
    schema = {"properties": {"x": {"anyOf": [{"type": "string"}, {"type": "bogus"}]}}, "required": [{}, "x"]}
    assert QWEN_XML.tags is not None
    assert tagged_rules(schema, QWEN_XML.tags, "a", "tools.0", repr)
