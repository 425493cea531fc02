"""Other people's clients and suites against a gateway: `python -m tools.clients [--real]`.

Without `--real` the gateway's models follow a script (`tests/clients/scripted_mind.py`), so that what they say can be
checked; with it a swarm of processes serves SmolLM2. Each client has a driver in `tests/clients/drivers`, in an
environment of its own. Ends with a table; exits with 1 if anything failed that no list excuses.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools import client_suites, client_wires
from tools.client_environments import DRIVERS, HOME, NODE, SDK, Environment, environments
from tools.comply import ALIAS, swarm

KEY = "right-key"
LIMIT_S = 1200
AT_ONCE = 2
CLIENTS = {  # name: environment, driver, how it is called in the table
    "openai-python 3.57.0": ("py-v3", "openai_python.py", "py3"),
    "openai-python 1.109.1": ("py-v1", "openai_python.py", "py1"),
    "npm openai 6.49.0": (NODE, "openai_node.mjs", "npm"),
    "AI SDK 6.0.326": (NODE, "ai_sdk.mjs", "ai"),
    "langchain-openai 1.7.4": ("py-v3", "langchain_client.py", "lang"),
    "litellm 1.110.2": ("py-v3", "litellm_client.py", "lite"),
    "llm 0.36": ("py-agents", "llm_cli.py", "llm"),
    "pydantic-ai 2.38.0": ("py-agents", "pydantic_agents.py", "pyd"),
    "openai-agents 0.24.0": ("py-agents", "openai_agents.py", "agen"),
    "instructor 1.17.0": ("py-agents", "instructor_client.py", "inst"),
}
MARKS = {"pass": "ok", "fail": "FAIL", "skip": "-"}
# What other models than SmolLM2 are asked for, by the clients that can.
MEDIA = {"all-minilm-l6-v2": "embeddings", "whisper-tiny.en": "transcription"}


@dataclass(frozen=True)
class Told:
    """What came of one behaviour of one client, or of one part of a suite."""

    client: str
    behaviour: str
    status: str
    why: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", action="store_true", help="SmolLM2 on a swarm in place of scripted models")
    parser.add_argument("--only", choices=("clients", "suites", "wires"), help="one part alone")
    parser.add_argument("--client", action="append", help="of the clients, these alone")
    parser.add_argument("--log", type=Path, default=Path("/tmp/diffuse-clients.log"))
    chosen = parser.parse_args()
    made = environments()
    names = [name for name in CLIENTS if not chosen.client or any(part in name for part in chosen.client)]
    run = real if chosen.real else scripted
    found = list(run(made, names, chosen.only, chosen.log))
    print(table([one for one in found if one.client in CLIENTS]))
    return verdict(found)


def scripted(
    made: Mapping[str, Environment], names: Sequence[str], only: str | None, log: Path
) -> Iterator[Told]:
    """Try everything against models that follow a script."""
    with fixture(log) as url:
        if only in (None, "clients"):
            yield from tried(
                made, names, {"BASE_URL": url, "API_KEY": KEY, "MODEL": "fixture", "SCRIPTED": "1"}
            )
        if only in (None, "wires"):
            for parser, status, why in client_wires.compare(url, KEY, made):
                yield Told(f"{parser} over recorded wires", "streams", status, why)
        if only in (None, "suites"):
            yield from langchain_suite(made, url, "fixture", "thinker", "langchain-fixture")
    if only in (None, "suites"):
        yield from api_suite(made, log)


def real(
    made: Mapping[str, Environment], names: Sequence[str], only: str | None, log: Path
) -> Iterator[Told]:
    """Try chats against SmolLM2, and vectors, transcriptions and pictures against small real models."""
    os.environ["DIFFUSE_API_KEYS"] = KEY
    told = {"API_KEY": KEY, "SCRIPTED": "0"}
    with swarm("smollm2", log, "--port", "0", "--pictures", "tiny-pictures") as url:
        if only in (None, "clients"):
            yield from tried(made, names, {**told, "BASE_URL": url, "MODEL": "smollm2"})
        if only in (None, "suites"):
            yield from langchain_suite(made, url, "smollm2", ALIAS, "langchain-smollm2")
    for model, behaviour in MEDIA.items() if only in (None, "clients") else ():
        with swarm(model, log, "--port", "0", "--nodes", "1") as url:
            asked = {**told, "BASE_URL": url, "MODEL": model, "ONLY": behaviour}
            yield from tried(made, names, asked, behaviour)


def tried(
    made: Mapping[str, Environment], names: Sequence[str], told: Mapping[str, str], only: str | None = None
) -> Iterator[Told]:
    """Run the drivers, two at once."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for found in pool.map(lambda name: driven(name, made[CLIENTS[name][0]], told), names):
            for one in found:
                if only is None or one.behaviour == only or one.status == "fail":
                    print(f"{one.status:5}{one.client:24}{one.behaviour:16}{one.why}", flush=True)
                    yield one


