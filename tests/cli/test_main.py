"""The console script itself: help, version, start-up time, broken pipes, interrupts."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from cli.children import own_command
from cli.main import main
from tests.cli.conftest import Diffuse, FakeGateway

COMMANDS = (
    "up",
    "query",
    "chat",
    "host",
    "serve",
    "sentinel",
    "status",
    "models",
    "doctor",
    "leave",
    "bench",
    "config",
)
HEAVY = ("torch", "transformers", "fastapi", "pydantic", "httpx", "numpy")


def test_every_command_has_help(diffuse: Diffuse) -> None:
    for command in (*COMMANDS, "keys"):
        assert diffuse(command, "--help").exit_code == 0, command
    for action in ("new", "show", "rotate", "guest"):
        assert diffuse("keys", action, "--help").exit_code == 0, action


def test_the_version_is_printed(diffuse: Diffuse) -> None:
    assert diffuse("--version").stdout.startswith("diffuse ")


def test_the_thin_mode_says_who_reads_what(diffuse: Diffuse) -> None:
    for command in ("up", "serve", "query"):
        told = " ".join(diffuse(command, "--help").stdout.replace("│", " ").split())
        assert "the first node reads the token ids of the prompt and the last node reads the answer" in told


def test_help_imports_nothing_heavy() -> None:
    code = f"import sys, cli.main; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", [[], ["serve"], ["up"], ["config"]])
def test_help_of_a_command_imports_nothing_heavy(command: list[str]) -> None:
    code = (
        "import sys, atexit; from cli.main import main; sys.argv = ['diffuse', *sys.argv[1:], '--help']; "
        f"atexit.register(lambda: print([n for n in {HEAVY} if n in sys.modules], file=sys.stderr)); main()"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("command", ["serve", "host", "sentinel", "up"])
def test_help_can_be_read_in_80_columns(
    diffuse: Diffuse, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = diffuse(command, "--help").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines), "a word that does not fit is cut"


def processor_s(command: Sequence[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("command", [[], ["serve"]])
def test_help_takes_little_more_than_what_reads_the_flags(command: list[str]) -> None:
    """Processor time, since other jobs may share the machine, against that of Python with typer on the same."""
    flags = min(processor_s([sys.executable, "-c", "import asyncio, typer"]) for _ in range(2))
    assert min(processor_s(own_command([*command, "--help"])) for _ in range(2)) < 6 * flags


def test_folders_named_like_our_packages_do_not_confuse_children(tmp_path: Path) -> None:
    for name in ("cli", "node", "app"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('wrong package')")
    done = subprocess.run(
        own_command(["--version"]), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_leaves_early_causes_no_traceback(gateway: FakeGateway) -> None:
    gateway.says(*["x" * 4096] * 200)
    command = own_command(["query", "--prompt", "Hi", "--url", gateway.url])
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read()
    assert said == b""
    assert process.returncode == 1


@pytest.mark.skipif(os.name != "posix", reason="closes a descriptor before the start")
@pytest.mark.parametrize("arguments", [["chat"], ["query", "--prompt", "-"]])
def test_a_closed_standard_input_is_an_empty_one(gateway: FakeGateway, arguments: list[str]) -> None:
    command = own_command([*arguments, "--url", gateway.url])
    closed = ["sh", "-c", 'exec "$@" <&-', "sh", *command]
    done = subprocess.run(closed, capture_output=True, text=True, check=False)
    assert "fault of ours" not in done.stderr
    assert gateway.requests == []


@pytest.mark.skipif(os.name != "posix", reason="sends signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_ended_query_leaves_the_code_shells_expect_and_no_traceback(
    gateway: FakeGateway, number: signal.Signals, code: int
) -> None:
    gateway.hold = True
    gateway.says("first")
    command = own_command(["query", "--prompt", "Hi", "--url", gateway.url])
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a test run in the background ignores it
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(5) == b"first"
        process.send_signal(number)
        _, said = process.communicate(timeout=10)
    gateway.release.set()
    assert (process.returncode, said) == (code, b"")


def test_an_interrupt_before_the_command_begins_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cli.main.app", interrupt)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
