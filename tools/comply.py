"""Run the third-party suite llm-comply against a real swarm, chat and Responses: `python -m tools.comply SUITE`.

SUITE is its program, in an environment of its own. The text model answers by its own sampling, and may say for minutes
what one word would do: each test has a time limit and a second and third chance, which are told. Tests with a picture
go to a tiny random model that sees: it shows that pictures get through, not that they are understood. Models are asked
by an alias: the suite leaves its tests of `reasoning` out unless the name is that of a model that reasons.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.tiny_multimodal import write_multimodal

FORMATS = ("openai-chat", "open-responses")
TRIES = 3
LIMIT_S = 120
ALIAS = "gpt-5-stand-in"
START_S = 180


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", help="the llm-comply program")
    parser.add_argument("--url", help="ask this gateway (http://HOST:PORT/v1) instead of starting a swarm")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--log", type=Path, default=Path("/tmp/diffuse-comply.log"))
    chosen = parser.parse_args()
    tests = {name: list(tests_of(chosen.suite, name)) for name in FORMATS}
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        if chosen.url:
            failed += run(chosen.suite, chosen.url, chosen.model, tests)
        else:
            texts = {name: [test for test in ids if "image" not in test] for name, ids in tests.items()}
            sights = {name: [test for test in ids if "image" in test] for name, ids in tests.items()}
            with swarm(chosen.model, chosen.log, "--port", "0") as url:
                failed += run(chosen.suite, url, ALIAS, texts)
            seeing = one_word_model(Path(folder) / "tiny-seeing")
            with swarm(str(seeing), chosen.log, "--port", "0", "--nodes", "1") as url:
                failed += run(chosen.suite, url, ALIAS, sights)
    return 1 if failed else 0


def tests_of(suite: str, api: str) -> Iterator[str]:
    """Yield the ids of a format's tests."""
    listed = subprocess.run([suite, "--format", api, "--list"], capture_output=True, text=True, check=True)
    for line in listed.stdout.splitlines():
        if line.startswith("  ") and not line.startswith("   "):
            yield line.split()[0]


def run(suite: str, url: str, model: str, tests: dict[str, list[str]]) -> int:
    """Run these tests, print what came of each, and return how many failed."""
    failed = 0
    for api, ids in tests.items():
        for test in ids:
            result, number = tried(suite, url, model, api, test)
            failed += result["status"] == "failed"
            again = f" at try {number}" if number > 1 else ""
            print(f"{result['status']:8}{api:16}{test}{again}", flush=True)
            for error in (*result.get("errors", ()), *result.get("warnings", ())):
                print(f"        {error}", flush=True)
    return failed


def tried(suite: str, url: str, model: str, api: str, test: str) -> tuple[dict[str, Any], int]:
    """Run one test until it passes, at most `TRIES` times; return what came of it and how many there were."""
    command = [suite, "--format", api, "-u", url, "-k", "none", "-m", model, "-f", test, "--json"]
    result: dict[str, Any] = {}
    for number in range(1, TRIES + 1):
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
            result = json.loads(ended.stdout)["results"][0]
        except subprocess.TimeoutExpired:
            result = {"status": "failed", "errors": [f"took more than {LIMIT_S} s"]}
        if result["status"] != "failed":
            return result, number
    return result, TRIES


@contextmanager
def swarm(model: str, log: Path, *options: str) -> Iterator[str]:
    """Run `diffuse up`; give its URL once it answers."""
    command = [str(Path(sys.executable).with_name("diffuse")), "up", "--model", model, "--pictures", "none"]
    settings = os.environ | {"DIFFUSE_MODEL_ALIASES": f"{ALIAS}={Path(model).name}"}
    with log.open("a+") as out:
        begin = out.seek(0, 2)
        process = subprocess.Popen([*command, *options], stdout=out, stderr=subprocess.STDOUT, env=settings)
        try:
            yield ready_url(process, log, begin)
        finally:
            process.terminate()
            process.wait(30)


def ready_url(process: subprocess.Popen[bytes], log: Path, begin: int) -> str:
    """Wait for the line that names the URL, and until the model answers."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_bytes()[begin:].decode(errors="replace").splitlines():
            if line.startswith("base_url"):
                url = line.split()[1]
                with urllib.request.urlopen(url.removesuffix("/v1") + "/ready") as answer:
                    assert answer.status == 200
                return url
        time.sleep(0.2)
    raise SystemExit(f"the swarm did not start: see {log}")


def one_word_model(folder: Path) -> Path:
    """A tiny random model that sees pictures, and ends each answer after one token: all its tokens are end tokens."""
    folder.mkdir()
    write_multimodal(folder, "llava")
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text()) if path.exists() else {}
    config = json.loads((folder / "config.json").read_text())
    size = config.get("text_config", config)["vocab_size"]
    path.write_text(json.dumps(generation | {"eos_token_id": list(range(size))}))
    return folder


if __name__ == "__main__":
    sys.exit(main())
