"""A Dockerfile's steps as a script, in one folder that stands for the root of every stage's image.

Knows what ours uses (FROM, ARG, ENV, COPY, RUN, and what only describes) and refuses the rest. The base image is this
machine: its `python` is the one that runs us. Stages share the folder, for an environment holds its own path: that a
stage copies all that it needs from another is checked, and that it takes nothing else is not.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

DESCRIBES = frozenset({"USER", "WORKDIR", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD"})
# What of a stage's root a step may name; everything else is the base image's.
OWN = re.compile(
    r"(?<![\w.:/-])/(?:opt/diffuse|src|var/cache/diffuse|var/lib/diffuse|var/lib/swarm|usr/local/bin)(?=[/\s\"';:\[]|$)"
)


@dataclass
class Stage:
    """One FROM: where its files are, and what its steps are told."""

    root: Path
    values: dict[str, str] = field(default_factory=dict)
    described: dict[str, str] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)


class Build:
    """Stages of one Dockerfile, built when they are asked for."""

    def __init__(self, file: Path, folder: Path, arguments: dict[str, str]) -> None:
        self._context = file.parent
        self._folder = folder
        self._arguments = arguments
        text = re.sub(r"^#.*\n", "", file.read_text(), flags=re.M).replace("\\\n", " ")
        self._steps: dict[str, list[tuple[str, str]]] = {}
        self._bases: dict[str, str] = {}
        self._global: dict[str, str] = {}
        self._built: dict[str, Stage] = {}
        stage = ""
        for line in filter(None, map(str.strip, text.splitlines())):
            word, _, rest = line.partition(" ")
            if word == "FROM":
                base, _, stage = rest.partition(" AS ")
                self._bases[stage], self._steps[stage] = self._filled(base, self._global), []
            elif stage:
                self._steps[stage].append((word, rest.strip()))
            else:
                assert word == "ARG", line
                name, _, value = rest.partition("=")
                self._global[name] = arguments.get(name, value)

    def build(self, name: str) -> Stage:
        """A stage and what it stands on."""
        if name in self._built:
            return self._built[name]
        base = self._bases[name]
        if base in self._steps:
            below = self.build(base)
            stage = Stage(self._folder, dict(below.values), dict(below.described))
        else:
            assert base.startswith("python:3.11."), base
            stage = Stage(self._folder)
        self._built[name] = stage
        for word, rest in self._steps[name]:
            self._do(stage, word, rest)
        return stage

    def _do(self, stage: Stage, word: str, rest: str) -> None:
        match word:
            case "ARG":
                name, _, value = rest.partition("=")
                stage.values[name] = self._arguments.get(name, value)
            case "ENV":
                stage.values |= dict(part.split("=", 1) for part in shlex.split(rest))
            case "COPY":
                self._copy(stage, rest.split())
            case "RUN":
                self._run(stage, rest)
            case _ if word in DESCRIBES:
                stage.described[word] = rest
            case _:
                raise AssertionError(f"{word} is not understood")

    def _copy(self, stage: Stage, words: list[str]) -> None:
        if words[0].startswith("--from="):
            other, source, target = words
            self.build(other.removeprefix("--from="))
            assert source == target, "stages share their folder"
            assert (stage.root / source.lstrip("/")).exists(), source
            return
        sources = [self._context / word for word in words[:-1]]
        target = stage.root / words[-1].lstrip("/")
        for source in sources:
            into = target / source.name if words[-1].endswith("/") else target
            into.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, into, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, into)

    def _run(self, stage: Stage, script: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("VIRTUAL")}
        environment |= {
            name: self.inside(stage, value) for name, value in stage.values.items() if name != "HOME"
        }
        python = Path(sys.base_prefix) / "bin"
        environment["PATH"] = f"{python}:/usr/sbin:/usr/bin:/sbin:/bin"
        command = self.inside(stage, script)
        done = subprocess.run(
            ["sh", "-ec", command],
            cwd=stage.root,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"RUN {script}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        stage.ran.append(script)

    def inside(self, stage: Stage, text: str) -> str:
        """A text with paths of the image turned into paths under the stage's folder."""
        return OWN.sub(lambda match: f"{stage.root}{match[0]}", text)

    @staticmethod
    def _filled(text: str, values: dict[str, str]) -> str:
        return re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], text)
