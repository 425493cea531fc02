"""Run files, and `diffuse leave` over processes that take their time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cli.state import RunFile, default_state_dir, running_services
from routing.identity import Identity
from tests.cli.conftest import Diffuse

# Says that it is up, and on SIGTERM drains until a file appears, or for good.
_SERVICE = """
import signal, sys, time
from pathlib import Path
from cli.state import RunFile

state, end = Path(sys.argv[1]), Path(sys.argv[2])
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
with RunFile(state, "host") as run_file:
    run_file.note({"event": "ready", "address": sys.argv[3] + "@127.0.0.1:7000"})
    print("up", flush=True)
    while not asked:
        time.sleep(0.01)
    run_file.note({"event": "draining", "num_sessions": 2, "limit_s": 30.0})
    while not end.exists():
        time.sleep(0.01)
"""
NODE = "ab" * 32


class Service:
    """A stand-in for a host."""

    def __init__(self, folder: Path, node_id: str = NODE) -> None:
        self.state, self.end = folder / "state", folder / f"end-{node_id[:4]}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVICE, str(self.state), str(self.end), node_id], stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    running = Service(tmp_path)
    yield running
    running.close()


def test_a_service_without_sessions_is_seen_off(diffuse: Diffuse, service: Service) -> None:
    service.end.touch()
    result = diffuse("leave")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"host {NODE[:8]} (pid {service.process.pid}) has left\n"


def test_waiting_tells_what_is_left_and_ends_in_time(diffuse: Diffuse, service: Service) -> None:
    result = diffuse("leave", "--timeout", "0.5")
    assert result.exit_code == 1
    assert "2 sessions left" in result.stderr
    assert "still running after 0.5 s" in result.stderr
    again = diffuse("leave", "--timeout", "0.1")
    assert "is leaving already" in again.stderr
    assert service.process.poll() is None  # a second SIGTERM would have ended a real one


def test_asking_alone_does_not_wait(diffuse: Diffuse, service: Service) -> None:
    assert diffuse("leave", "--timeout", "0").exit_code == 0
    service.end.touch()
    assert service.process.wait(10) == 0


def test_a_service_is_chosen_by_its_key(diffuse: Diffuse, service: Service, tmp_path: Path) -> None:
    identity = Identity.generate()
    identity.save(tmp_path / "node.key")
    other = Service(tmp_path, identity.node_id.hex())
    try:
        other.end.touch()
        assert "several run here" in diffuse("leave").stderr
        assert diffuse("leave", "--key", str(tmp_path / "node.key")).exit_code == 0
        assert service.process.poll() is None
    finally:
        other.close()


def test_everyone_may_be_asked(diffuse: Diffuse, service: Service, tmp_path: Path) -> None:
    other = Service(tmp_path, "cd" * 32)
    try:
        for one in (service, other):
            one.end.touch()
        assert diffuse("leave", "--all").stdout.count("has left") == 2
    finally:
        other.close()


def test_nobody_to_ask_is_said(diffuse: Diffuse, tmp_path: Path, service: Service) -> None:
    assert "no host or sentinel runs here" in diffuse("leave", "--state-dir", str(tmp_path)).stderr
    assert f"running: host {NODE[:8]}" in diffuse("leave", "--pid", "1").stderr
    assert diffuse("leave", "--pid", "1", "--all").exit_code == 2


def test_what_runs_is_known_by_more_than_its_number(tmp_path: Path) -> None:
    with RunFile(tmp_path, "sentinel", NODE):
        (service,) = running_services(tmp_path)
        assert (service.pid, service.role, service.node_id) == (os.getpid(), "sentinel", NODE)
        told = json.loads(service.path.read_text())
        service.path.write_text(json.dumps(told | {"started": psutil.Process().create_time() - 3600}))
        assert running_services(tmp_path) == []
    assert not list((tmp_path / "run").iterdir())


def test_a_broken_run_file_is_swept_away(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    told = '{"pid": %s, "started": 1.0, "role": "host"}'
    odd = [told % pid for pid in ("-1", "0", "Infinity", "99999999999999999999", "1e999")]
    for number, content in enumerate(("", "[]", '{"pid": "x"}', "{}", '{"pid": 1}', "[" * 100_000, *odd)):
        (tmp_path / "run" / f"{number}.json").write_text(content)
    assert running_services(tmp_path) == []
    assert not list((tmp_path / "run").iterdir())


def test_a_run_file_follows_the_service(tmp_path: Path) -> None:
    with RunFile(tmp_path, "host") as run_file:
        run_file.note({"event": "progress"})
        assert running_services(tmp_path)[0].state == "starting"
        run_file.note({"event": "ready", "address": "", "layers": "0:4"})
        run_file.note({"event": "reachable", "address": f"{NODE}/{'cd' * 32}@192.0.2.1:7000"})
        (service,) = running_services(tmp_path)
        assert (service.state, service.node_id) == ("ready", NODE)
        run_file.note({"event": "draining", "num_sessions": 3, "limit_s": 30.0})
        assert running_services(tmp_path)[0].num_sessions == 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with RunFile(tmp_path, "host") as run_file:
        assert "`diffuse leave` will not find this process" in run_file.trouble


def test_the_state_folder_can_be_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DIFFUSE_STATE_DIR", str(tmp_path))
    assert default_state_dir() == tmp_path
    monkeypatch.delenv("DIFFUSE_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert default_state_dir() == tmp_path / "diffuse"
