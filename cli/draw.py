"""`diffuse query` for a model that makes no text: a file beside the user, a bar while it is made, a line at the end."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
import unicodedata
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from cli import show
from cli.drawing import SUFFIXES, Drawer, Drawn, Order, Said, StepTold
from cli.failures import CommandError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

NAME_CHARS: Final = 48  # of the prompt, in a file's name
MAX_NAMES: Final = 10_000  # tries before a folder is said to be full of them
WORDS_FOR: Final = {"image": "picture", "video": "video", "audio": "sound"}


async def draw(drawer: Drawer, order: Order, out: Path | None, *, as_json: bool) -> None:
    """Make one thing and keep it as a file; nothing is ever written over. Raises CommandError."""
    check_order(drawer.output, order)
    path, is_ours = chosen_path(out, drawer.output, order.prompt)
    check_folder(path.parent)
    began = time.perf_counter()
    drawn: Drawn | None = None
    with _bar(is_shown=not as_json) as bar:
        async with aclosing(drawer.draw(order, path.suffix.lower())) as telling:
            async for told in telling:
                match told:
                    case StepTold():
                        bar.step(told)
                    case Said():
                        bar.say(told.text)
                    case Drawn():
                        drawn = told
    if drawn is None:
        raise CommandError("nothing was made, and nobody says why")
    kept = keep(path, drawn.content, is_ours=is_ours)
    total_s = time.perf_counter() - began
    if as_json:
        show.print_json(_as_object(drawer, drawn, bar, kept, total_s))
        return
    show.out(str(kept))
    show.note(_line(drawn, bar, total_s))


def check_order(output: str, order: Order) -> None:
    """Refuse what a model of this kind cannot be told. Raises a usage error."""
    lengths = {"--frames": (order.frames, ("video",)), "--seconds": (order.seconds, ("video", "audio"))}
    for flag, (value, outputs) in (lengths | {"--size": (order.size, ("image", "video"))}).items():
        if value is not None and output not in outputs:
            raise typer.BadParameter(f"a {WORDS_FOR[output]} has none", param_hint=f"'{flag}'")
    if order.frames is not None and order.seconds is not None:
        raise typer.BadParameter("give --frames or --seconds, not both", param_hint="'--frames'")


def chosen_path(out: Path | None, output: str, prompt: str) -> tuple[Path, bool]:
    """Where the file goes, and whether the name is ours, of the prompt's words. Raises a usage error."""
    suffixes = SUFFIXES[output]
    if out is None or out.is_dir():
        return (out or Path()) / f"{name_from(prompt)}{suffixes[0]}", True
    if out.suffix.lower() not in suffixes:
        known = ", ".join(suffixes)
        raise typer.BadParameter(f"a {WORDS_FOR[output]}'s file ends in {known}", param_hint="'--out'")
    if out.exists():
        raise typer.BadParameter(f"{out} is there already, and is not written over", param_hint="'--out'")
    if not out.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {out.parent}", param_hint="'--out'")
    return out, False


def check_folder(folder: Path) -> None:
    """Write nothing into a folder, to know before the work that the file can be kept. Raises CommandError."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise CommandError(f"no file can be made in {folder.absolute()}: {error.strerror}") from None


def name_from(prompt: str) -> str:
    """A harmless file name of the prompt's first words."""
    plain = unicodedata.normalize("NFKC", prompt).casefold()
    words = "-".join(re.findall(r"\w+", plain))[:NAME_CHARS].strip("-_")
    return words or "untitled"


def keep(path: Path, content: bytes, *, is_ours: bool) -> Path:
    """Write a file that was not there before; a name of our own gets a number where it is taken."""
    for number in range(1, MAX_NAMES):
        here = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        try:
            with here.open("xb") as file:
                try:
                    file.write(content)
                except OSError:
                    here.unlink(missing_ok=True)  # a half is worth nothing
                    raise
        except FileExistsError:
            if not is_ours:
                raise CommandError(f"{path} is there meanwhile, and is not written over") from None
            continue
        return here
    raise CommandError(f"{path.parent} holds too many files of this name: give --out")


class _Steps:
    """What was told of the steps; draws nothing."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.seconds = 0.0

    @property
    def seconds_per_step(self) -> float:
        return self.seconds / self.num_steps if self.num_steps else 0.0

    def step(self, told: StepTold) -> None:
        self.num_steps = told.number
        self.seconds += told.seconds

    def say(self, text: str) -> None:
        """Tell a person something."""
        show.note(show.printable(text))


class _Bar(_Steps):
    """The same, with a bar on the terminal."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        super().__init__()
        self._progress = progress
        self._task = task

    def step(self, told: StepTold) -> None:
        super().step(told)
        pace = f"{show.seconds(self.seconds_per_step)} a step"
        self._progress.update(self._task, total=told.of, completed=told.number, pace=pace)

    def say(self, text: str) -> None:
        self._progress.console.print(show.printable(text), markup=False)


@contextmanager
def _bar(*, is_shown: bool) -> Iterator[_Steps]:
    """A bar on standard error where that is a terminal."""
    if not (is_shown and sys.stderr.isatty()) or os.environ.get("TERM") == "dumb":
        yield _Steps()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[pace]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=show.console(stderr=True), transient=True) as progress:
        yield _Bar(progress, progress.add_task("", total=None, pace="waiting"))


def _line(drawn: Drawn, steps: _Steps, total_s: float) -> str:
    """One line: total, steps, and where a step's time went, as far as that is known."""
    parts = [f"total {show.seconds(total_s)}"]
    if steps.num_steps:
        plural = "" if steps.num_steps == 1 else "s"
        parts.append(f"{steps.num_steps} step{plural}, {show.seconds(steps.seconds_per_step)} each")
    shares = {name: drawn.timings.get(f"{name}_s") for name in ("compute", "network")}
    parts += [f"{name} {show.seconds(float(value))}" for name, value in shares.items() if value]
    if busy := drawn.timings.get("busy"):
        parts.append("stages busy " + ", ".join(f"{share:.0%}" for share in busy))
    parts.append(f"seed {drawn.seed}")
    return " | ".join(parts)


def _as_object(drawer: Drawer, drawn: Drawn, steps: _Steps, path: Path, total_s: float) -> dict[str, Any]:
    return {
        "model": drawer.model,
        "file": str(path),
        "bytes": len(drawn.content),
        "seed": drawn.seed,
        "steps": steps.num_steps,
        "seconds_per_step": steps.seconds_per_step,
        "total_s": total_s,
        "timings": drawn.timings,
        "replays": drawn.replays,
        "system_fingerprint": drawn.fingerprint,
    }
