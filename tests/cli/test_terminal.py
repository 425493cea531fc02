"""`chat` at a terminal, as a person uses it: a pseudo-terminal, keys pressed, the screen read."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cli.children import own_command
from tests.cli.conftest import FakeGateway

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs pseudo-terminals")

CTRL_C, CTRL_D = b"\x03", b"\x04"


class Terminal:
    """A process behind a pseudo-terminal."""

    def __init__(self, arguments: list[str]) -> None:
        import fcntl
        import pty
        import struct
        import termios

        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))

        def take_terminal() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            own_command(arguments),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            preexec_fn=take_terminal,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "60"},
        )
        os.close(slave)
        self.screen = ""

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def wait_for(self, pattern: str, timeout_s: float = 15.0) -> str:
        """Read until the text since the last call matches; returns what was read."""
        deadline = time.monotonic() + timeout_s
        seen = ""
        while not re.search(pattern, seen, re.DOTALL):
            readable, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, f"{pattern!r} did not come; the screen shows {seen!r}"
            try:
                seen += os.read(self._master, 65536).decode(errors="replace")
            except OSError:  # the other side has closed
                assert re.search(pattern, seen, re.DOTALL), seen
        self.screen += seen
        return seen

    def insist(self, keys: bytes, pattern: str) -> None:
        """Press until it helps: a signal between two waits of readline shows only with the next one."""
        for _ in range(10):
            self.press(keys)
            with suppress(AssertionError):
                self.wait_for(pattern, timeout_s=1.5)
                return
        pytest.fail(f"{pattern!r} did not come")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def chat(gateway: FakeGateway) -> Iterator[Terminal]:
    terminal = Terminal(["chat", "--url", gateway.url])
    yield terminal
    terminal.close()


def test_an_answer_comes_with_live_numbers_and_control_d_leaves(chat: Terminal, gateway: FakeGateway) -> None:
    gateway.says("One two", " three.", timings={"compute_s": 0.2, "network_s": 0.1, "tokens": 2})
    chat.wait_for("> ")
    chat.press(b"Count\r")
    assert "One two three." in chat.wait_for(r"total .*compute 200 ms.*> ")
    chat.press(CTRL_D)
    assert chat.process.wait(10) == 0


def test_control_c_stops_the_answer_and_not_the_session(chat: Terminal, gateway: FakeGateway) -> None:
    gateway.hold = True
    gateway.says("Half", " an answer")
    chat.wait_for("> ")
    chat.press(b"Talk\r")
    chat.wait_for("Half")
    chat.press(CTRL_C)
    chat.wait_for("stopped.*> ")
    gateway.hold = False
    gateway.release.set()
    gateway.says("Whole.")
    chat.press(b"Again\r")
    chat.wait_for(r"Whole\.")
    assert [message["content"] for message in gateway.requests[-1]["messages"]] == ["Talk", "Half", "Again"]


def test_control_c_at_the_prompt_clears_the_line(chat: Terminal, gateway: FakeGateway) -> None:
    gateway.says("ok")
    chat.wait_for("> ")
    chat.press(b"never sent")
    chat.wait_for("never sent")
    chat.insist(CTRL_C, "Ctrl\\+D leaves.*> ")
    chat.press(b"sent\r")
    chat.wait_for("ok")
    assert [message["content"] for message in gateway.requests[0]["messages"]] == ["sent"]


def test_a_failed_turn_is_reported_and_the_session_goes_on(chat: Terminal, gateway: FakeGateway) -> None:
    gateway.events = [{"error": {"message": "no node serves layers 1:11"}}]
    chat.wait_for("> ")
    chat.press(b"Hi\r")
    chat.wait_for("no node serves layers 1:11.*> ")
    gateway.says("Back.")
    chat.press(b"Hi again\r")
    chat.wait_for("Back.")
    assert [message["content"] for message in gateway.requests[-1]["messages"]] == ["Hi again"]


def test_a_closed_terminal_ends_the_process(chat: Terminal) -> None:
    chat.wait_for("> ")
    chat.process.send_signal(signal.SIGHUP)
    assert chat.process.wait(10) != 0


def test_a_picture_goes_with_the_next_message_and_stays_in_the_conversation(
    chat: Terminal, gateway: FakeGateway, tmp_path: Path
) -> None:
    gateway.says("A fox.")
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    chat.wait_for("> ")
    chat.press(b"/image /nowhere.png\r")
    chat.wait_for("cannot be read.*> ")
    chat.press(f"/image {tmp_path / 'a.png'}\r".encode())
    chat.wait_for("next message.*> ")
    for text in (b"What is it?\r", b"And now?\r"):
        chat.press(text)
        chat.wait_for("A fox.*total.*> ")
    first, _, second = gateway.requests[1]["messages"]
    assert [part["type"] for part in first["content"]] == ["image_url", "text"]
    assert second["content"] == "And now?"
