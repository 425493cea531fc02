"""Every setting of every service: a flag counts before a variable, that before the file, that before the default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cli.setting_names import variable_of
from cli.setting_rows import rows_of
from tests.cli.settings import every_setting, option_of, parse, values_for, write_config


def told(ctx: Any, name: str) -> tuple[Any, str, str]:
    """A setting's value, source and place."""
    row = next(row for row in rows_of(ctx) if row.name == name)
    return ctx.params[name], row.source, row.place


@pytest.mark.parametrize(("command", "name"), every_setting())
def test_flag_variable_file_default(
    command: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    option = option_of(command, name)
    monkeypatch.delenv(variable_of(name), raising=False)
    monkeypatch.setenv("DIFFUSE_CONFIG", "none")
    flag, variable, filed = values_for(option)
    assert told(parse(command), name)[1:] == ("default", "")

    config = write_config(tmp_path / "own.toml", f"\n[{command}]\n{name} = {filed.toml}\n")
    from_file = ["--config", str(config)]
    assert told(parse(command, *from_file), name) == (filed.value, "file", f"{config}:3")

    monkeypatch.setenv(variable_of(name), variable.variable)
    assert told(parse(command, *from_file), name) == (variable.value, "variable", variable_of(name))

    with_flag = told(parse(command, *from_file, *flag.flags), name)
    assert (list(with_flag[0]) if option.multiple else with_flag[0]) == flag.value
    assert with_flag[1:] == ("flag", f"--{name.replace('_', '-')}")


@pytest.mark.parametrize(("command", "name"), every_setting())
def test_flag_variable_and_key_are_one_name(command: str, name: str) -> None:
    option = option_of(command, name)
    assert option.opts == [f"--{name.replace('_', '-')}"]
    assert option.envvar == f"DIFFUSE_{name.upper()}"


def test_a_key_at_the_top_counts_for_every_command_that_knows_it_and_less_than_in_a_table(
    tmp_path: Path,
) -> None:
    config = write_config(
        tmp_path / "own.toml", 'log_level = "info"\nmax_requests = 5\n[host]\nlog_level = "error"\n'
    )
    flags = ["--config", str(config)]
    assert told(parse("serve", *flags), "log_level") == ("info", "file", f"{config}:1")
    assert told(parse("sentinel", *flags), "log_level")[0] == "info"
    assert told(parse("host", *flags), "log_level") == ("error", "file", f"{config}:4")
    assert told(parse("serve", *flags), "max_requests")[0] == 5


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFUSE_MAX_REQUESTS", "")
    assert told(parse("serve"), "max_requests") == (32, "default", "")


def test_a_variable_or_file_may_say_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DIFFUSE_KEY", "~/node.key")
    config = write_config(tmp_path / "own.toml", 'psk_file = "~/psk"\n')
    params = parse("host", "--config", str(config), "--owner-key", "~/kept").params
    assert (params["key"], params["psk_file"]) == (tmp_path / "node.key", tmp_path / "psk")
    assert params["owner_key"] == Path("~/kept"), "what a shell leaves is meant"


def test_a_model_may_have_a_comma_in_its_name_as_a_flag() -> None:
    assert parse("serve", "--model", "/models/a,b").params["model"] == ["/models/a,b"]


@pytest.mark.parametrize(("text", "value"), [('"smollm2"', ["smollm2"]), ('["a", "b"]', ["a", "b"])])
def test_one_text_will_do_for_a_list_in_the_file(text: str, value: list[str], tmp_path: Path) -> None:
    config = write_config(tmp_path / "own.toml", f"[serve]\nmodel = {text}\n")
    assert parse("serve", "--config", str(config)).params["model"] == value


@pytest.mark.parametrize("number", ["30", "30.0", '"30"', '"30s"', '"0.5m"', '"30 s"'])
def test_a_time_in_the_file_is_a_number_or_a_text(number: str, tmp_path: Path) -> None:
    config = write_config(tmp_path / "own.toml", f"queue_timeout = {number}\n")
    assert parse("serve", "--config", str(config)).params["queue_timeout"] == 30.0
