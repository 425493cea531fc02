"""The raw bytes of every kind of stream, recorded from a gateway, read by the standard, and served again as they are.

Six clients' parsers read the same bytes (`drivers/parse_*`); each must find what the reader here finds.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import httpx

Kind = Literal["chat", "completions", "responses"]
PATHS: dict[Kind, str] = {"chat": "chat/completions", "completions": "completions", "responses": "responses"}
MAX_PIECE = 64  # bytes of one write: frames and characters are cut anywhere
UNICODE = "Größe 日本語 👩‍👩‍👧 🎉 naïve"
TOOL = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS = {"tools": [{"type": "function", "function": TOOL}]}
USAGE = {"stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Scenario:
    """A request whose answer is a stream. `asked` is the user's text."""

    kind: Kind
    asked: str
    fields: dict[str, Any] = field(default_factory=dict)
    model: str = "fixture"

    @property
    def body(self) -> dict[str, Any]:
        told: dict[str, Any] = {"model": self.model, "stream": True, **self.fields}
        match self.kind:
            case "chat":
                return {**told, "messages": [{"role": "user", "content": self.asked}]}
            case "completions":
                return {**told, "prompt": self.asked}
            case "responses":
                return {**told, "input": self.asked}


SCENARIOS: dict[str, Scenario] = {
    "text": Scenario("chat", "Hello"),
    "unicode": Scenario("chat", f"Say: {UNICODE}"),
    "line ends": Scenario("chat", "Say: one\r\ntwo\u2028three\x85four\ttabs: data: {}\n\n: five"),
    "usage": Scenario("chat", "Hello", USAGE),
    "running usage": Scenario(
        "chat", "Hello", {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    ),
    "length": Scenario("chat", "Hello", {"max_tokens": 5, **USAGE}),
    "stop": Scenario("chat", "Hello", {"stop": ["follows"], **USAGE}),
    "tools": Scenario("chat", "What is the weather in Paris?", {**TOOLS, **USAGE}),
    "parallel tools": Scenario("chat", "What is the weather in Paris and in Rome?", {**TOOLS, **USAGE}),
    "held tools": Scenario(
        "chat", "What is the weather in Paris and in Rome?", {**TOOLS, "tool_choice": "required"}
    ),
    "two choices": Scenario("chat", "Hello", {"n": 2, **USAGE}),
    "logprobs": Scenario("chat", f"Say: {UNICODE}", {"logprobs": True, "top_logprobs": 2}),
    "reasoning": Scenario("chat", "Think: Hello", USAGE, model="thinker"),
    "signs of life": Scenario("chat", "Slowly", USAGE),
    "object": Scenario(
        "chat", "Return a JSON with 'setup' keys.", {"response_format": {"type": "json_object"}, **USAGE}
    ),
    "broken": Scenario("chat", "Break", USAGE),
    "completion": Scenario("completions", "once", {"max_tokens": 20, **USAGE}),
    "broken completion": Scenario("completions", "Break", {"max_tokens": 40}),
    "response": Scenario("responses", f"Say: {UNICODE}"),
    "response with tools": Scenario(
        "responses",
        "What is the weather in Paris and in Rome?",
        {"tools": [{"type": "function", "strict": True, **TOOL}]},
    ),
    "slow response": Scenario("responses", "Slowly"),
    "short response": Scenario("responses", "Hello", {"max_output_tokens": 5}),
    "broken response": Scenario("responses", "Break"),
}


@dataclass(frozen=True)
class Wire:
    """What came over the wire of one answer."""

    scenario: Scenario
    content_type: str
    body: bytes = field(repr=False)


def record(url: str, key: str) -> dict[str, Wire]:
    """Ask every scenario once. Raises `AssertionError` where an answer is no stream."""
    wires: dict[str, Wire] = {}
    with httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=60, trust_env=False) as client:
        for name, scenario in SCENARIOS.items():
            reply = client.post(f"{url}/{PATHS[scenario.kind]}", json=scenario.body)
            assert reply.status_code == 200, f"{name}: {reply.text}"
            wires[name] = Wire(scenario, reply.headers["content-type"], reply.content)
    return wires


def reading(wire: Wire) -> dict[str, Any]:
    """Read a stream as the standards say, into what the parsers tell, too."""
    frames = list(_frames(wire.body))
    if wire.scenario.kind == "responses":
        return _response(frames)
    found: dict[str, Any] = {"text": {}, "reasoning": "", "finish": {}, "usage": None, "error": False}
    calls: dict[int, list[str]] = {}
    told = b""
    for frame in frames:
        found["error"] |= "error" in frame
        if usage := frame.get("usage"):
            found["usage"] = [usage["prompt_tokens"], usage["completion_tokens"]]
        for choice in frame.get("choices", ()):
            index, delta = choice["index"], choice.get("delta", {})
            piece = choice.get("text", delta.get("content")) or ""
            found["text"][index] = found["text"].get(index, "") + piece
            found["reasoning"] += delta.get("reasoning_content") or ""
            if choice["finish_reason"]:
                found["finish"][index] = choice["finish_reason"]
            for part in delta.get("tool_calls", ()):
                call = calls.setdefault(part["index"], ["", ""])
                call[0] += part["function"].get("name") or ""
                call[1] += part["function"].get("arguments") or ""
            for token in (choice.get("logprobs") or {}).get("content") or ():
                told += bytes(token["bytes"])
    found["calls"] = [[name, json.loads(arguments)] for _, (name, arguments) in sorted(calls.items())]
    found["text"] = [text for _, text in sorted(found["text"].items())]
    found["finish"] = [reason for _, reason in sorted(found["finish"].items())]
    return {**found, "logprobs": told.decode()}


def _response(frames: list[dict[str, Any]]) -> dict[str, Any]:
    text = "".join(frame["delta"] for frame in frames if frame["type"] == "response.output_text.delta")
    end = frames[-1]
    calls = [item for item in end["response"]["output"] if item["type"] == "function_call"]
    usage = end["response"].get("usage")
    return {
        "text": [text],
        "reasoning": "",
        "calls": [[call["name"], json.loads(call["arguments"])] for call in calls],
        "usage": usage and [usage["input_tokens"], usage["output_tokens"]],
        "finish": [end["type"].removeprefix("response.")],
        "error": end["type"] == "response.failed",
        "logprobs": "",
    }


def _frames(body: bytes) -> Iterator[dict[str, Any]]:
    """The events of a stream, by the rules of server-sent events; comments are passed over."""
    lines: list[str] = []
    text = body.decode().replace("\r\n", "\n").replace("\r", "\n")
    for line in text.split("\n"):
        name, _, value = line.partition(":")
        if name == "data":
            lines.append(value.removeprefix(" "))
        elif not line and lines:
            whole = "\n".join(lines)
            lines = []
            if whole != "[DONE]":
                yield json.loads(whole)
        else:
            assert name in ("", "event"), f"a field that clients break on: {name}"


@contextmanager
def replayed(wires: dict[str, Wire]) -> Iterator[str]:
    """Serve each wire at `URL/NAME/v1/...`, in pieces that are cut anywhere."""
    by_slug = {slug(name): wire for name, wire in wires.items()}

    class Replay(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            wire = by_slug[self.path.split("/")[1]]
            self.send_response(200)
            self.send_header("content-type", wire.content_type)
            self.send_header("connection", "close")
            self.end_headers()
            pieces = random.Random(0)
            at = 0
            while at < len(wire.body):
                size = pieces.randint(1, MAX_PIECE)
                self.wfile.write(wire.body[at : at + size])
                at += size

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Replay)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def slug(name: str) -> str:
    return name.replace(" ", "-")
