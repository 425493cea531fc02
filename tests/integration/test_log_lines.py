"""What a gateway, its nodes and a sentinel write into their logs, as processes, at debug level: whose line it is, and
not one word of what was said. The same of the traces that they export.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.collector import Collector, collecting
from tests.support.nursery import Nursery
from tests.support.nursery_process import ERRORS_VARIABLE
from tests.support.processes import Process, Processes, until
from tests.support.tiny_models import small_llama
from tests.support.tiny_tokenizer import write_tiny_tokenizer

pytestmark = pytest.mark.processes

KEY = "sk-hush-key-0123456789abcdef"
SECRETS = ("hush", "quick brown", KEY)
CHAT = "/chat/completions"
ASKED: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hush quick brown"}],
    "max_tokens": 4,
    "temperature": 0,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "hush_tool",
        "description": "hush",
        "parameters": {"type": "object", "properties": {"hush": {"type": "string"}}},
    },
}


@dataclass
class Logged:
    """A swarm whose standard errors are files."""

    processes: Processes
    folder: Path
    collector: Collector
    nodes: list[Process] = field(default_factory=list)
    gateway: Process | None = None
    answers: list[httpx.Response] = field(default_factory=list)

    def of(self, name: str) -> list[dict[str, Any]]:
        """The lines of a process; each must be an object."""
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def log_to(self, name: str) -> None:
        self.processes.environment[ERRORS_VARIABLE] = str(self.folder / name)


@pytest.fixture(scope="module")
def logged(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Logged]:
    """A run in which much goes well and much goes wrong; it is over when tests look at it."""
    folder = tmp_path_factory.mktemp("logs")
    model = write_tiny_tokenizer(tmp_path_factory.mktemp("tiny") / "tiny")
    with small_llama(128, vocab_size=300) as llama:
        llama.save_pretrained(model)
    flags = ("--log-level", "debug", "--log-format", "json")
    with collecting() as collector, Processes(nursery) as processes:
        logged = Logged(processes, folder, collector)
        logged.log_to("sentinel")
        sentinel = processes.sentinel(*flags)
        for name, layers in (("node-0", "0:2"), ("node-1", "2:4"), ("node-2", "2:4")):
            logged.log_to(name)
            state = ("--state-dir", str(folder / f"state-{name}"))
            own = ("--runner", "plain", "--dtype", "float32", "--traces", collector.url, *state)
            node = processes._start_host(str(model), layers, *own, *flags, bootstraps=[sentinel])
            logged.nodes.append(node)
        for node in logged.nodes:
            processes._wait_ready(node)
        logged.log_to("gateway")
        processes.environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector.url
        own = ("--name", "tiny", "--local-layers", "0:0", "--api-keys", KEY)
        logged.gateway = processes.serve(str(model), [], *own, *flags, bootstraps=[sentinel])
        _use(logged)
        logged.gateway.popen.terminate()
        logged.gateway.popen.wait(20)
        logged.nodes[0].popen.terminate()
        logged.nodes[0].popen.wait(20)
        yield logged


def _use(logged: Logged) -> None:
    assert logged.gateway is not None
    with httpx.Client(
        base_url=logged.gateway.ready["url"],
        headers={"authorization": f"Bearer {KEY}", "x-hush": "hush"},
        timeout=30,
        trust_env=False,
    ) as http:

        def post(path: str = CHAT, **changes: Any) -> None:
            logged.answers.append(http.post(path, json=ASKED | changes))

        post()
        assert logged.answers[0].status_code == 200, logged.answers[0].text
        post(stream=True)
        post(tools=[TOOL], tool_choice="required", max_tokens=40)
        post(tools=[{"type": "hush"}])
        post(model="hush")
        post(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "hush", "schema": {"type": "hush"}},
            }
        )
        post(
            messages=[
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://hush/"}}]}
            ]
        )
        post("/responses", input="hush quick brown", max_output_tokens=4)
        post("/hush?hush=hush")
        logged.answers.append(http.post(CHAT, content=b'{"hush": '))
        logged.answers.append(http.post(CHAT, content=b'{"messages": "\xff hush"}'))
        logged.answers.append(http.post(CHAT, json=ASKED, headers={"authorization": "Bearer hush"}))
        logged.answers.append(http.post(CHAT, json=ASKED, headers={"x-request-id": "named-by-client"}))
        form = {"file": ("hush.wav", b"RIFF hush", "audio/hush")}
        logged.answers.append(http.post("/audio/transcriptions", files=form, data={"model": "tiny"}))
        with suppress(httpx.HTTPError), http.stream("POST", CHAT, json=ASKED | {"stream": True}) as left:
            next(left.iter_lines())
        _lose_a_node(logged, http)


def _lose_a_node(logged: Logged, http: httpx.Client) -> None:
    """While an answer runs over it."""
    with http.stream(
        "POST", CHAT, json=ASKED | {"stream": True, "max_tokens": 90, "ignore_eos": True}
    ) as told:
        for number, _ in enumerate(told.iter_lines()):
            if number == 6:
                lost = [it for it in logged.nodes[1:] if _has_session(logged, it)]
                assert lost
                lost[0].kill()
    until(lambda: "goes on over another route" in (logged.folder / "gateway").read_text(), 10)


def _has_session(logged: Logged, node: Process) -> bool:
    lines = logged.of(f"node-{logged.nodes.index(node)}")
    opened = {line["session"] for line in lines if line["event"].endswith(": opened")}
    ended = {line["session"] for line in lines if "outcome" in line}
    return bool(opened - ended)


NAMES = ("gateway", "sentinel", "node-0", "node-1", "node-2")


@pytest.mark.parametrize("name", NAMES)
def test_every_line_is_one_json_object_with_a_time_in_utc(name: str, logged: Logged) -> None:
    lines = logged.of(name)
    assert lines
    for line in lines:
        assert line.keys() >= {"timestamp", "level", "logger", "event"}
        assert line["timestamp"].endswith("Z")
        assert "\n" not in line["event"]


@pytest.mark.parametrize("name", NAMES)
def test_no_word_of_what_was_said_is_in_a_log(name: str, logged: Logged) -> None:
    told = (logged.folder / name).read_text()
    for secret in SECRETS:
        assert secret not in told.lower(), [line for line in told.splitlines() if secret in line.lower()]
    texts = [answer.json()["choices"][0]["message"]["content"] for answer in logged.answers[:1]]
    assert not [text for text in texts if len(text) > 3 and text in told]


def test_a_request_has_one_line_that_says_how_it_ended(logged: Logged) -> None:
    answer = logged.answers[0]
    own = [line for line in logged.of("gateway") if line.get("request_id") == answer.headers["x-request-id"]]
    (end,) = [line for line in own if line["level"] == "info"]
    usage = answer.json()["usage"]
    assert end["outcome"] == "finished"
    assert end["prompt_tokens"] == usage["prompt_tokens"]
    assert end["completion_tokens"] == usage["completion_tokens"]
    assert (end["model"], end["endpoint"]) == ("tiny", "/v1/chat/completions")
    assert end["took_s"] >= end["prefill_s"] > 0


def test_a_refused_request_has_one_line_with_its_code(logged: Logged) -> None:
    lines = logged.of("gateway")
    for answer in logged.answers:
        if answer.status_code >= 400:
            request_id = answer.headers["x-request-id"]
            codes = [
                line["code"] for line in lines if line.get("request_id") == request_id and "code" in line
            ]
            assert codes == [answer.json()["error"]["code"]], answer.text


def test_a_session_is_followed_by_its_name_from_gateway_to_nodes(logged: Logged) -> None:
    moves = [line for line in logged.of("gateway") if "another route" in line["event"]]
    events = " ".join(line["event"] for line in moves)
    assert "another route after" in events
    assert "goes on over another route" in events
    assert all(line["request_id"].startswith("req_") and line["model"] == "tiny" for line in moves)
    sessions = {line["session"] for line in moves}
    of_node = [line for line in logged.of("node-0") if line.get("session") in sessions]
    assert of_node
    for line in of_node:
        assert (line["hop"], line["layers"]) == (0, "0:2")
        assert len(line["peer"]) == 8


def test_a_node_says_once_how_each_session_ended(logged: Logged) -> None:
    lines = [line for line in logged.of("node-0") if line.get("outcome", "rerouted") != "rerouted"]
    sessions = [line["session"] for line in lines]
    assert len(sessions) == len(set(sessions)) >= 4
    best = max(lines, key=lambda line: line["steps"])
    assert best["outcome"] == "ended"
    assert best["rows"] >= best["steps"] > 4
    assert best["compute_s"] > 0


def test_nothing_is_said_of_a_token(logged: Logged) -> None:
    """At any level: more than a hundred steps were made over node 0."""
    lines = [line for line in logged.of("node-0") if "session" in line]
    assert sum(line.get("steps", 0) for line in lines) > 2 * len(lines)


def test_members_are_seen_to_come_and_go(logged: Logged) -> None:
    events = [line["event"] for line in logged.of("sentinel")]
    first = logged.nodes[0].address[:8]
    assert f"node {first} has joined" in events
    assert f"node {first} has left" in events


def test_a_request_is_traced_over_the_processes(logged: Logged) -> None:
    request_id = logged.answers[0].headers["x-request-id"]
    spans = logged.collector.spans
    (request,) = [span for span in spans if span.attributes.get("diffuse.request_id") == request_id]
    own = [span for span in spans if span.trace_id == request.trace_id]
    (session,) = [span for span in own if span.name == "session" and span.service == "diffuse-gateway"]
    assert session.parent_id == request.span_id
    of_node = [span for span in own if span.service == "diffuse-node" and span.parent_id == session.span_id]
    assert logged.nodes[0].address[:8] in {span.instance for span in of_node}
    (line,) = [
        line for line in logged.of("gateway") if line.get("answer_id") == logged.answers[0].json()["id"]
    ]
    assert line["trace_id"] == request.trace_id


def test_no_word_of_what_was_said_is_exported(logged: Logged) -> None:
    told = b"".join(logged.collector.bodies).lower()
    assert told
    for secret in SECRETS:
        assert secret.encode() not in told
