"""`diffuse config`, and what it shares with every service: names, masks, warnings, the example."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from app.settings import GatewaySettings
from cli import panels
from cli.serve import gateway_settings
from cli.setting_names import parameter_of
from cli.setting_rows import masked_url
from cli.settings_command import SERVICES
from node.settings import NodeSettings
from tests.cli.conftest import Diffuse
from tests.cli.settings import every_setting, option_of, parse, write_config

SECRET = "s3cret-and-long"


def settings_of(output: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(output)["settings"]}


# The flags and the models they fill --------------------------------------------------------------------------------


def test_every_field_of_the_gateways_settings_has_a_flag() -> None:
    flags = {name for command, name in every_setting() if command == "serve"}
    assert [name for name in GatewaySettings.model_fields if parameter_of(name) not in flags] == []


def test_a_gateway_without_flags_is_the_models_own_default() -> None:
    params = parse("serve").params
    assert gateway_settings(params) == GatewaySettings()


def test_a_node_without_flags_is_the_models_own_default() -> None:
    params = parse("host").params
    for name in ("overhead", "max_sessions", "drain_s", "hold_ends", "pad", "metrics_open"):
        assert params[parameter_of(name)] == NodeSettings.model_fields[name].default, name


@pytest.mark.parametrize(("command", "name"), every_setting())
def test_every_setting_stands_under_a_heading_and_is_explained(command: str, name: str) -> None:
    option = option_of(command, name)
    assert option.rich_help_panel in panels.PANELS
    assert option.help.endswith(".")


@pytest.mark.parametrize("name", sorted({name for _, name in every_setting()}))
def test_one_name_has_one_form_on_every_command(name: str) -> None:
    options = [option_of(command, name) for command, other in every_setting() if other == name]
    forms = {(option.is_bool_flag, option.metavar in ("TIME", "SIZE")) for option in options}
    assert len(forms) == 1


# What is shown -----------------------------------------------------------------------------------------------------


def test_it_tells_where_each_value_was_said(
    diffuse: Diffuse, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = write_config(tmp_path / "own.toml", 'max_queued = 3\n[serve]\nqueue_timeout = "1m"')
    monkeypatch.setenv("DIFFUSE_MAX_CHOICES", "2")
    result = diffuse("config", "serve", "--config", str(path), "--max-requests", "8")
    assert result.exit_code == 0, result.stderr
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert f"file: {path}" in lines
    assert "max_requests 8 --max-requests" in lines
    assert "max_choices 2 DIFFUSE_MAX_CHOICES" in lines
    assert f"queue_timeout 1m {path}:3" in lines
    assert f"max_queued 3 {path}:1" in lines
    assert "max_body_bytes 32MiB default" in lines
    assert "public_addr - default" in lines


def test_as_json_it_tells_values_as_they_count(diffuse: Diffuse) -> None:
    result = diffuse("config", "serve", "--json", "--queue-timeout", "5m", "--max-body-bytes", "1KiB")
    rows = settings_of(result.stdout)
    assert rows["queue_timeout"] == {
        "name": "queue_timeout",
        "panel": "Deadlines",
        "value": 300.0,
        "source": "flag",
        "place": "--queue-timeout",
    }
    assert rows["max_body_bytes"]["value"] == 1024
    assert rows["state"] == {
        "name": "state",
        "panel": "Storage",
        "value": None,
        "source": "default",
        "place": "",
    }


def test_without_a_name_it_shows_every_service(diffuse: Diffuse) -> None:
    told = json.loads(diffuse("config", "--json").stdout)
    assert [one["command"] for one in told["commands"]] == list(SERVICES)
    text = diffuse("config").stdout
    assert [text.index(f"[{name}]") for name in SERVICES] == sorted(
        text.index(f"[{name}]") for name in SERVICES
    )
    for flags, said in (
        (["--open-any"], "come behind it"),
        (["--max-hops", "3"], "come behind it"),
    ):
        result = diffuse("config", *flags)
        assert result.exit_code == 2
        assert said in " ".join(result.stderr.replace("│", " ").split())


def test_secrets_are_hidden_wherever_they_come_from(
    diffuse: Diffuse, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state = f"redis://user:{SECRET}@redis:6379/0?password={SECRET}"
    path = write_config(tmp_path / "own.toml", f'state = "{state}"\n')
    monkeypatch.setenv("DIFFUSE_API_KEYS", f"{SECRET}, {SECRET}2")
    monkeypatch.setenv("DIFFUSE_TRACES", f"https://{SECRET}@traces.example/v1")
    flags = ["config", "serve", "--config", str(path)]
    for result in (diffuse(*flags), diffuse(*flags, "--json")):
        assert result.exit_code == 0
        assert SECRET not in result.output
    rows = settings_of(diffuse(*flags, "--json").stdout)
    assert rows["api_keys"]["value"] == ["***", "***"]
    assert rows["state"]["value"] == "redis://***@redis:6379/0?***"
    assert rows["traces"]["value"] == "https://***@traces.example/v1"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host", "redis://host"),
        ("redis://:p@host:1/2", "redis://***@host:1/2"),
        ("sqlite:////var/lib/x.sqlite", "sqlite:////var/lib/x.sqlite"),
        ("redis://a@b:c@host", "redis://***@host"),
        ("redis://[::1/", "***"),
    ],
)
def test_of_a_url_only_what_lets_one_in_is_hidden(url: str, shown: str) -> None:
    assert masked_url(url) == shown


def test_wrong_keys_and_urls_are_never_told_back(diffuse: Diffuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFUSE_API_KEYS", f"{SECRET} with blanks")
    result = diffuse("config", "serve")
    assert result.exit_code == 2
    assert "diffuse: DIFFUSE_API_KEYS: an API key is ASCII without spaces" in result.stderr
    assert SECRET not in result.output


def test_what_a_service_would_refuse_it_refuses(diffuse: Diffuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFUSE_MAX_REQUESTS", "0")
    result = diffuse("config", "serve")
    assert result.exit_code == 2
    assert "diffuse: DIFFUSE_MAX_REQUESTS: Input should be greater than or equal to 1" in result.stderr
    result = diffuse("config", "host", "--overhead", "1.5")
    assert (result.exit_code, "--overhead: Input should be less than" in result.stderr) == (2, True)
    result = diffuse("config", "serv")
    assert result.exit_code == 2
    assert "choose from serve, host, sentinel, up" in result.stderr


# Variables that nothing reads --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("DIFFUSE_MAX_REQEUSTS", "DIFFUSE_MAX_REQUESTS"),
        ("DIFFUSE_APIKEYS", "DIFFUSE_API_KEYS"),
        ("DIFFUSE_KEEPALIVE_S", "DIFFUSE_KEEPALIVE"),
        ("DIFFUSE_STAT_DIR", "DIFFUSE_STATE_DIR"),
    ],
)
def test_a_misspelled_variable_is_told(
    variable: str, meant: str, diffuse: Diffuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, SECRET)
    for command in ("serve", "host"):
        said = diffuse("config", command).stderr
        assert f"diffuse: {variable} is no setting and does nothing; did you mean {meant}?" in said
        assert said.count(variable) == 1
        assert SECRET not in said


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DIFFUSE_METRICS", "127.0.0.1:1"),  # of another command
        ("DIFFUSE_API_KEY", "x"),  # of clients
        ("DIFFUSE_DEBUG", "1"),
        ("DIFFUSE_NOTHING", ""),
        ("DIFFUSE_GATEWAY_PORT", "tcp://10.0.0.1:80"),
        ("DIFFUSE_GATEWAY_PORT_80_TCP_ADDR", "10.0.0.1"),
        ("DIFFUSE_GATEWAY_SERVICE_HOST", "10.0.0.1"),
        ("DIFFUSE_GATEWAY_SERVICE_PORT_HTTP", "80"),
    ],
)
def test_other_variables_are_no_trouble(
    variable: str, value: str, diffuse: Diffuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert diffuse("config", "serve").stderr == ""


# The example -------------------------------------------------------------------------------------------------------


def test_the_example_holds_every_setting_and_changes_nothing(diffuse: Diffuse, tmp_path: Path) -> None:
    text = diffuse("config", "--example").stdout
    tables = tomllib.loads(re.sub(r"(?m)^#(\w+ = )", r"\1", text))
    assert {(table, name) for table, names in tables.items() for name in names} == set(every_setting())
    path = write_config(tmp_path / "own.toml", text)
    for command in SERVICES:
        params = parse(command, "--config", str(path)).params
        assert params | {"config": Path("none")} == parse(command).params
    assert max(map(len, text.splitlines())) <= 120


def test_every_value_of_the_example_may_be_used(diffuse: Diffuse, tmp_path: Path) -> None:
    text = re.sub(r"(?m)^#(\w+ = )", r"\1", diffuse("config", "--example").stdout)
    path = write_config(tmp_path / "own.toml", text)
    for command in SERVICES:
        parse(command, "--config", str(path))
