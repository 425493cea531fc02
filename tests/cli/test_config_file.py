"""The file of settings: where it is found, what is refused, and how that is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cli import config_file
from cli.settings_command import SERVICES
from tests.cli.conftest import Diffuse
from tests.cli.settings import parse, write_config


def refusal(diffuse: Diffuse, path: Path, *flags: str, command: str = "serve") -> str:
    """What a service that cannot start with this file says."""
    result = diffuse(command, "--config", str(path), *flags)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_reqests = 3", ":1: max_reqests: there is no such setting; did you mean max_requests?"),
        (
            "[serve]\nmax-requests = 3",
            ":2: [serve] max-requests: `diffuse serve` has no such setting; did you mean",
        ),
        ("[serv]\nport = 3", ":1: serv: there is no such table; did you mean serve?"),
        (
            "[host]\nmax_requests = 3",
            ":2: [host] max_requests: `diffuse host` has no such setting: it belongs to [serve]",
        ),
        ("serve = 3", ": serve: there is no such setting"),
        ('max_requests = "3"', ":1: max_requests: give a whole number, not a text"),
        ("max_requests = 3.5", ":1: max_requests: give a whole number, not a fraction"),
        ("max_requests = true", ":1: max_requests: give a whole number, not true or false"),
        ("listen = 8000", ":1: listen: give a text, not a number"),
        ('allow_open = "yes"', ":1: allow_open: give true or false, not a text"),
        ("api_keys = [1, 2]", ":1: api_keys: give an array of texts, not an array of something else"),
        ("drain = [1]", ":1: drain: give a number, or a text like 30s, not an array of something else"),
        ("drain = 2026-01-01", ":1: drain: give a number, or a text like 30s, not a date"),
        ("[serve]\n[serve.listen]\nx = 1", ": [serve] listen: give a text, not a table"),
        ("max_requests = ", "this is no TOML: Invalid value (at end of document)"),
        ("max_requests 3", "at line 1, column 14"),
        ("a = 1\na = 2", "Cannot overwrite a value"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_its_line(
    diffuse: Diffuse, tmp_path: Path, text: str, said: str
) -> None:
    path = write_config(tmp_path / "own.toml", text)
    told = refusal(diffuse, path)
    assert f"{path}{said}" in told or (str(path) in told and said in told)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('drain = "soon"', "diffuse: drain in {path}:1: 'soon': give a time like 30s, 5m or 1h"),
        ('max_body_bytes = "-1MB"', "diffuse: max_body_bytes in {path}:1: '-1MB': give a size like"),
        ('wire = "fp8"', "diffuse: wire in {path}:1: "),
        ("max_requests = 0", "diffuse: max_requests in {path}:1: Input should be greater than or equal to 1"),
        ('model_aliases = ["x"]', "diffuse: model_aliases in {path}:1: write aliases as alias=model"),
        ('listen = "nowhere"', "diffuse: listen in {path}:1: 'nowhere': give it as HOST:PORT"),
        ('local_layers = "x"', "diffuse: local_layers in {path}:1: "),
        ('node = ["x"]', "diffuse: node in {path}:1: "),
    ],
)
def test_a_value_that_cannot_be_is_told_by_its_key(
    diffuse: Diffuse, tmp_path: Path, text: str, said: str
) -> None:
    path = write_config(tmp_path / "own.toml", text)
    flags = () if text.startswith("node") else ("--node", f"{'ab' * 32}@127.0.0.1:7001")
    assert said.format(path=path) in refusal(diffuse, path, *flags)


def test_a_flag_that_is_wrong_keeps_its_name_beside_a_file(diffuse: Diffuse, tmp_path: Path) -> None:
    path = write_config(tmp_path / "own.toml", "max_requests = 3")
    flags = ["--node", f"{'ab' * 32}@127.0.0.1:7001", "--max-requests", "0"]
    assert "diffuse: --max-requests: Input should be" in refusal(diffuse, path, *flags)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_refused(diffuse: Diffuse, tmp_path: Path, mode: int) -> None:
    path = write_config(tmp_path / "own.toml", "max_requests = 3", mode)
    assert f"{path} can be written by others, who could change what runs: chmod go-w {path}" in refusal(
        diffuse, path
    )


def test_keys_that_others_may_read_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(tmp_path / "own.toml", '[serve]\napi_keys = ["s3cret"]', 0o644)
    parse("serve", "--config", str(path))
    assert f"holds keys, and others can read it: chmod 600 {path}" in capsys.readouterr().err
    path.chmod(0o600)
    parse("serve", "--config", str(path))
    write_config(path, "max_requests = 3", 0o644)
    parse("serve", "--config", str(path))
    assert capsys.readouterr().err == ""


def test_a_folder_is_no_file(diffuse: Diffuse, tmp_path: Path) -> None:
    assert f"{tmp_path}: Is a directory" in refusal(diffuse, tmp_path)


def test_a_file_that_is_not_there_is_missed_only_where_it_was_named(diffuse: Diffuse, tmp_path: Path) -> None:
    assert "No such file or directory: --config names no file" in refusal(diffuse, tmp_path / "gone.toml")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(diffuse: Diffuse, tmp_path: Path) -> None:
    assert "Permission denied" in refusal(diffuse, write_config(tmp_path / "own.toml", "", 0o000))


@pytest.mark.parametrize(
    "content",
    [
        b'\xef\xbb\xbfname = "\xe6\xa8\xa1\xe5\x9e\x8b"\r\n# \xc3\xa9\r\n[serve]\r\nmax_requests = 5\r\n',
        'name = "模型"\n[ serve ]\n"max_requests"=5\n'.encode(),
        'serve.max_requests = 5\nname = "模型"\n'.encode(),
    ],
)
def test_byte_order_marks_line_ends_and_other_alphabets_are_no_trouble(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "own.toml"
    path.write_bytes(content)
    path.chmod(0o600)
    params = parse("serve", "--config", str(path)).params
    assert (params["name"], params["max_requests"]) == ("模型", 5)


@pytest.mark.parametrize(
    "content", ["name = 'é'".encode("latin-1"), 'name = "x"'.encode("utf-16"), b"\xff\xfe\x00"]
)
def test_what_is_not_utf8_is_said_to_be_none(diffuse: Diffuse, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "own.toml"
    path.write_bytes(content)
    path.chmod(0o600)
    assert f"{path}:1: this is not UTF-8" in refusal(diffuse, path)


def test_lines_are_right_past_texts_of_several_lines(tmp_path: Path) -> None:
    text = 'name = """\nmax_requests = 1\n"""\napi_keys = [\n  "one",\n  "two",\n]\nmax_requests = 5\n'
    lines = config_file.read_config(
        write_config(tmp_path / "own.toml", text), "serve", {"serve": _options("serve")}
    )
    assert lines is not None
    assert lines.lines == {"name": 1, "api_keys": 4, "max_requests": 8}


def _options(command: str) -> dict[str, object]:
    from cli.settings_command import setting_options
    from tests.cli.settings import ROOT

    return dict(setting_options(ROOT.commands[command]))


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Path]:
    """This user's file and the machine's, neither of which is there."""
    monkeypatch.delenv("DIFFUSE_CONFIG", raising=False)
    places = tmp_path / "user" / "diffuse.toml", tmp_path / "etc" / "diffuse.toml"
    for place in places:
        place.parent.mkdir()
    monkeypatch.setattr(config_file, "search_path", lambda: places)
    return places


def test_the_users_file_counts_before_the_machines(
    found: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    users, machines = found
    assert parse("serve").params["max_requests"] == 32
    write_config(machines, "max_requests = 7\nmax_queued = 1")
    assert parse("serve").params["max_requests"] == 7
    write_config(users, "max_requests = 8")
    assert (parse("serve").params["max_requests"], parse("serve").params["max_queued"]) == (8, 64)
    assert parse("serve", "--config", str(machines)).params["max_requests"] == 7
    monkeypatch.setenv("DIFFUSE_CONFIG", str(machines))
    assert parse("serve").params["max_requests"] == 7
    assert parse("serve", "--config", "none").params["max_requests"] == 32


def test_a_folder_that_nobody_may_look_into_holds_no_file(
    found: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(found[1], "max_requests = 7")
    kept = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        if path == found[1]:
            raise PermissionError(13, "Permission denied")
        return kept(path)

    monkeypatch.setattr(Path, "lstat", lstat)
    assert parse("serve").params["max_requests"] == 32


def test_where_it_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/home/somebody/settings")
    users, machines = config_file.search_path()
    assert users.parts[-2:] == ("diffuse", "diffuse.toml")
    assert machines == Path("/etc/diffuse/diffuse.toml")


def test_whoever_asks_a_gateway_needs_not_read_the_machines_file(
    found: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    write_config(found[1], 'api_key = "x"')
    monkeypatch.setattr(config_file, "_read", refuse)
    assert parse("query", "--prompt", "Hi").params["api_key"] is None
    with pytest.raises(config_file.RefusedSettingsError, match="Permission denied"):
        parse("serve")


def test_the_key_of_whoever_asks_may_be_in_the_file(
    found: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(found[0], 'api_key = "from-file"\n[query]\napi_key = "for-queries"')
    assert parse("chat").params["api_key"] == "from-file"
    assert parse("query", "--prompt", "Hi").params["api_key"] == "for-queries"
    monkeypatch.setenv("DIFFUSE_API_KEY", "from-variable")
    assert parse("chat").params["api_key"] == "from-variable"


def test_whoever_looks_after_services_looks_where_they_keep_things(
    found: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(found[0], 'state_dir = "/kept"\nnetwork = "theirs"')
    monkeypatch.delenv("DIFFUSE_STATE_DIR")
    for command in ("host", "leave"):
        assert parse(command).params["state_dir"] == Path("/kept"), command
    assert parse("status").params["network"] == "diffuse", "a flag of one call"
    monkeypatch.setenv("DIFFUSE_TLS_CA", "/ca.pem")
    assert parse("query", "--prompt", "Hi").params["tls_ca"] == Path("/ca.pem")


@pytest.mark.parametrize("command", SERVICES)
def test_a_file_is_checked_as_a_whole_whoever_reads_it(
    diffuse: Diffuse, tmp_path: Path, command: str
) -> None:
    path = write_config(tmp_path / "own.toml", '[serve]\nmax_requests = "many"')
    assert f"{path}:2: [serve] max_requests: give a whole number" in refusal(diffuse, path, command=command)
