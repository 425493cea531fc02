"""`query` against a gateway: the answer, the numbers, and every way it can go wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Diffuse, FakeGateway


def test_the_answer_goes_to_stdout_and_the_timings_to_stderr(diffuse: Diffuse, gateway: FakeGateway) -> None:
    gateway.says("Hel", "lo.", timings={"prefill_s": 0.5, "decode_s": 0.02, "compute_s": 0.4, "tokens": 2})
    result = diffuse("query", "--prompt", "Hi", "--url", gateway.url)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "Hello.\n"
    assert result.stderr.count("\n") == 1
    assert "prefill 500 ms | per token 20 ms (50.0 tokens/s) | compute 400 ms | 2 tokens" in result.stderr


def test_json_prints_text_usage_and_timings_as_one_object(diffuse: Diffuse, gateway: FakeGateway) -> None:
    gateway.says("Hel", "lo.", timings={"compute_s": 0.4, "network_s": 0.1, "crypto_s": 0.01})
    result = diffuse("query", "--prompt", "Hi", "--url", gateway.url, "--json")
    told = json.loads(result.stdout)
    assert told["text"] == "Hello."
    assert told["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
    }
    assert told["timings"]["network_s"] == 0.1
    assert told["model"] == "tiny"


def test_what_was_asked_reaches_the_gateway(diffuse: Diffuse, gateway: FakeGateway) -> None:
    gateway.says("ok")
    options = ["--max-tokens", "7", "--temperature", "0", "--seed", "3", "--system", "Be brief"]
    options += ["--draft", "lookup"]
    diffuse("query", "--prompt", "-", "--url", gateway.url, "--api-key", "k1", *options, stdin="from stdin")
    asked = gateway.requests[0]
    assert asked["messages"] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "from stdin"},
    ]
    assert (asked["max_tokens"], asked["temperature"], asked["seed"], asked["stream"]) == (7, 0.0, 3, True)
    assert asked["diffuse"] == {"draft": "lookup"}
    assert gateway.headers[-1]["Authorization"] == "Bearer k1"


def test_an_unset_choice_is_left_to_the_gateway(diffuse: Diffuse, gateway: FakeGateway) -> None:
    gateway.says("ok")
    diffuse("query", "--prompt", "Hi", "--url", gateway.url)
    assert not {"max_tokens", "temperature", "seed", "diffuse"} & gateway.requests[0].keys()


def test_an_error_inside_the_stream_fails_with_its_message(diffuse: Diffuse, gateway: FakeGateway) -> None:
    gateway.events = [{"error": {"message": "no node serves layers 11:21", "type": "server_error"}}]
    result = diffuse("query", "--prompt", "Hi", "--url", gateway.url)
    assert result.exit_code == 1
    assert result.stderr == "diffuse: no node serves layers 11:21\n"


def test_a_stream_without_a_finish_is_no_answer(diffuse: Diffuse, gateway: FakeGateway) -> None:
    gateway.says("half", finish_reason=None)
    result = diffuse("query", "--prompt", "Hi", "--url", gateway.url)
    assert result.exit_code == 1
    assert "cut short" in result.stderr
    assert result.stdout == "half\n"  # what is said next begins on a line of its own


def test_a_refused_question_prints_no_answer_at_all(diffuse: Diffuse, gateway: FakeGateway) -> None:
    gateway.status, gateway.error = 400, {"message": "too long"}
    result = diffuse("query", "--prompt", "Hi", "--url", gateway.url, "--model", "tiny")
    assert (result.exit_code, result.stdout) == (1, "")


def test_a_refusal_names_the_reason_and_the_key(diffuse: Diffuse, gateway: FakeGateway) -> None:
    gateway.status, gateway.error = 401, {"message": "Incorrect API key provided", "code": "invalid_api_key"}
    result = diffuse("query", "--prompt", "Hi", "--url", gateway.url, "--model", "tiny")
    assert result.exit_code == 1
    assert "Incorrect API key provided (give the key with --api-key or DIFFUSE_API_KEY)" in result.stderr


def test_nothing_listening_says_what_to_start(diffuse: Diffuse) -> None:
    result = diffuse("query", "--prompt", "Hi", "--url", "http://127.0.0.1:1/v1")
    assert result.exit_code == 1
    assert "diffuse up" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_gateway_that_speaks_no_tls_is_called_so(diffuse: Diffuse, gateway: FakeGateway) -> None:
    result = diffuse("query", "--prompt", "Hi", "--url", gateway.url.replace("http:", "https:"))
    assert "no link to the gateway at https://" in result.stderr
    assert "it speaks no TLS: write http://" in result.stderr


def test_a_server_that_is_no_gateway_is_called_so(diffuse: Diffuse, gateway: FakeGateway) -> None:
    gateway.models = []
    result = diffuse("query", "--prompt", "Hi", "--url", gateway.url)
    assert result.exit_code == 1
    assert "lists no model" in result.stderr


def test_a_traceback_shows_only_on_demand(
    diffuse: Diffuse, gateway: FakeGateway, monkeypatch: object
) -> None:
    gateway.events = [{"error": {"message": "broken"}}]
    result = diffuse.runner.invoke(
        __import__("cli.main", fromlist=["app"]).app,
        ["query", "--prompt", "Hi", "--url", gateway.url],
        env={"DIFFUSE_DEBUG": "1"},
    )
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("diffuse: broken\n")


def test_usage_errors_exit_with_2(diffuse: Diffuse) -> None:
    for arguments in (
        ["query"],
        ["query", "--prompt", "  "],
        ["query", "--prompt", "x", "--temperature", "3"],
        ["query", "--prompt", "x", "--url", "http://x", "--node", "y"],
        ["query", "--prompt", "x", "--local-layers", "one"],
        ["nonsense"],
    ):
        assert diffuse(*arguments).exit_code == 2, arguments


def test_a_raw_prompt_needs_the_engine(diffuse: Diffuse, gateway: FakeGateway) -> None:
    result = diffuse("query", "--prompt", "Once upon", "--raw", "--url", gateway.url)
    assert result.exit_code == 1
    assert "--raw needs --node" in result.stderr


def test_a_node_address_that_is_none_is_refused(diffuse: Diffuse) -> None:
    result = diffuse("query", "--prompt", "Hi", "--node", "127.0.0.1:9000")
    assert result.exit_code == 1
    assert "id@host:port" in result.stderr


def test_pictures_and_recordings_go_along_as_parts(
    diffuse: Diffuse, gateway: FakeGateway, tmp_path: Path
) -> None:
    gateway.says("a fox")
    files = {"a.png": b"\x89PNG", "b.wav": b"RIFF", "c.mp3": b"ID3"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    options = ["--image", str(tmp_path / "a.png")]
    options += ["--audio", str(tmp_path / "b.wav"), "--audio", str(tmp_path / "c.mp3")]
    diffuse("query", "--prompt", "What is it?", "--url", gateway.url, *options)
    picture, *recordings, text = gateway.requests[0]["messages"][0]["content"]
    assert picture == {"type": "image_url", "image_url": {"url": "data:;base64,iVBORw=="}}
    assert [part["input_audio"]["format"] for part in recordings] == ["wav", "mp3"]
    assert text == {"type": "text", "text": "What is it?"}


@pytest.mark.parametrize("flag", ["--image", "--audio"])
def test_a_file_that_is_not_there_is_named(diffuse: Diffuse, gateway: FakeGateway, flag: str) -> None:
    result = diffuse("query", "--prompt", "Hi", "--url", gateway.url, flag, "/nowhere/a.png")
    assert result.exit_code == 1
    assert result.stderr == "diffuse: /nowhere/a.png cannot be read: No such file or directory\n"
    assert gateway.requests == []


def test_a_file_that_no_gateway_takes_is_not_read(
    diffuse: Diffuse, gateway: FakeGateway, tmp_path: Path
) -> None:
    with (tmp_path / "huge.wav").open("wb") as file:
        file.truncate(2 << 30)
    result = diffuse("query", "--prompt", "Hi", "--url", gateway.url, "--audio", str(tmp_path / "huge.wav"))
    assert result.exit_code == 1
    assert "larger than 23 MiB" in result.stderr


def test_a_raw_prompt_has_no_place_for_pictures(
    diffuse: Diffuse, gateway: FakeGateway, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    result = diffuse(
        "query", "--prompt", "Hi", "--raw", "--url", gateway.url, "--image", str(tmp_path / "a.png")
    )
    assert result.exit_code == 2
