"""`query` for models that make no text: files beside the user, from a real gateway and from our own engine."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import httpx
import pytest
from PIL import Image

from app.engine.request import ModelStatus
from cli import draw, engine, patch_help
from cli.background import BackgroundLoop
from tests.cli.conftest import Diffuse, FakeGateway
from tests.support.api_server import Served, serve_engines
from tests.support.fake_pictures import FakePictures, fake_sounds, fake_videos


@pytest.fixture
def engines() -> dict[str, FakePictures]:
    made = (FakePictures(), fake_videos(), fake_sounds())
    return {one.model_name: one for one in made}


@pytest.fixture
def served(
    engines: dict[str, FakePictures], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Served]:
    """A real gateway over fake engines in another thread, and a folder of one's own to work in."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    loop = BackgroundLoop()
    try:
        with loop.entered(serve_engines(*engines.values())) as running:
            yield running
    finally:
        loop.close()


def files() -> list[str]:
    return sorted(path.name for path in Path().iterdir())


def jobs_at(served: Served) -> list[Any]:
    """The video jobs that the gateway still has."""
    listed: list[Any] = httpx.get(f"{served.url}/videos").json()["data"]
    return listed


def test_a_picture_is_written_beside_the_user(diffuse: Diffuse, served: Served) -> None:
    result = diffuse("query", "-p", "A red circle!", "--url", served.url, "--model", "painter", "--seed", "7")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "a-red-circle.png\n"
    with Image.open("a-red-circle.png") as picture:
        assert picture.getpixel((0, 0)) == (7, 200, 40)
    assert "4 steps, 10 ms each" in result.stderr
    assert "stages busy 60%, 50%" in result.stderr


def test_the_seed_is_0_unless_given_and_nothing_is_written_over(
    diffuse: Diffuse, served: Served, engines: dict[str, FakePictures]
) -> None:
    for _ in range(3):
        diffuse("query", "-p", "a red circle", "--url", served.url, "--model", "painter")
    assert files() == ["a-red-circle-2.png", "a-red-circle-3.png", "a-red-circle.png"]
    assert [request.seed for request in engines["painter"].requests] == [0, 0, 0]


def test_what_was_asked_reaches_the_engine_and_the_verdict_the_user(
    diffuse: Diffuse, served: Served, engines: dict[str, FakePictures]
) -> None:
    options = ["--steps", "9", "--size", "32x16", "--guidance", "2", "--negative", "blue", "--patches", "2"]
    options += ["--warmup", "3", "--extrapolate", "--two-streams", "--wire", "int8-delta", "--out", "x.webp"]
    result = diffuse("query", "-p", "a circle", "--url", served.url, "--model", "painter", *options)
    assert result.exit_code == 0, result.stderr
    asked = engines["painter"].requests[0]
    assert (asked.steps, asked.width, asked.height, asked.guidance_scale) == (9, 32, 16, 2)
    assert (asked.negative_prompt, asked.patches, asked.warmup) == ("blue", 2, 3)
    assert (asked.extrapolate, asked.two_streams, asked.wire) == (True, True, "int8-delta")
    with Image.open("x.webp") as picture:
        assert picture.format == "WEBP"
    assert "patches: its blocks are of two streams" in result.stderr


def test_a_video_is_a_job_that_is_let_go(diffuse: Diffuse, served: Served) -> None:
    result = diffuse("query", "-p", "waves", "--url", served.url, "--model", "filmer", "--frames", "5")
    assert result.exit_code == 0, result.stderr
    with av.open("waves.mp4") as film:
        assert film.streams.video[0].frames == 5
    assert jobs_at(served) == []


def test_a_failed_video_says_why_and_leaves_no_file(
    diffuse: Diffuse, served: Served, engines: dict[str, FakePictures]
) -> None:
    def fail(number: int) -> None:
        if number == 1:
            raise TimeoutError

    engines["filmer"].before_step = fail
    result = diffuse("query", "-p", "waves", "--url", served.url, "--model", "filmer")
    assert result.exit_code == 1
    assert result.stderr.startswith("diffuse: the answer took longer")
    assert (files(), jobs_at(served)) == ([], [])


