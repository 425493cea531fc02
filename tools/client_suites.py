"""Third-party test suites against a gateway.

A test that fails stands in the suite's list with its reason, or it counts. One that is listed and passes counts, too.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tools.client_environments import HOME, SDK, Environment

SUITES = Path("tests/clients/suites")
LIMIT_S = 3000
Outcome = Literal["passed", "failed", "skipped"]
# Their loops are shared by all tests: clients keep connections from one test to the next.
LOOPS = (
    "asyncio_mode=auto",
    "asyncio_default_test_loop_scope=session",
    "asyncio_default_fixture_loop_scope=session",
)
# Of openai-python's own API tests, the files of the endpoints that are served here, if only in part.
API_TESTS = (
    "chat/test_completions.py",
    "test_completions.py",
    "test_models.py",
    "test_embeddings.py",
    "test_images.py",
    "test_videos.py",
    "test_responses.py",
    "audio/test_speech.py",
    "audio/test_transcriptions.py",
    "audio/test_translations.py",
)
API_MODELS = {  # what those tests ask for, and which model of the fixture answers
    "gpt-6-astra": "fixture",
    "gpt-3.5-turbo-instruct": "fixture",
    "gpt-4o-transcribe": "scribe",
    "whisper-1": "scribe",
    "gpt-image-1.5": "painter",
    "gpt-image-2.5-flare": "painter",
    "sora-2": "filmer",
    "text-embedding-3-small": "librarian",
    "tts-1": "composer",
}


@dataclass(frozen=True)
class Listed:
    """Tests that fail here, by patterns in which `*` stands for anything. `may_pass`: it hangs on a model's wit."""

    patterns: tuple[str, ...]
    reason: str
    may_pass: bool = False

    def holds(self, test: str) -> bool:
        return any(_matches(pattern, test) for pattern in self.patterns)


def langchain(
    url: str, key: str, model: str, other: str, environment: Environment, *, is_small: bool = False
) -> dict[str, Outcome]:
    """Run LangChain's standard tests of a chat model."""
    told = {"BASE_URL": url, "API_KEY": key, "MODEL": model, "OTHER_MODEL": other}
    told |= {"IS_SMALL": "1"} if is_small else {}
    return _pytest(environment, [str(SUITES.resolve() / "langchain_standard.py")], told, HOME.resolve())


def openai_api(url: str, environment: Environment) -> dict[str, Outcome]:
    """Run openai-python's own API tests; the gateway has no key, since theirs has spaces."""
    tests = [f"tests/api_resources/{name}" for name in API_TESTS]
    found = _pytest(environment, tests, {"TEST_API_BASE_URL": url}, HOME.resolve() / SDK)
    return {test.removeprefix("tests.api_resources."): outcome for test, outcome in found.items()}


def read_list(name: str) -> list[Listed]:
    told = tomllib.loads((SUITES / f"{name}.toml").read_text())
    return [
        Listed(tuple(entry["tests"]), entry["reason"], entry.get("may_pass", False))
        for entry in told.get("listed", ())
    ]


def problems(results: Mapping[str, Outcome], listed: Sequence[Listed]) -> Iterator[str]:
    """Yield failures that no list excuses, and lines of the list that excuse nothing."""
    if not results:
        yield "no test ran"
    for test, outcome in results.items():
        excuses = [entry for entry in listed if entry.holds(test)]
        if outcome == "failed" and not excuses:
            yield f"failed: {test}"
        if outcome == "passed" and any(not entry.may_pass for entry in excuses):
            yield f"listed, but passes: {test}"
    for entry in listed:
        for pattern in entry.patterns:
            if not any(_matches(pattern, test) for test in results):
                yield f"listed, but there is no such test: {pattern}"


def summary(results: Mapping[str, Outcome], listed: Sequence[Listed]) -> str:
    """Count what came of a suite."""
    counts = {kind: sum(outcome == kind for outcome in results.values()) for kind in ("passed", "skipped")}
    excused = [
        test
        for test, one in results.items()
        if one == "failed" and any(entry.holds(test) for entry in listed)
    ]
    told = f"{counts['passed']} passed, {len(excused)} listed with their reasons"
    return f"{told}, {counts['skipped']} skipped by the suite"


def _pytest(
    environment: Environment, tests: Sequence[str], told: Mapping[str, str], folder: Path
) -> dict[str, Outcome]:
    with tempfile.TemporaryDirectory() as place:
        report = Path(place, "report.xml")
        options = [
            word for option in (*LOOPS, "addopts=", "filterwarnings=default") for word in ("-o", option)
        ]
        command = [
            str(Path(environment.python()).absolute()),
            "-m",
            "pytest",
            "-q",
            "--tb=line",
            f"--junitxml={report}",
        ]
        command += ["-c", os.devnull, f"--rootdir={folder}", "-p", "no:cacheprovider", *options, *tests]
        settings = os.environ | dict(told) | {"PYTHONPATH": str(folder)}
        log = HOME.resolve() / "suite.log"
        with log.open("w") as out:
            subprocess.run(
                command, check=False, cwd=folder, env=settings, stdout=out, stderr=out, timeout=LIMIT_S
            )
        return outcomes(report.read_text()) if report.exists() else {}


def outcomes(report: str) -> dict[str, Outcome]:
    """Read pytest's JUnit report: test by test, `module.Class::name[parameters]`."""
    found: dict[str, Outcome] = {}
    for case in ET.fromstring(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        kinds = {child.tag for child in case}
        found[name] = (
            "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        )
    return found


def _matches(pattern: str, test: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), test) is not None
