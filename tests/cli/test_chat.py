"""`chat` with its input from a pipe; the terminal itself is tried in test_terminal.py."""

from __future__ import annotations

from tests.cli.conftest import Diffuse, FakeGateway


def roles_and_texts(request: dict[str, object]) -> list[tuple[str, str]]:
    messages = request["messages"]
    assert isinstance(messages, list)
    return [(message["role"], message["content"]) for message in messages]


def test_each_line_is_a_turn_and_the_conversation_is_remembered(
    diffuse: Diffuse, gateway: FakeGateway
) -> None:
    gateway.says("Hello.")
    result = diffuse("chat", "--url", gateway.url, "--system", "Be brief", stdin="Hi\n\nAnd now?\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "Hello.\nHello.\n"
    assert roles_and_texts(gateway.requests[1]) == [
        ("system", "Be brief"),
        ("user", "Hi"),
        ("assistant", "Hello."),
        ("user", "And now?"),
    ]


def test_reset_forgets_what_was_said_but_not_the_system_message(
    diffuse: Diffuse, gateway: FakeGateway
) -> None:
    gateway.says("Hello.")
    diffuse("chat", "--url", gateway.url, "--system", "Be brief", stdin="Hi\n/reset\nAgain\n")
    assert roles_and_texts(gateway.requests[1]) == [("system", "Be brief"), ("user", "Again")]


def test_help_asks_nobody(diffuse: Diffuse, gateway: FakeGateway) -> None:
    result = diffuse("chat", "--url", gateway.url, stdin="/help\n")
    assert "Ctrl+D" in result.stderr
    assert gateway.requests == []


def test_a_failed_turn_from_a_pipe_fails_the_command(diffuse: Diffuse, gateway: FakeGateway) -> None:
    gateway.events = [{"error": {"message": "no node serves layers 1:11"}}]
    result = diffuse("chat", "--url", gateway.url, stdin="Hi\nMore\n")
    assert result.exit_code == 1
    assert result.stderr.endswith("diffuse: no node serves layers 1:11\n")
    assert len(gateway.requests) == 1


def test_nothing_listening_says_so_before_the_first_line(diffuse: Diffuse) -> None:
    result = diffuse("chat", "--url", "http://127.0.0.1:1/v1", stdin="Hi\n")
    assert result.exit_code == 1
    assert "diffuse up" in result.stderr