@pytest.mark.parametrize(("out", "codec"), [(None, "pcm_s16le"), ("a.flac", "flac"), ("a.mp3", "mp3float")])
def test_a_sound_comes_in_the_format_of_its_file(
    diffuse: Diffuse, served: Served, out: str | None, codec: str
) -> None:
    options = ["--out", out] if out else []
    result = diffuse(
        "query", "-p", "rain", "--url", served.url, "--model", "composer", "--seconds", "1", *options
    )
    assert result.exit_code == 0, result.stderr
    with av.open(out or "rain.wav") as sound:
        assert sound.streams.audio[0].codec.name == codec


def test_json_names_the_file_and_what_it_took(diffuse: Diffuse, served: Served) -> None:
    result = diffuse("query", "-p", "a circle", "--url", served.url, "--model", "painter", "--json")
    told = json.loads(result.stdout)
    assert (told["file"], told["seed"], told["steps"], told["model"]) == ("a-circle.png", 0, 4, "painter")
    assert told["timings"]["passes"] == 8
    assert told["bytes"] == Path("a-circle.png").stat().st_size


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("painter", ["--out", "x.mp4"], "ends in .png"),
        ("painter", ["--out", "taken.png"], "is there already"),
        ("painter", ["--out", "nowhere/x.png"], "no folder"),
        ("painter", ["--frames", "5"], "a picture has none"),
        ("composer", ["--size", "32x32"], "a sound has none"),
        ("filmer", ["--frames", "5", "--seconds", "1"], "not both"),
        ("painter", ["--max-tokens", "5"], "makes? text"),
        ("painter", ["--system", "s"], "makes? text"),
        ("painter", ["--size", "big"], "512x512"),
        ("painter", ["--per-block"], "a gateway decides it when it starts"),
    ],
)
def test_flags_that_do_not_fit_are_usage_errors(
    diffuse: Diffuse,
    served: Served,
    engines: dict[str, FakePictures],
    model: str,
    options: list[str],
    says: str,
) -> None:
    Path("taken.png").write_bytes(b"mine")
    result = diffuse("query", "-p", "a circle", "--url", served.url, "--model", model, *options)
    shown = " ".join(result.stderr.replace("│", " ").split())
    assert result.exit_code == 2
    assert re.search(says, shown), shown
    assert not engines[model].requests
    assert Path("taken.png").read_bytes() == b"mine"


def test_without_a_model_the_first_that_draws_is_asked_where_flags_say_so(
    diffuse: Diffuse, served: Served, engines: dict[str, FakePictures]
) -> None:
    result = diffuse("query", "-p", "a circle", "--url", served.url, "--steps", "3")
    assert result.exit_code == 0, result.stderr
    assert engines["painter"].requests[0].steps == 3


def test_drawing_flags_on_a_text_model_are_usage_errors(diffuse: Diffuse, gateway: FakeGateway) -> None:
    gateway.says("ok")
    result = diffuse("query", "-p", "Hi", "--url", gateway.url, "--steps", "5")
    assert result.exit_code == 2
    assert not gateway.requests


PIXEL = base64.b64encode(b"a picture").decode()
CARD = {"id": "tiny", "status": "ready", "architecture": {"output_modalities": ["image"]}}


