"""A command runner, and a gateway that speaks the real protocol and says what a test wants."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from cli.children import thread_environment
from cli.main import app
from tests.support.log_lines import unchanged_logging


@dataclass
class FakeGateway:
    """What the fake answers, and what it was asked."""

    url: str = ""
    models: list[dict[str, Any]] = field(default_factory=lambda: [{"id": "tiny", "status": "ready"}])
    events: list[Any] = field(default_factory=list)
    status: int = 200
    error: dict[str, Any] | None = None
    hold: bool = False  # stop behind the first event until `release` is set
    release: threading.Event = field(default_factory=threading.Event)
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def says(
        self,
        *texts: str,
        finish_reason: str | None = "stop",
        first: dict[str, Any] | None = None,
        **last: Any,
    ) -> None:
        """Answer with these texts, then a finish and a usage chunk; extra fields for the first and last chunk."""
        self.events = [_chunk(text) for text in texts]
        self.events[0] |= first or {}
        if finish_reason:
            self.events.append(_chunk("", finish_reason))
        usage = {"prompt_tokens": 5, "completion_tokens": len(texts), "total_tokens": 5 + len(texts)}
        self.events += [{"choices": [], "usage": usage, **last}, "[DONE]"]


def _chunk(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    delta = {"content": text} if text else {}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}], "usage": None}


@pytest.fixture(autouse=True)
def _logging() -> Iterator[None]:
    """Commands that run in this process configure logging for all of it."""
    with unchanged_logging():
        yield


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    fake = FakeGateway()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_for(fake))
    fake.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield fake
    server.shutdown()
    server.server_close()
    thread.join()


@dataclass
class Diffuse:
    """Runs the command line in this process."""

    runner: CliRunner = field(default_factory=CliRunner)

    def __call__(self, *arguments: str, stdin: str | None = None) -> Result:
        return self.runner.invoke(app, list(arguments), input=stdin)


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands of tests neither see nor touch what the user of this machine runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIFFUSE_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def diffuse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Diffuse:
    monkeypatch.setenv("DIFFUSE_STATE_DIR", str(tmp_path / "state"))
    for name in ("DIFFUSE_API_KEY", "DIFFUSE_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    for name in thread_environment(1):
        monkeypatch.setenv(name, "1")  # commands set these for their process, which here is everybody's
    return Diffuse()


def _handler_for(fake: FakeGateway) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            fake.headers.append(dict(self.headers))
            self._reply_json({"object": "list", "data": fake.models})

        def do_POST(self) -> None:
            fake.headers.append(dict(self.headers))
            fake.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if fake.error is not None:
                self._reply_json({"error": fake.error})
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.end_headers()
            self.wfile.write(b": alive\n\n")
            for event in fake.events:
                text = event if isinstance(event, str) else json.dumps(event)
                try:
                    self.wfile.write(f"data: {text}\n\n".encode())
                except OSError:
                    return  # the client has left
                if fake.hold:
                    fake.release.wait(30)

        def _reply_json(self, value: dict[str, Any]) -> None:
            body = json.dumps(value).encode()
            self.send_response(fake.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            """Quiet."""

    return Handler
