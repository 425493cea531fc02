"""The environments that other people's clients live in: made under `.clients`, from pinned lists, beside our own.

One whose packages cannot be had is told with the reason, and what needs it is skipped.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import wave
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LISTS = Path("tests/clients/envs")
DRIVERS = Path("tests/clients/drivers")
HOME = Path(".clients")
NODE = "node"
PYTHONS = ("py-v3", "py-v1", "py-agents")
SDK_VERSION = "3.57.0"  # of openai-python, whose source distribution holds its API tests
SDK = f"openai-{SDK_VERSION}"
# Those tests are made from a schema: they send two words as a recording, and ask Responses without a model or an input.
SILENCE = "silence.wav"
A_SOUND = f'__import__("pathlib").Path(__file__).with_name("{SILENCE}").read_bytes()'
A_QUESTION = '.create(model="gpt-6-astra", input="hello", '
GIVEN = (
    ("audio/test_transcriptions.py", r'b"Example data"', A_SOUND),
    ("audio/test_translations.py", r'b"Example data"', A_SOUND),
    ("test_responses.py", r"\.create\((?=\)|\s+stream=True,\s+\))", A_QUESTION),
)


@dataclass(frozen=True)
class Environment:
    """One environment. `missing` says why it is not there."""

    name: str
    folder: Path
    missing: str = ""

    def python(self) -> str:
        return str(self.folder / "bin" / "python")


def environments() -> dict[str, Environment]:
    """Make what is not there yet, or was made from another list; tell of what takes long."""
    HOME.mkdir(exist_ok=True)
    made = {name: _made(name, LISTS / f"{name}.txt", _make_python) for name in PYTHONS}
    made[NODE] = _made(NODE, LISTS / "node" / "package-lock.json", _make_node)
    made[SDK] = _made(SDK, Path(__file__), _make_sdk)
    if not made[NODE].missing:  # packages are looked for beside the program
        for program in DRIVERS.glob("*.mjs"):
            shutil.copy(program, HOME / NODE / program.name)
    return made


def _made(name: str, source: Path, make: Callable[[Path, Path], None]) -> Environment:
    folder, stamp = HOME / name, HOME / f"{name}.made"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return Environment(name, folder)
    print(f"making {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        make(source, folder)
    except FileNotFoundError as error:
        return Environment(name, folder, f"{error.filename} is not installed")
    except subprocess.TimeoutExpired as error:
        return Environment(name, folder, f"took more than {error.timeout:.0f} s to install")
    except subprocess.CalledProcessError as error:
        lines = [line for line in (error.stderr or "").strip().splitlines() if "WARN" not in line.upper()]
        return Environment(name, folder, f"cannot be installed: {lines[-1] if lines else error}"[:300])
    stamp.write_text(digest)
    return Environment(name, folder)


def _make_python(source: Path, folder: Path) -> None:
    _run(sys.executable, "-m", "venv", str(folder))
    pip = (str(folder / "bin" / "pip"), "--disable-pip-version-check", "-q", "install")
    _run(*pip, "--no-deps", "-r", str(source))  # the list is whole: nothing is left to be chosen


def _make_node(source: Path, folder: Path) -> None:
    folder.mkdir()
    for name in ("package.json", "package-lock.json"):
        shutil.copy(source.with_name(name), folder / name)
    _run("npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(folder))


def _make_sdk(source: Path, folder: Path) -> None:
    """Unpack the source distribution, which has the tests, and give those something that can be answered."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "download")
    _run(*pip, "--no-deps", "--no-binary", "openai", "-d", str(HOME), f"openai=={SDK_VERSION}")
    with tarfile.open(HOME / f"{SDK}.tar.gz") as archive:
        archive.extractall(HOME, filter="data")
    for name, before, after in GIVEN:
        path = folder / "tests" / "api_resources" / name
        path.write_text(re.sub(before, lambda _, words=after: words, path.read_text()))  # type: ignore[misc]
    with wave.open(str(folder / "tests" / "api_resources" / "audio" / SILENCE), "wb") as sound:
        sound.setparams((1, 2, 16_000, 0, "NONE", ""))
        sound.writeframes(bytes(16_000))


def _run(*command: str) -> None:
    settings = os.environ | {"PIP_NO_INPUT": "1"}
    subprocess.run(command, check=True, capture_output=True, text=True, env=settings, timeout=1200)
