"""`doctor` and `models`: files, ports and gateways of this machine."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.cli.conftest import Diffuse, FakeGateway


@pytest.fixture(autouse=True)
def no_default_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("cli.keys.default_key_path", lambda: tmp_path / "none.key")


def findings(stdout: str) -> dict[str, tuple[str, str]]:
    return {entry["subject"]: (entry["level"], entry["text"]) for entry in json.loads(stdout)["findings"]}


def test_a_quiet_machine_is_healthy(diffuse: Diffuse) -> None:
    result = diffuse("doctor", "--port", "0")
    assert result.exit_code == 0, result.stdout
    assert "torch 2" in result.stdout


def test_a_free_port_is_said_to_be_free(diffuse: Diffuse) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert findings(diffuse("doctor", "--port", str(port), "--json").stdout)[f"port {port}"][0] == "ok"


def test_a_gateway_on_the_port_is_recognised(diffuse: Diffuse, gateway: FakeGateway) -> None:
    port = gateway.url.split(":")[2].split("/")[0]
    result = diffuse("doctor", "--port", port, "--json")
    assert result.exit_code == 0
    assert findings(result.stdout)[f"gateway {gateway.url}"] == ("ok", "serves tiny")


def test_another_program_on_the_port_is_a_problem(diffuse: Diffuse, gateway: FakeGateway) -> None:
    gateway.status = 404
    port = gateway.url.split(":")[2].split("/")[0]
    result = diffuse("doctor", "--port", port, "--json")
    assert result.exit_code == 1
    assert findings(result.stdout)[f"port {port}"][0] == "problem"


def test_a_port_that_is_none_is_a_usage_error(diffuse: Diffuse) -> None:
    assert diffuse("doctor", "--port", "70000").exit_code == 2


def test_a_model_that_cannot_be_opened_is_a_problem(diffuse: Diffuse) -> None:
    result = diffuse("doctor", "--port", "0", "--model", "nosuchmodel", "--json")
    assert result.exit_code == 1
    assert findings(result.stdout)["--model"][0] == "problem"


def test_models_fails_when_a_node_does_not_answer(diffuse: Diffuse) -> None:
    result = diffuse("models", "--node", f"{'ab' * 32}@127.0.0.1:1")
    assert result.exit_code == 1
    assert "node abababab at 127.0.0.1:1" in result.stderr


def test_the_key_that_others_can_read_is_named(diffuse: Diffuse, tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    diffuse("keys", "new", str(path))
    path.chmod(0o604)
    result = diffuse("doctor", "--port", "0", "--key", str(path))
    assert result.exit_code == 1
    assert f"chmod 600 {path}" in result.stdout


def test_a_gateway_that_misses_layers_is_a_problem_with_their_numbers(
    diffuse: Diffuse, gateway: FakeGateway
) -> None:
    gateway.models = [{"id": "tiny", "status": "partial", "missing_layers": [[11, 21]]}]
    result = diffuse("doctor", "--url", gateway.url)
    assert result.exit_code == 1
    assert "tiny: partial: no node serves layers 11:21" in result.stdout


def test_models_lists_what_a_gateway_lists(diffuse: Diffuse, gateway: FakeGateway) -> None:
    gateway.models = [{"id": "tiny", "status": "ready", "max_model_len": 2048}]
    assert "tiny" in diffuse("models", "--url", gateway.url).stdout
    assert json.loads(diffuse("models", "--url", gateway.url, "--json").stdout)["data"] == gateway.models


def test_models_says_when_nothing_listens(diffuse: Diffuse) -> None:
    result = diffuse("models", "--url", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert "no gateway answers at http://127.0.0.1:1/v1" in result.stderr
