"""Answers held to a form: whatever a model would rather say, what comes out is valid, and it ends."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from app.engine.grammar import Grammar, GrammarRules
from app.engine.request import RequestError
from app.engine.schema_rules import MAX_DEPTH, schema_rule
from app.engine.tokenizer import ChatTokenizer
from slicing.model_source import open_checkpoint
from slicing.sampler import Sampler, SamplingParams
from tests.support.schemas import is_valid, random_schema
from tests.support.tiny_models import small_llama

VOCAB_SIZE = 400
PROMPT = (1, 20, 30)
MAX_TOKENS = 1500


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaForCausalLM]:
    with small_llama(512, vocab_size=VOCAB_SIZE, hidden_size=32, num_layers=2) as llama:
        yield llama


def compiled(tokenizer: ChatTokenizer, schema: Mapping[str, Any]) -> Grammar:
    rules = GrammarRules("field", f"start: {schema_rule(schema, 'field')}")
    return tokenizer.grammars.compile(rules, VOCAB_SIZE)


def said(
    model: LlamaForCausalLM,
    tokenizer: ChatTokenizer,
    grammar: Grammar,
    params: SamplingParams,
    max_tokens: int = MAX_TOKENS,
) -> tuple[str, str]:
    """Return what a model says under a grammar, and why it ended; it sees its last 24 tokens."""
    sampler, walk = Sampler(params, VOCAB_SIZE), grammar.walk()
    ids = list(PROMPT)
    while len(ids) - len(PROMPT) < max_tokens:
        logits = torch.zeros(VOCAB_SIZE)
        if not walk.is_forced:
            with torch.inference_mode():
                logits = model(torch.tensor([ids[-24:]])).logits[0, -1]
        token_id = sampler.sample(walk.masked(logits), len(ids))
        if token_id in tokenizer.stop_token_ids:
            return tokenizer.decode(ids[len(PROMPT) :]), "stop"
        walk.take(token_id)
        sampler.observe(token_id)
        ids.append(token_id)
    return tokenizer.decode(ids[len(PROMPT) :]), "length"


@pytest.mark.long
@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_schemas_are_obeyed_over_the_tokens_of_real_models(name: str) -> None:
    checkpoint = open_checkpoint(name)
    real = ChatTokenizer.load(checkpoint.folder)
    vocab_size = json.loads((checkpoint.folder / "config.json").read_text())["vocab_size"]
    for seed in range(8):
        schema, noise = random_schema(random.Random(seed)), torch.Generator().manual_seed(seed)
        rules = GrammarRules("field", f"start: {schema_rule(schema, 'field')}")
        walk = real.grammars.compile(rules, vocab_size).walk()
        sampler, text, pieces = Sampler(SamplingParams(seed=seed), vocab_size), real.answer_text(), []
        for position in range(800):
            token_id = sampler.sample(walk.masked(torch.randn(vocab_size, generator=noise)), position)
            if token_id in real.stop_token_ids:
                break
            walk.take(token_id)
            pieces.append(text.push(token_id))
        assert is_valid(json.loads("".join(pieces)), schema)


@pytest.mark.real
def test_smollm2_fills_in_two_fields_with_a_third_less_work() -> None:
    checkpoint = open_checkpoint("smollm2")
    real = ChatTokenizer.load(checkpoint.folder)
    stock = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32)
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
    rules = GrammarRules("field", f"start: {schema_rule(schema, 'field')}")
    walk = real.grammars.compile(rules, stock.config.vocab_size).walk()
    ids = list(real.render([{"role": "user", "content": "A person as JSON, with name and age."}]))
    begin, drawn = len(ids), 0
    while ids[-1] not in real.stop_token_ids or len(ids) == begin:
        if walk.is_forced:
            ids.append((walk.ahead(1) or walk.rest())[0])
        else:
            with torch.inference_mode():
                ids.append(int(walk.masked(stock(torch.tensor([ids])).logits[0, -1]).argmax()))
            drawn += 1
        walk.take(ids[-1])
    value = json.loads(real.decode(ids[begin:]))
    assert (type(value["name"]), type(value["age"])) == (str, int)
    assert drawn <= 0.7 * (len(ids) - begin)


@pytest.mark.parametrize("block", range(8))
def test_two_hundred_schemas_are_obeyed_by_a_model_that_knows_nothing(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, block: int
) -> None:
    for seed in range(25 * block, 25 * block + 25):
        schema = random_schema(random.Random(seed))
        text, reason = said(
            model, tokenizer, compiled(tokenizer, schema), SamplingParams(temperature=1.0, seed=seed)
        )
        assert reason == "stop", (seed, schema, text)
        assert is_valid(json.loads(text), schema), (seed, schema, text)


@pytest.mark.parametrize("schema", [{}, {"type": "object"}, {"type": "array"}, {"items": {}}])
def test_a_schema_that_says_little_ends(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, schema: dict[str, Any]
) -> None:
    grammar = compiled(tokenizer, schema)
    ends = [
        said(model, tokenizer, grammar, SamplingParams(temperature=1.0, seed=seed), 300) for seed in range(12)
    ]
    whole = [text for text, reason in ends if reason == "stop"]
    assert whole
    for text in whole:
        json.loads(text)


def test_a_model_that_loves_whitespace_gets_nowhere_with_it(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer
) -> None:
    blanks = [token_id for text in (" ", "\n", "\t", "\r") for token_id in tokenizer.encode(text)]
    params = SamplingParams(temperature=0.0, logit_bias=tuple((token_id, 90.0) for token_id in blanks))
    schema = {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "maximum": 9},
            "b": {"type": "array", "items": {"type": "null"}, "maxItems": 3},
        },
        "required": ["n", "b"],
    }
    text, reason = said(model, tokenizer, compiled(tokenizer, schema), params, 100)
    assert reason == "stop"
    assert text == json.dumps(json.loads(text))


def test_no_bias_breaks_the_form(model: LlamaForCausalLM, tokenizer: ChatTokenizer) -> None:
    schema = {"enum": ["yes", "no"]}
    letters = tokenizer.encode("yesno{}\"'")
    for bias in (-100.0, 100.0):
        biased = tuple({token_id: (token_id, bias) for token_id in letters}.values())
        params = SamplingParams(temperature=0.7, top_p=0.1, min_p=0.5, logit_bias=biased, seed=3)
        text, reason = said(model, tokenizer, compiled(tokenizer, schema), params, 50)
        assert (json.loads(text) in schema["enum"], reason) == (True, "stop")


def test_properties_come_in_the_order_of_the_schema_and_no_others(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer
) -> None:
    schema = {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in "zax"},
        "required": ["z", "a", "x"],
    }
    for seed in range(5):
        text, _ = said(model, tokenizer, compiled(tokenizer, schema), SamplingParams(seed=seed))
        assert list(json.loads(text)) == ["z", "a", "x"]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "properties": {"a": {"contains": {}}}}, "contains"),
        ({"if": {}, "then": {}}, "if, then"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "oneOf"),
        ({"type": "string", "pattern": "(?=secret)b"}, "pattern"),
        ({"type": "nonsense"}, "type"),
        ({"enum": []}, "Unsatisfiable"),
        ({"$ref": "#/$defs/gone"}, "gone"),
        ({"$ref": "https://example.com/schema.json"}, "$ref"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_keyword(
    tokenizer: ChatTokenizer, schema: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError) as refused:
        compiled(tokenizer, schema)
    assert words in refused.value.message
    assert refused.value.param == "field"
    assert "secret" not in refused.value.message
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "string"}, {"type": ["integer", "null"]}]},
        {"oneOf": [{"const": 1}, {"enum": [2, 3]}]},
        {
            "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
            "$defs": {
                name: {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}
                for name in ("cat", "dog")
            },
        },
    ],
)
def test_branches_that_are_told_apart_may_be_a_choice_of_one(
    model: LlamaForCausalLM, tokenizer: ChatTokenizer, schema: dict[str, Any]
) -> None:
    for seed in range(4):
        text, _ = said(model, tokenizer, compiled(tokenizer, schema), SamplingParams(seed=seed))
        assert is_valid(json.loads(text), schema)


@pytest.mark.parametrize(
    "schema",
    [
        {
            "allOf": [
                {"properties": {"a": {"type": "null"}}, "required": ["a"]},
                {"properties": {"b": {"type": "null"}}, "required": ["b"]},
            ],
            "type": "object",
        },
        {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a", "b"]},
    ],
)
def test_an_object_that_asks_for_more_than_it_lists_stays_open(
    tokenizer: ChatTokenizer, schema: dict[str, Any]
) -> None:
    assert '"additionalProperties": false' not in schema_rule(schema, "field")
    compiled(tokenizer, schema)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def doubled(depth: int) -> dict[str, Any]:
    made = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(depth)}
    return {"$ref": "#/$defs/d0", "$defs": made | {f"d{depth}": {"type": "null"}}}


@pytest.mark.parametrize(
    "schema",
    [
        nested(MAX_DEPTH),
        nested(5000),
        {"enum": [f"value {n}" * 20 for n in range(5000)]},
        {"enum": list(range(20_000))},
        {"type": "string", "pattern": "^(((a{1,50}){1,50}){1,50}){1,50}$"},
        {"type": "string", "pattern": "^(a|b)*a(a|b){300}$"},
        {"type": "string", "minLength": 10**6},
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**5},
        {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(3000)}},
        {"allOf": [{"anyOf": [{"properties": {f"a{n}{m}": {}}} for m in range(4)]} for n in range(12)]},
        {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
        doubled(25),
        {"type": "integer", "multipleOf": 99991, "minimum": 1},
        {"oneOf": [{"const": n} for n in range(5000)]},
        {"anyOf": [{"title": "x" * 10} for _ in range(100_000)]},
    ],
    ids=range(15),
)
def test_a_schema_made_to_hurt_is_compiled_or_refused_soon(
    tokenizer: ChatTokenizer, schema: dict[str, Any]
) -> None:
    began = time.thread_time()
    try:
        walk = compiled(tokenizer, schema).walk()
        logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
        for _ in range(50):
            token_id = int(walk.masked(logits).argmax())
            if token_id in tokenizer.stop_token_ids:
                break
            walk.take(token_id)
    except RequestError as error:
        assert error.code in ("grammar_too_complex", "invalid_value", "unsupported_parameter")
    assert time.thread_time() - began < 5


def test_what_is_left_of_an_answer_is_known_where_it_leaves_no_choice(tokenizer: ChatTokenizer) -> None:
    walk = compiled(
        tokenizer, {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    ).walk()
    head = walk.ahead(100)
    assert tokenizer.decode(head) == '{"a":'  # the space may belong to the token that follows
    assert walk.ahead(3) == head[:3]
    assert walk.rest() == ()
    for token_id in head:
        assert walk.is_forced
        walk.take(token_id)
    assert not walk.is_forced
    for token_id in tokenizer.encode(" t"):
        walk.take(token_id)
    assert tokenizer.decode(walk.ahead(100)) == "rue}"
    assert walk.rest() == (*walk.ahead(100), walk.rest()[-1])
    assert walk.rest()[-1] in tokenizer.stop_token_ids