def driven(name: str, environment: Environment, told: Mapping[str, str]) -> list[Told]:
    """Run one driver; return what it tells."""
    if environment.missing:
        return [Told(name, "all", "skip", environment.missing)]
    driver = CLIENTS[name][1]
    is_node = driver.endswith(".mjs")
    command = (
        ["node", str(HOME / NODE / driver)] if is_node else [environment.python(), str(DRIVERS / driver)]
    )
    try:
        ended = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            env=os.environ | dict(told),
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return [Told(name, "all", "fail", f"took more than {LIMIT_S} s")]
    lines = [json.loads(line) for line in ended.stdout.split("\n") if line.startswith('{"behaviour"')]
    found = [Told(name, line["behaviour"], line["status"], line["why"]) for line in lines]
    if ended.returncode or (not found and not told.get("ONLY")):
        found.append(Told(name, "all", "fail", f"ended with {ended.returncode}: {ended.stderr[-500:]}"))
    return found


def langchain_suite(
    made: Mapping[str, Environment], url: str, model: str, other: str, listed: str
) -> Iterator[Told]:
    if made["py-v3"].missing:
        yield Told("langchain-tests 1.1.9", listed, "skip", made["py-v3"].missing)
        return
    is_small = model == "smollm2"
    results = client_suites.langchain(url, KEY, model, other, made["py-v3"], is_small=is_small)
    yield from suite_told("langchain-tests 1.1.9", listed, results)


def api_suite(made: Mapping[str, Environment], log: Path) -> Iterator[Told]:
    missing = made["py-v3"].missing or made[SDK].missing
    if missing:
        yield Told("openai-python's API tests", "openai-api", "skip", missing)
        return
    aliases = [f"--alias={alias}={model}" for alias, model in client_suites.API_MODELS.items()]
    with fixture(log, "--keys=", *aliases) as url:
        results = client_suites.openai_api(url, made["py-v3"])
    yield from suite_told("openai-python's API tests", "openai-api", results)


def suite_told(suite: str, name: str, results: Mapping[str, client_suites.Outcome]) -> Iterator[Told]:
    listed = client_suites.read_list(name)
    wrong = list(client_suites.problems(results, listed))
    for problem in wrong:
        yield Told(suite, name, "fail", problem)
    if not wrong:
        yield Told(suite, name, "pass", client_suites.summary(results, listed))


@contextmanager
def fixture(log: Path, *options: str) -> Iterator[str]:
    """Run the gateway of scripted models in a process of its own; give its URL."""
    command = [sys.executable, "-m", "tests.clients.fixture_server", *options]
    with log.open("a") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("base_url"):
                raise SystemExit(f"the gateway did not start: see {log}")
            yield line.split()[1]
        finally:
            process.terminate()
            process.wait(30)


def table(found: Sequence[Told]) -> str:
    """Behaviours down, clients across."""
    clients = list(dict.fromkeys(one.client for one in found))
    behaviours = list(dict.fromkeys(one.behaviour for one in found))
    cells = {(one.client, one.behaviour): MARKS[one.status] for one in found}
    lines = [" " * 16 + "".join(f"{CLIENTS[name][2]:>6}" for name in clients)]
    for behaviour in behaviours:
        marks = (cells.get((name, behaviour), "") for name in clients)
        lines.append(f"{behaviour:16}" + "".join(f"{mark:>6}" for mark in marks))
    lines += [f"{CLIENTS[name][2]:>6} {name}" for name in clients]
    return "\n".join(("", *lines, ""))


def verdict(found: Sequence[Told]) -> int:
    """Print what was no behaviour of a client, what was skipped, what failed, and the sum; return the exit code."""
    for one in found:
        if one.status == "fail" or one.client not in CLIENTS:
            print(f"{one.status:5}{one.client}: {one.behaviour}: {one.why}")
    skipped = sorted({(one.why, one.client) for one in found if one.status == "skip"})
    for why in dict.fromkeys(why for why, _ in skipped):
        print(f"skip {', '.join(client for reason, client in skipped if reason == why)}: {why}")
    counts = {status: sum(one.status == status for one in found) for status in MARKS}
    print(f"{counts['pass']} passed, {counts['fail']} failed, {counts['skip']} skipped")
    return 1 if counts["fail"] or not counts["pass"] else 0


if __name__ == "__main__":
    sys.exit(main())
