"""Files of jobs, the same in a folder and in Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.jobs.folder import JobFolder
from app.state import redis_files
from app.state.opening import open_state
from app.state.state import JobFile, JobFiles

FILES = {"video.mp4": bytes(range(256)) * 40, "empty": b""}


@pytest.fixture(params=["folder", "redis"])
async def files(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[JobFiles]:
    monkeypatch.setattr(redis_files, "PIECE_BYTES", 1000)
    if request.param == "folder":
        folder = JobFolder(tmp_path / "videos")
        await folder.prepare()
        yield folder
        await folder.close()
        return
    async with open_state(request.getfixturevalue("redis").url) as state:
        assert state.files is not None
        yield state.files


async def content(file: JobFile, start: int, end: int) -> bytes:
    pieces = b""
    while start + len(pieces) < end:
        piece = await file.read(start + len(pieces), end)
        assert piece
        pieces += piece
    return pieces


async def test_a_file_is_read_whole_and_in_parts(files: JobFiles) -> None:
    await files.put("video_1", FILES, 60.0)
    film = await files.open("video_1", "video.mp4")
    assert film is not None
    whole = FILES["video.mp4"]
    assert film.size == len(whole)
    for start, end in ((0, len(whole)), (999, 1001), (1000, 2000), (5, 4321), (len(whole) - 1, len(whole))):
        assert await content(film, start, end) == whole[start:end]
    await film.close()
    empty = await files.open("video_1", "empty")
    assert empty is not None
    assert empty.size == 0
    await empty.close()


async def test_there_is_no_other_file(files: JobFiles) -> None:
    await files.put("video_1", FILES, 60.0)
    assert await files.open("video_1", "sound") is None
    assert await files.open("video_2", "video.mp4") is None


async def test_a_removed_file_is_gone(files: JobFiles) -> None:
    await files.put("video_1", FILES, 60.0)
    await files.remove("video_1")
    await files.remove("video_1")
    assert await files.open("video_1", "video.mp4") is None
