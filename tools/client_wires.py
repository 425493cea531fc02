"""The recorded wire of every kind of stream in six clients' parsers: all must read the same."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

from tests.clients.wires import Wire, reading, record, replayed
from tools.client_environments import DRIVERS, HOME, NODE, Environment

LIMIT_S = 180
PARSERS = {  # name: environment, program
    "openai-python 3": ("py-v3", "parse_openai.py"),
    "openai-python 1": ("py-v1", "parse_openai.py"),
    "npm openai": (NODE, "parse_openai_node.mjs"),
    "AI SDK": (NODE, "parse_ai_sdk.mjs"),
    "LangChain": ("py-v3", "parse_langchain.py"),
    "LiteLLM": ("py-v3", "parse_litellm.py"),
}
# How a client calls what others call otherwise.
FINISHES = {
    "tool-calls": "tool_calls",
    "completed": "stop",
    "incomplete": "length",
    "failed": "error",
}
# What a client cannot read, by its own design: parser, scenario, field. One that is read right after all is told.
ONE_CHOICE = "it has no notion of several answers to one question, and does not ask for them"
EXCUSED = {
    ("AI SDK", "two choices", "text"): ONE_CHOICE,
    ("AI SDK", "two choices", "finish"): ONE_CHOICE,
    ("LangChain", "two choices", "text"): ONE_CHOICE,
    ("LangChain", "two choices", "finish"): ONE_CHOICE,
    (
        "LangChain",
        "running usage",
        "usage",
    ): "it sums the usage of all chunks; it never asks for running counts",
}


def compare(url: str, key: str, made: Mapping[str, Environment]) -> Iterator[tuple[str, str, str]]:
    """Yield parser, `pass`, `fail` or `skip`, and why, for each parser and each thing that it reads otherwise."""
    wires = record(url, key)
    wanted = {name: reading(wire) for name, wire in wires.items()}
    with replayed(wires) as replay:
        for parser, (environment, program) in PARSERS.items():
            if made[environment].missing:
                yield parser, "skip", made[environment].missing
                continue
            found = _read(parser, made[environment], program, replay, wires)
            problems = list(differences(parser, wanted, found))
            for problem in problems:
                yield parser, "fail", problem
            if not problems:
                yield parser, "pass", f"{len(found)} streams read alike"


def differences(
    parser: str, wanted: Mapping[str, dict[str, Any]], found: Mapping[str, dict[str, Any]]
) -> Iterator[str]:
    """Yield what a parser reads otherwise and is not excused, and excuses that it does not need."""
    for name, right in wanted.items():
        if name not in found:
            yield f"{name}: not read"
            continue
        for field, value in found[name].items():
            if (field == "usage" and right[field] is None) or (field == "finish" and right["error"]):
                continue  # what was not sent, some guess
            is_same = _canonical(field, value) == _canonical(field, right[field])
            if not is_same and (parser, name, field) not in EXCUSED:
                yield f"{name}: {field} {_short(value)} instead of {_short(right[field])}"
            if is_same and (parser, name, field) in EXCUSED:
                yield f"{name}: {field} is read right: take it out of EXCUSED"


def _read(
    parser: str, environment: Environment, program: str, replay: str, wires: Mapping[str, Wire]
) -> dict[str, dict[str, Any]]:
    kinds = {name: wire.scenario.kind for name, wire in wires.items()}
    is_node = program.endswith(".mjs")
    command = (
        ["node", str(HOME / NODE / program)] if is_node else [environment.python(), str(DRIVERS / program)]
    )
    told = os.environ | {"REPLAY": replay, "SCENARIOS": json.dumps(kinds)}
    ended = subprocess.run(command, check=False, capture_output=True, text=True, env=told, timeout=LIMIT_S)
    lines = [json.loads(line) for line in ended.stdout.split("\n") if line.startswith('{"scenario"')]
    if ended.returncode:
        print(f"{parser}: {ended.stderr[-1000:]}", flush=True)
    return {line["scenario"]: line["reading"] for line in lines}


def _canonical(field: str, value: Any) -> Any:
    return [FINISHES.get(one, one) for one in value] if field == "finish" and value else value


def _short(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)[:160]
