"""`llm`, the program, with the model named in `extra-openai-models.yaml`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import report
from report import MODEL, tried

HOME = Path(tempfile.mkdtemp())
MINE = ("-m", "mine", "-o", "temperature", "0", "-o", "max_tokens", "200")
PROGRAM = Path(sys.executable).with_name("llm")
WEATHER = """
def get_weather(city: str) -> str:
    "Tell the weather of a city."
    return "sunny"
"""


def write(key: str = report.API_KEY) -> None:
    """Write what a person writes once."""
    card = (
        f"- model_id: mine\n  model_name: {MODEL}\n  api_base: {report.BASE_URL}\n  api_key_name: diffuse\n"
    )
    more = (
        f"- model_id: absent\n  model_name: nobody\n  api_base: {report.BASE_URL}\n  api_key_name: diffuse\n"
    )
    abilities = "  supports_tools: true\n  supports_schema: true\n"
    (HOME / "extra-openai-models.yaml").write_text(card + abilities + more)
    (HOME / "keys.json").write_text(json.dumps({"diffuse": key}))


def llm(*words: str, told: str | None = None, fails: bool = False) -> str:
    """Run it; return what it wrote."""
    settings = {**os.environ, "LLM_USER_PATH": str(HOME), "NO_COLOR": "1"}
    ended = subprocess.run(
        [str(PROGRAM), *words],
        input=told,
        stdin=None if told is not None else subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=settings,
        timeout=120,
    )
    assert (ended.returncode != 0) == fails, (
        f"{ended.returncode}: {ended.stdout[-200:]} {ended.stderr[-300:]}"
    )
    return ended.stderr if fails else ended.stdout


write()


@tried("chat")
def _() -> None:
    report.answered(llm(*MINE, "--no-stream", report.HELLO).strip())


@tried("streaming")
def _() -> None:
    report.answered(llm(*MINE, report.HELLO).strip())


@tried("unicode")
def _() -> None:
    if not report.IS_SCRIPTED:
        raise report.Skipped("what a model writes cannot be foreseen")
    report.same(llm(*MINE, f"Say: {report.UNICODE}").strip(), report.UNICODE)


@tried("usage")
def _() -> None:
    for options in ([], ["--no-stream"]):
        words = [str(PROGRAM), *MINE, "-u", report.HELLO, *options]
        settings = {**os.environ, "LLM_USER_PATH": str(HOME)}
        told = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=settings)
        assert "Token usage" in told.stderr, told.stderr[-300:]


@tried("tools")
def _() -> None:
    if not report.IS_SCRIPTED:
        raise report.Skipped(
            "it can't say that a tool must be called: whether one is hangs on the model's wit"
        )
    functions = HOME / "tools.py"
    functions.write_text(WEATHER)
    told = llm(*MINE, "--functions", str(functions), "--td", report.WEATHER)
    report.is_told(told.strip().splitlines()[-1])


@tried("structured")
def _() -> None:
    told = llm(*MINE, "--no-stream", "--schema", json.dumps(report.PERSON_SCHEMA), report.PERSON)
    report.is_person(json.loads(told))


@tried("wrong key")
def _() -> None:
    if report.API_KEY == "none":
        raise report.Skipped("this gateway has no key")
    write("wrong")
    try:
        assert "key" in llm(*MINE, report.HELLO, fails=True).lower()
    finally:
        write()


@tried("unknown model")
def _() -> None:
    assert "nobody" in llm("-m", "absent", report.HELLO, fails=True)


@tried("overflow")
def _() -> None:
    assert "maximum context length" in llm(*MINE, told=report.TOO_LONG, fails=True)


@tried("broken stream")
def _() -> None:
    if not report.IS_SCRIPTED:
        raise report.Skipped("no node is lost here")
    assert "layers 10:20" in llm(*MINE, "Break", fails=True)
