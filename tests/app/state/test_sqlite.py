"""The state file: whole after a kill, for one gateway and one owner, and refused with the reason."""

from __future__ import annotations

import signal
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from app.jobs.job import Job
from app.state.opening import open_state
from app.state.state import Bound, JobBounds, JobRow, StateError, StateInUseError

BOUNDS = JobBounds(10, 1000, 60.0)
KEPT = Bound(10, 60.0)

DYING = """
import asyncio, os, signal, sys
from app.state.opening import open_state
from app.state.state import Bound

async def main():
    async with open_state(sys.argv[1]) as state:
        shelf = state.shelf("records", Bound(1000, 60.0))
        print(state.gateway_id, flush=True)
        for number in range(1000):
            await state.take("key", 2)
            await shelf.put(f"r{number}", bytes(500))
            if number == 50:
                os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new folder" / "gateway.sqlite"


async def test_what_is_kept_outlives_the_process(path: Path) -> None:
    url = f"sqlite://{path}"
    job = Job("video_1", "me", "filmer", "waves", "64x48", "1")
    async with open_state(url) as state:
        await state.shelf("records", KEPT).put("one", b"value")
        await state.jobs.add(JobRow(job, state.gateway_id, 5), BOUNDS)
        assert (await state.take("key", 1)).is_granted
        assert await state.hold("key", 1) is not None
        first = state.gateway_id
    async with open_state(url) as state:
        assert await state.shelf("records", KEPT).get("one") is not None
        assert await state.jobs.rows() == [JobRow(job, first, 5)]
        assert not (await state.take("key", 1)).is_granted
        assert await state.hold("key", 1) is not None, "places end with their process"
        assert not await state.living([first])


async def test_a_killed_gateway_leaves_a_whole_file(path: Path) -> None:
    url = f"sqlite://{path}"
    died = subprocess.run([sys.executable, "-c", DYING, url], capture_output=True, timeout=60, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    async with open_state(url) as state:
        shelf = state.shelf("records", Bound(1000, 60.0))
        assert await shelf.get("r50") is not None
        assert not (await state.take("key", 2)).is_granted
        assert not await state.living([died.stdout.decode().strip()])
    assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)


async def test_a_second_gateway_is_refused_with_the_reason(path: Path) -> None:
    url = f"sqlite://{path}"
    async with open_state(url):
        with pytest.raises(
            StateInUseError, match=r"another gateway has the state file .* --state redis://HOST"
        ):
            async with open_state(url):
                pass
    async with open_state(url):
        pass


async def test_only_the_owner_can_read_it(path: Path) -> None:
    async with open_state(f"sqlite://{path}") as state:
        await state.take("key", 1)
        assert {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()} == {0o600}
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "content", [b"not a database at all, but long enough to be looked at" * 20, b"SQLite format 3\0"]
)
async def test_a_file_of_something_else_is_refused_and_left_alone(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(StateError, match="move it away"):
        async with open_state(f"sqlite://{path}"):
            pass
    assert path.read_bytes() == content


async def test_a_file_of_another_version_is_refused(path: Path) -> None:
    path.parent.mkdir()
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE theirs (x)")
    other.commit()
    other.close()
    with pytest.raises(StateError, match="is not a state file of this version"):
        async with open_state(f"sqlite://{path}"):
            pass


async def test_a_place_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(StateError, match="cannot be made"):
        async with open_state("sqlite:///proc/diffuse/gateway.sqlite"):
            pass


async def test_a_failure_is_told_and_the_file_goes_on(path: Path) -> None:
    told: list[tuple[str, str]] = []
    async with open_state(f"sqlite://{path}") as state:
        state.on_error = lambda part, reason: told.append((part, reason))
        job = Job("video_1", "me", "filmer", "waves", "64x48", "1")
        assert await state.jobs.add(JobRow(job, "g", 5), BOUNDS)
        with pytest.raises(StateError):
            await state.jobs.add(JobRow(job, "g", 5), BOUNDS)
        assert told == [("jobs", "IntegrityError")]
        assert (await state.take("key", 1)).is_granted


@pytest.mark.parametrize(
    "url",
    [
        "",
        "memory",
        "sqlite:",
        "sqlite://",
        "sqlite:///",
        "postgres://db",
        "redis://host/name",
        "redis://:pa/ss@host:x",
    ],
)
async def test_a_url_of_another_form_is_refused_without_being_quoted(url: str) -> None:
    with pytest.raises(StateError) as raised:
        async with open_state(url):
            pass
    assert "redis://" in str(raised.value)
    assert "pa/ss" not in str(raised.value)
    assert raised.value.__cause__ is None


async def test_a_relative_file_is_one_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with open_state("sqlite:gateway.sqlite"):
        assert (tmp_path / "gateway.sqlite").is_file()
