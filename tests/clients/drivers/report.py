"""What a driver tells: one JSON line for each behaviour that it tried. Standard library only: runs in any environment.

A driver gets its gateway from the environment: BASE_URL, API_KEY, MODEL, and SCRIPTED=1 where the model answers by
`tests/clients/scripted_mind.py`, so that what it says can be checked.
"""

from __future__ import annotations

import inspect
import json
import os
import struct
import sys
import traceback
import urllib.request
import wave
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

BASE_URL = os.environ.get("BASE_URL", "")
API_KEY = os.environ.get("API_KEY", "")
MODEL = os.environ.get("MODEL", "")
IS_SCRIPTED = os.environ.get("SCRIPTED") == "1"
ONLY = set(filter(None, os.environ.get("ONLY", "").split(",")))

HELLO = "Hello"
ANSWER = "Hello! This answer follows a script, so that you can rely on it."
UNICODE = "Größe 日本語 👩‍👩‍👧 🎉 naïve"
WEATHER = "What is the weather in Paris?"
WEATHERS = "What is the weather in Paris and in Rome?"
PERSON = "The name is Ada, her age is 36."
TOO_LONG = "word " * 20_000
MAX_TOKENS = 60
TOOL = {
    "name": "get_weather",
    "description": "Tell the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CHAT_TOOL = {"type": "function", "function": TOOL}
PERSON_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Skipped(Exception):
    """This client has no such thing, or nothing here can be asked for it; the text says why."""


def tell(behaviour: str, status: str, why: str = "") -> None:
    """Write one line; `status` is pass, fail or skip."""
    print(json.dumps({"behaviour": behaviour, "status": status, "why": why[:400]}), flush=True)


def tried(behaviour: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Run a function at once, or the coroutine that it returns, and tell what came of it."""

    def run(function: Callable[[], object]) -> Callable[[], object]:
        if ONLY and behaviour not in ONLY:
            return function
        try:
            made = function()
            if inspect.isawaitable(made):
                import asyncio

                asyncio.run(_awaited(made))
        except Skipped as reason:
            tell(behaviour, "skip", str(reason))
        except BaseException as error:
            place = traceback.extract_tb(error.__traceback__)
            here = next(
                (f.lineno for f in reversed(place) if f.filename == str(Path(sys.argv[0]).resolve())), 0
            )
            tell(behaviour, "fail", f"line {here}: {type(error).__name__}: {error}")
            if os.environ.get("VERBOSE"):
                traceback.print_exc()
        else:
            tell(behaviour, "pass")
        return function

    return run


async def _awaited(made: object) -> None:
    await made  # type: ignore[misc]


def same(found: object, wanted: object, what: str = "") -> None:
    """Fail unless both are equal."""
    assert found == wanted, f"{what} {found!r} instead of {wanted!r}"


def answered(text: object, wanted: str = ANSWER) -> None:
    """A text came, and by a script it is the right one."""
    assert isinstance(text, str), repr(text)
    assert text.strip(), "an empty answer"
    if IS_SCRIPTED:
        same(text, wanted)


def is_person(value: object) -> None:
    assert isinstance(value, dict), repr(value)
    same(set(value), {"name", "age"})
    assert isinstance(value["name"], str)
    assert type(value["age"]) is int
    if IS_SCRIPTED:
        same(value, {"name": "Ada", "age": 36})


def are_calls(calls: list[tuple[str, dict[str, object]]], *cities: str) -> None:
    """These are calls of the tool, for these cities by a script."""
    assert calls, "no calls"
    for name, arguments in calls:
        same(name, "get_weather")
        same(list(arguments), ["city"])
    if IS_SCRIPTED:
        same([arguments["city"] for _, arguments in calls], list(cities))


def is_told(text: object) -> None:
    """The answer behind a tool's result."""
    answered(text, "The tools said: sunny")


def model_for(modality: str, takes: str = "text") -> str:
    """A model here that makes `modality` of what it takes."""
    asked = urllib.request.Request(f"{BASE_URL}/models", headers={"Authorization": f"Bearer {API_KEY}"})
    with urllib.request.urlopen(asked) as reply:
        cards = json.load(reply)["data"]
    for card in cards:
        kinds = card["architecture"]
        if modality in kinds["output_modalities"] and takes in kinds["input_modalities"]:
            return str(card["id"])
    raise Skipped(f"no model here makes {modality} of {takes}")


def a_recording() -> bytes:
    """A second of silence as a WAV file."""
    file = BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(16_000)
        sound.writeframes(struct.pack("<16000h", *([0] * 16_000)))
    return file.getvalue()
