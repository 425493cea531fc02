"""`diffuse up` with the real model: it answers, and nothing is left of it, however it ends."""

from __future__ import annotations

import base64
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import httpx
import psutil
import pytest

from cli.children import own_command
from cli.ports import bind_loopback

pytestmark = [
    pytest.mark.processes,
    pytest.mark.real,
    pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals"),
]

READY_TIMEOUT_S = 120.0  # on a machine that runs other jobs; quiet, it takes about ten seconds
GONE_TIMEOUT_S = 10.0


class Up:
    """One `diffuse up`, and the processes under it."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._output = folder / f"{time.monotonic_ns()}.out"
        self._errors = self._output.with_suffix(".err")
        with self._output.open("wb") as out, self._errors.open("wb") as err:
            self.process = subprocess.Popen(
                own_command(["up", "--port", "0", *arguments]),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        self._parent = psutil.Process(self.process.pid)
        self.family: dict[int, psutil.Process] = {}

    @property
    def stdout(self) -> str:
        return self._output.read_text()

    @property
    def stderr(self) -> str:
        return self._errors.read_text()

    @property
    def url(self) -> str:
        match = re.search(r"^base_url +(\S+)", self.stdout, re.MULTILINE)
        assert match, self.stdout
        return match[1]

    def wait(self, condition: Callable[[], object], timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait, noting every process that is ever seen below us."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"stdout: {self.stdout}\nstderr: {self.stderr}"
            self.look()
            time.sleep(0.02)
        self.look()

    def children(self) -> list[psutil.Process]:
        """Every process below us at this moment."""
        return self._parent.children(recursive=True) if self.process.poll() is None else []

    def look(self) -> None:
        self.family |= {child.pid: child for child in self.children()}

    def wait_ready(self) -> None:
        self.wait(lambda: "base_url" in self.stdout or self.process.poll() is not None)
        assert self.process.poll() is None, self.stderr

    def wait_gone(self) -> None:
        """Every process that was ever seen has ended."""
        assert self.family
        _, alive = psutil.wait_procs(list(self.family.values()), timeout=GONE_TIMEOUT_S)
        assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(GONE_TIMEOUT_S)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def start(*arguments: str) -> Up:
        started.append(Up(tmp_path, *arguments))
        return started[-1]

    yield start
    for swarm in started:
        swarm.end()


def ask(url: str) -> dict[str, object]:
    command = own_command(
        [
            "query",
            "--url",
            url,
            "--prompt",
            "Name a colour.",
            "--max-tokens",
            "8",
            "--temperature",
            "0",
            "--json",
        ]
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_a_swarm_answers_and_control_c_leaves_nothing(up: Callable[..., Up]) -> None:
    swarm = up("--nodes", "3")
    swarm.wait_ready()
    assert len(swarm.family) >= 4
    assert "models    smollm2, tiny-pictures" in swarm.stdout
    assert f"curl -N {swarm.url}/chat/completions" in swarm.stdout
    answer = ask(swarm.url)
    assert answer["text"]
    assert answer["timings"]["compute_s"] > 0  # type: ignore[index]
    asked = {"model": "tiny-pictures", "prompt": "a red circle", "steps": 4}
    drawn = httpx.post(f"{swarm.url}/images/generations", json=asked, timeout=60).json()
    assert base64.b64decode(drawn["data"][0]["b64_json"]).startswith(b"\x89PNG")
    swarm.process.send_signal(signal.SIGINT)
    assert swarm.process.wait(20) == 0
    swarm.wait_gone()
    assert "Traceback" not in swarm.stderr


@pytest.mark.long
def test_two_swarms_run_side_by_side_in_both_ways_to_place_the_ends_and_end_badly(
    up: Callable[..., Up],
) -> None:
    local, remote = (up("--nodes", "1", "--pictures", "none", "--ends", ends) for ends in ("local", "remote"))
    local.wait_ready()
    remote.wait_ready()
    assert local.url != remote.url
    assert ask(local.url)["text"] == ask(remote.url)["text"]
    node = next(child for child in local.children() if "1:30" in child.cmdline())
    node.kill()
    assert local.process.wait(20) == 1
    assert "diffuse: node 1 was ended by SIGKILL" in local.stderr
    local.wait_gone()
    remote.process.kill()
    remote.process.wait(5)
    remote.wait_gone()


@pytest.mark.parametrize("moment", ["model: starting", "node 1: starting", "gateway: starting"])
def test_a_parent_that_is_killed_while_loading_takes_its_children_along(
    up: Callable[..., Up], moment: str
) -> None:
    swarm = up("--nodes", "1", "--pictures", "none")
    swarm.wait(lambda: moment in swarm.stderr and swarm.family)
    swarm.process.kill()
    swarm.process.wait(5)
    swarm.wait_gone()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name
)
def test_a_stop_while_loading_is_clean(up: Callable[..., Up], number: signal.Signals) -> None:
    swarm = up("--nodes", "1", "--pictures", "none")
    swarm.wait(lambda: swarm.family)
    swarm.process.send_signal(number)
    assert swarm.process.wait(10) == 0
    swarm.wait_gone()
    assert swarm.stderr.endswith("stopped\n")


def test_a_model_that_cannot_be_opened_says_why_before_anything_starts(up: Callable[..., Up]) -> None:
    swarm = up("--model", "nosuchmodel")
    assert swarm.process.wait(30) == 1
    assert "nosuchmodel" in swarm.stderr
    assert "node 1" not in swarm.stderr


def test_a_busy_port_is_refused_before_anything_is_loaded(up: Callable[..., Up]) -> None:
    with closing(bind_loopback(0)) as listener:
        port = listener.getsockname()[1]
        swarm = up("--port", str(port))
        assert swarm.process.wait(10) == 1
    assert f"127.0.0.1:{port} is in use" in swarm.stderr
    assert "--port" in swarm.stderr
    assert swarm.stderr.count("\n") == 1