@pytest.mark.parametrize(
    ("events", "code", "says"),
    [
        ([{"type": "image_generation.progress", "step": "a", "steps": [], "seconds": "x"}], 1, "cut short"),
        ([{"type": "image_generation.completed", "b64_json": "!!"}], 1, "cannot be read"),
        ([{"type": 7}, []], 1, "not an object"),
        ([{"error": {"message": [1]}}], 1, "1"),
        (
            [
                {
                    "type": "image_generation.completed",
                    "b64_json": PIXEL,
                    "seed": "x",
                    "timings": {"compute_s": "x", "network_s": {}, "busy": ["x"]},
                }
            ],
            0,
            "seed 0",
        ),
    ],
)
def test_a_gateway_that_tells_nonsense_is_no_traceback(
    diffuse: Diffuse, gateway: FakeGateway, tmp_path: Path, events: list[Any], code: int, says: str
) -> None:
    gateway.models, gateway.events = [CARD], events
    out = tmp_path / "x.png"
    result = diffuse("query", "-p", "x", "--url", gateway.url, "--steps", "5", "--out", str(out))
    assert (result.exit_code, out.exists()) == (code, code == 0), result.stderr
    assert says in result.stderr
    assert "fault of ours" not in result.stderr


def test_a_model_that_makes_what_we_do_not_know_is_asked_for_text(
    diffuse: Diffuse, gateway: FakeGateway
) -> None:
    gateway.models = [CARD | {"architecture": {"output_modalities": ["embedding"]}}]
    gateway.says("Hello")
    result = diffuse("query", "-p", "x", "--url", gateway.url)
    assert result.exit_code == 0, result.stderr


def test_drawing_flags_on_an_unknown_model_say_that_it_is_unknown(diffuse: Diffuse, served: Served) -> None:
    result = diffuse("query", "-p", "x", "--url", served.url, "--model", "nobody", "--steps", "5")
    assert result.exit_code == 1
    assert "`nobody` does not exist" in result.stderr


