"""`diffuse query` for a model that writes recordings down: the words as they are heard, or subtitles in a file.

Light on purpose: asking a gateway must not import torch to send a file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import typer

from app.media.subtitles import subrip, webvtt
from cli import show
from cli.draw import check_folder, keep
from cli.failures import CommandError
from cli.gateway import Gateway, GatewayError
from cli.options import DEFAULT_MODEL
from cli.target import Target, asked_gateway

MAX_FILE_BYTES: Final = 100 << 20  # what a gateway takes
PATH: Final = "audio/transcriptions"


@dataclass(frozen=True, slots=True)
class Spoken:
    """Some words, and when they were said."""

    start_s: float
    end_s: float
    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Heard:
    """What was heard next, and how far the recording is done."""

    spoken: tuple[Spoken, ...]
    done_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Listening:
    """A recording, and how it is to be written down."""

    content: bytes = field(repr=False)
    name: str
    prompt: str = field(default="", repr=False)
    temperature: float | None = None
    seed: int | None = None


class Scribe(Protocol):
    """Whoever writes recordings down: a gateway, or our own engine."""

    model: str

    def hear(self, asked: Listening) -> AsyncGenerator[Heard, None]:
        """Yield what is heard, window by window. Raises CommandError, or what the engine raises."""


async def show_transcript(
    target: Target, recording: Path, out: Path | None, *, as_json: bool, **wishes: Any
) -> None:
    """Write one recording down; to a file if there is to be one, which is never written over."""
    write = _writer(out)
    asked = Listening(_read(recording), recording.name, **wishes)
    spoken: list[Spoken] = []
    began = time.perf_counter()
    is_told = out is None and not as_json
    async with open_scribe(target) as scribe, aclosing(scribe.hear(asked)) as hearing:
        with _telling(is_told=is_told, is_shown=not as_json) as tell:
            async for heard in hearing:
                tell(heard)
                spoken += heard.spoken
    total_s, length_s = time.perf_counter() - began, heard.total_s
    if out is not None:
        kept = keep(out, write(spoken).encode(), is_ours=False)
    if as_json:
        show.print_json(
            _as_object(scribe.model, spoken, length_s, total_s) | ({"file": str(kept)} if out else {})
        )
        return
    if out is not None:
        show.out(str(kept))
    show.note(f"{length_s:.1f} s of sound in {show.seconds(total_s)}")


@asynccontextmanager
async def open_scribe(target: Target) -> AsyncIterator[Scribe]:
    """Connect to whoever writes recordings down; raises as `open_answerer` does."""
    if target.runs_engine:
        from cli.engine_transcript import open_hearing_nodes

        async with open_hearing_nodes(target, target.model or DEFAULT_MODEL) as engine:
            yield engine
    else:
        async with asked_gateway(target) as gateway:
            yield GatewayScribe(gateway)


class GatewayScribe:
    """A `Scribe` over HTTP."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.model = gateway.model

    async def hear(self, asked: Listening) -> AsyncGenerator[Heard, None]:
        form = {"model": self.model, "stream": "true", "stream_options[include_progress]": "true"}
        optional = {"prompt": asked.prompt or None, "temperature": asked.temperature, "seed": asked.seed}
        form |= {name: str(value) for name, value in optional.items() if value is not None}
        is_whole = False
        async with aclosing(self._gateway.upload(PATH, form, (asked.name, asked.content))) as events:
            async for event in events:
                match event.get("type"):
                    case "transcript.progress":
                        yield _heard(event)
                    case "transcript.text.done":
                        is_whole = True
        if not is_whole:
            raise GatewayError("the gateway's answer was cut short")


def _heard(event: dict[str, Any]) -> Heard:
    try:
        spoken = tuple(
            Spoken(float(one["start"]), float(one["end"]), show.printable(str(one["text"])))
            for one in event["segments"]
        )
        return Heard(spoken, float(event["done_s"]), float(event["total_s"]))
    except (KeyError, TypeError, ValueError):
        raise GatewayError("the gateway sent a transcript that cannot be read") from None


def _read(recording: Path) -> bytes:
    try:
        if recording.stat().st_size > MAX_FILE_BYTES:
            raise CommandError(f"{recording} is larger than {MAX_FILE_BYTES >> 20} MiB")
        return recording.read_bytes()
    except OSError as error:
        raise CommandError(f"{recording} cannot be read: {error.strerror or type(error).__name__}") from error


Writer = Callable[[list[Spoken]], str]
WRITERS: Final[dict[str, Writer]] = {
    ".srt": subrip,
    ".vtt": webvtt,
    ".txt": lambda spoken: _text(spoken) + "\n",
    ".json": lambda spoken: json.dumps(_segments(spoken), ensure_ascii=False, indent=1) + "\n",
}


def _writer(out: Path | None) -> Writer:
    """How the file is written, by its suffix. Raises a usage error, or CommandError where it cannot be kept."""
    if out is None:
        return WRITERS[".txt"]
    if out.suffix.lower() not in WRITERS:
        raise typer.BadParameter(f"a transcript's file ends in {', '.join(WRITERS)}", param_hint="'--out'")
    if out.exists():
        raise typer.BadParameter(f"{out} is there already, and is not written over", param_hint="'--out'")
    if not out.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {out.parent}", param_hint="'--out'")
    check_folder(out.parent)
    return WRITERS[out.suffix.lower()]


def _text(spoken: list[Spoken]) -> str:
    return "".join(one.text for one in spoken).strip()


def _segments(spoken: list[Spoken]) -> list[dict[str, Any]]:
    return [asdict(one) for one in spoken]


def _as_object(model: str, spoken: list[Spoken], length_s: float, total_s: float) -> dict[str, Any]:
    return {
        "model": model,
        "text": _text(spoken),
        "segments": _segments(spoken),
        "duration_s": length_s,
        "total_s": total_s,
    }


@contextmanager
def _telling(*, is_told: bool, is_shown: bool) -> Iterator[Callable[[Heard], None]]:
    """The words on standard output, or else, where somebody looks, how far it is."""
    if not is_told:
        with _bar(is_shown=is_shown) as tell:
            yield tell
        return
    with show.whole_lines() as say:
        has_spoken = False

        def speak(heard: Heard) -> None:
            nonlocal has_spoken
            text = "".join(one.text for one in heard.spoken)
            say(text if has_spoken else text.lstrip())
            has_spoken = has_spoken or bool(text)

        yield speak


@contextmanager
def _bar(*, is_shown: bool) -> Iterator[Callable[[Heard], None]]:
    """A bar of seconds on standard error where that is a terminal."""
    if not (is_shown and sys.stderr.isatty()) or os.environ.get("TERM") == "dumb":
        yield lambda heard: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.fields[done]}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=show.console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None, done="listening")

        def tell(heard: Heard) -> None:
            done = f"{heard.done_s:.0f} of {heard.total_s:.0f} s"
            progress.update(task, total=heard.total_s, completed=heard.done_s, done=done)

        yield tell
