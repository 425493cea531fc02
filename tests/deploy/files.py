"""What `deploy/` and the files beside it say, read as the tools read them: commands, settings, alerts, dashboards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


@dataclass(frozen=True)
class Command:
    """One command line of `diffuse` somewhere; `where` is for the reader of a failure."""

    where: str
    words: tuple[str, ...]  # behind `diffuse`

    def flag(self, name: str) -> str | None:
        """The value of a flag, written with a space or with `=`."""
        for word, after in zip(self.words, (*self.words[1:], ""), strict=True):
            if word == name:
                return after
            if word.startswith(f"{name}="):
                return word.partition("=")[2]
        return None


def compose(environment: dict[str, str] | None = None) -> dict[str, Any]:
    """compose.yaml with variables put in, as `docker compose` does: `${NAME:-default}`, `$$` is a `$`."""
    values = environment or {}

    def put(match: re.Match[str]) -> str:
        return values.get(match[1]) or match[2] or ""

    def fill(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: fill(value) for key, value in part.items()}
        if isinstance(part, list):
            return [fill(item) for item in part]
        return VARIABLE.sub(put, part).replace("$$", "$") if isinstance(part, str) else part

    filled = fill(yaml.safe_load((ROOT / "compose.yaml").read_text()))
    assert isinstance(filled, dict)
    return filled


def compose_variables() -> set[str]:
    """Every variable that compose.yaml asks .env for."""
    return {match[1] for match in re.finditer(r"(?<!\$)\$\{(\w+)", (ROOT / "compose.yaml").read_text())}


def manifests() -> list[dict[str, Any]]:
    """Every Kubernetes object."""
    files = sorted(path for path in KUBERNETES.glob("*.yaml") if path.name != "kustomization.yaml")
    return [part for path in files for part in yaml.safe_load_all(path.read_text())]


def pods() -> list[tuple[str, dict[str, Any]]]:
    """The pods of every Deployment and StatefulSet, by their name."""
    return [
        (manifest["metadata"]["name"], manifest["spec"]["template"]["spec"])
        for manifest in manifests()
        if manifest["kind"] in ("Deployment", "StatefulSet")
    ]


def commands() -> list[Command]:
    """Every command line of `diffuse` that compose, Kubernetes and systemd run."""
    return [*_compose_commands(), *_pod_commands(), *_unit_commands()]


def _compose_commands() -> Iterator[Command]:
    for name, service in compose().get("services", {}).items():
        if service["image"].startswith("diffuse:"):
            yield Command(f"compose {name}", _joined([*service["entrypoint"], *service["command"]]))


def _pod_commands() -> Iterator[Command]:
    for name, pod in pods():
        for container in pod["containers"]:
            if container["image"].startswith("diffuse:"):
                yield Command(f"kubernetes {name}", _joined([*container["command"], *container["args"]]))


def _unit_commands() -> Iterator[Command]:
    for path in sorted((DEPLOY / "systemd").glob("*.service")):
        text = path.read_text()
        values = dict(
            part.split("=", 1)
            for line in re.findall(r"^Environment=(.*)", text, re.M)
            for part in line.split()
        )
        line = re.search(r"^ExecStart=/opt/diffuse/bin/diffuse (\w+) \$FLAGS$", text, re.M)
        assert line is not None, path
        told = [(name.removeprefix("DIFFUSE_").lower(), value) for name, value in values.items()]
        settings = [
            f"--{name.replace('_', '-')}={value}" for name, value in told if name not in ("home", "flags")
        ]
        yield Command(f"systemd {path.name}", (line[1], *settings))


def _joined(words: list[str]) -> tuple[str, ...]:
    """What `join` and `meet` of the image make of their arguments."""
    match words:
        case ["join", command, *flags]:
            return (command, *flags, "--bootstrap", "ID")
        case ["diffuse", command, *flags]:
            return (command, *flags)
        case ["meet", address, *flags]:
            return ("sentinel", "--key", "KEY", "--public-addr", address, *flags)
    raise AssertionError(f"neither join, meet nor diffuse: {words}")


def alerts() -> dict[str, dict[str, Any]]:
    """Alerts by their name."""
    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def boards() -> dict[str, dict[str, Any]]:
    """Dashboards by the name of their file."""
    return {
        path.stem: json.loads(path.read_text()) for path in (DEPLOY / "grafana" / "dashboards").glob("*.json")
    }