def test_a_folder_that_takes_no_file_is_found_out_before_the_work(
    diffuse: Diffuse, served: Served, engines: dict[str, FakePictures], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(dir: Path) -> Any:  # noqa: A002
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("cli.draw.tempfile.TemporaryFile", refuse)
    result = diffuse("query", "-p", "x", "--url", served.url, "--model", "painter", "--out", "x.png")
    assert result.exit_code == 1
    assert "Read-only file system" in result.stderr
    assert not engines["painter"].requests


def test_a_refused_size_says_the_allowed_step(diffuse: Diffuse, served: Served) -> None:
    result = diffuse("query", "-p", "x", "--url", served.url, "--model", "painter", "--size", "70x70")
    assert result.exit_code == 1
    assert result.stderr == "diffuse: width and height are multiples of 16\n"
    assert files() == []


def test_how_tokens_are_drawn_is_told_to_a_model_of_sounds_only(
    diffuse: Diffuse, served: Served, engines: dict[str, FakePictures]
) -> None:
    told = ["query", "-p", "rain", "--url", served.url, "--temperature", "0.5"]
    result = diffuse(*told, "--model", "composer", "--out", "song.wav")
    assert result.exit_code == 0, result.stderr
    assert engines["composer"].requests[0].temperature == 0.5
    result = diffuse(*told, "--model", "painter")
    assert (result.exit_code, engines["painter"].requests) == (2, [])


@pytest.fixture
def own_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Have `--node` open a fake engine in this process."""
    monkeypatch.chdir(tmp_path)
    opened = SimpleNamespace(engine=FakePictures(), directory=SimpleNamespace(last_errors={}))

    @contextlib.asynccontextmanager
    async def open_fake(settings: Any) -> AsyncIterator[Any]:
        opened.settings = settings
        yield opened

    monkeypatch.setattr(engine, "makes_pictures", lambda target, model: True)
    monkeypatch.setattr("app.engine.diffusion.swarm.open_pictures", open_fake)
    return opened


NODE = f"{'0a' * 32}@127.0.0.1:7000"


@pytest.mark.parametrize("kind", ["picture", "video", "audio"])
def test_the_engine_in_this_process_writes_the_same_files(
    diffuse: Diffuse, own_engine: Any, kind: str
) -> None:
    own_engine.engine = {"picture": FakePictures, "video": fake_videos, "audio": fake_sounds}[kind]()
    result = diffuse("query", "-p", "A red circle", "--node", NODE, "--model", "m", "--wire", "int8-delta")
    assert result.exit_code == 0, result.stderr
    suffix = {"picture": ".png", "video": ".mp4", "audio": ".wav"}[kind]
    assert result.stdout == f"a-red-circle{suffix}\n"
    assert "4 steps, 10 ms each" in result.stderr
    assert (own_engine.settings.model, own_engine.settings.wire) == ("m", "int8-delta")


def test_blocks_are_sent_one_by_one_where_the_user_says_so(diffuse: Diffuse, own_engine: Any) -> None:
    for flags in ([], ["--per-block"]):
        result = diffuse("query", "-p", "a", "--node", NODE, "--model", "m", *flags)
        assert result.exit_code == 0, result.stderr
        assert own_engine.settings.library.ends.per_block is bool(flags)


def test_blocks_without_a_node_are_named(diffuse: Diffuse, own_engine: Any) -> None:
    own_engine.engine.status = ModelStatus("partial", 8, missing=((2, 4),))
    result = diffuse("query", "-p", "x", "--node", NODE, "--model", "m")
    assert result.exit_code == 1
    assert "no node serves blocks 2:4 of 8" in result.stderr


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("A red circle, on the left!", "a-red-circle-on-the-left"),
        ("../../etc/passwd", "etc-passwd"),
        ("Ünïcode 猫", "ünïcode-猫"),
        ("?!", "untitled"),
        ("w" * 300, "w" * draw.NAME_CHARS),
    ],
)
def test_a_name_is_made_of_harmless_words(prompt: str, name: str) -> None:
    assert draw.name_from(prompt) == name


def test_the_help_shows_the_measured_table() -> None:
    shown = patch_help.patches_help()
    for drift in patch_help.DRIFTS:
        if drift.warmup == 4 and not drift.extrapolates:
            assert f"{drift.mean:g} ({drift.worst:g})" in shown


async def test_an_interrupted_video_is_cancelled(engines: dict[str, FakePictures]) -> None:
    from cli.drawing import Order
    from cli.gateway import open_gateway
    from cli.gateway_drawing import GatewayDrawer

    filmer = engines["filmer"]
    filmer.before_step = lambda number: asyncio.Event().wait() if number == 1 else None
    async with serve_engines(filmer) as served, open_gateway(served.url, model="filmer") as gateway:
        drawer = GatewayDrawer(gateway, "video")

        async def ask() -> None:
            async with contextlib.aclosing(drawer.draw(Order("waves"), ".mp4")) as telling:
                async for _ in telling:
                    pass

        asking = asyncio.create_task(ask())
        async with asyncio.timeout(5):
            while filmer.num_open == 0:
                await asyncio.sleep(0.01)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        assert (filmer.num_open, await asyncio.to_thread(jobs_at, served)) == (0, [])


async def test_a_video_interrupted_before_its_name_is_known_is_cancelled(
    engines: dict[str, FakePictures], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cli.drawing import Order
    from cli.gateway import open_gateway
    from cli.gateway_drawing import GatewayDrawer

    filmer = engines["filmer"]
    filmer.before_step = lambda number: asyncio.Event().wait() if number == 1 else None
    async with serve_engines(filmer) as served, open_gateway(served.url, model="filmer") as gateway:
        post, is_made = gateway.post, asyncio.Event()

        async def slowly(path: str, body: dict[str, Any]) -> dict[str, Any]:
            made = await post(path, body)
            is_made.set()
            await asyncio.sleep(0.05)  # the answer is on its way
            return made

        monkeypatch.setattr(gateway, "post", slowly)
        drawing = GatewayDrawer(gateway, "video").draw(Order("waves"), ".mp4")
        asking = asyncio.ensure_future(anext(drawing))
        async with asyncio.timeout(5):
            await is_made.wait()
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        assert await asyncio.to_thread(jobs_at, served) == []


def test_half_a_file_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.FileIO):
        def write(self, content: Any) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", lambda path, mode: Full(path, mode))
    with pytest.raises(OSError, match="No space"):
        draw.keep(tmp_path / "x.png", b"content", is_ours=True)
    assert list(tmp_path.iterdir()) == []
