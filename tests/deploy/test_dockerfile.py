"""The Dockerfile's steps in a clean folder, from the registries: gigabytes and minutes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.dockerfile import Build, Stage
from tests.deploy.files import ROOT

pytestmark = [pytest.mark.deploy_image, pytest.mark.timeout(3600)]

SIZE_BYTES = 8 << 30  # most that may be installed; with the processor's torch it is a fraction of it


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The target `cpu`, from the index that pip is set to: the one in the Dockerfile is for who reaches it."""
    if os.geteuid() != 0:
        pytest.skip("not root")
    if not sys.version.startswith("3.11."):
        pytest.skip("the image has Python 3.11")
    folder = tmp_path_factory.mktemp("image")
    build = Build(
        ROOT / "Dockerfile", folder, {"TORCH_INDEX": os.environ.get("TORCH_INDEX", folder.as_uri())}
    )
    try:
        yield build.build("cpu")
    finally:
        shutil.rmtree(folder)


def run(image: Stage, tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the image as its user would, with folders of its own."""
    environment = {
        "PATH": f"{image.root}/opt/diffuse/bin:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "DIFFUSE_CACHE_DIR": str(tmp_path / "cache"),
        "DIFFUSE_STATE_DIR": str(tmp_path / "state"),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        list(words), env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )


def test_the_image_has_its_programs_and_no_pip(image: Stage, tmp_path: Path) -> None:
    for name in ("join", "meet", "healthy"):
        assert os.access(image.root / "usr" / "local" / "bin" / name, os.X_OK)
    for command in ("sentinel", "host", "serve"):
        helped = run(image, tmp_path, "diffuse", command, "--help")
        assert helped.returncode == 0, helped.stderr
    assert run(image, tmp_path, "python", "-m", "pip", "--version").returncode != 0


def test_it_installs_what_the_constraints_say(image: Stage, tmp_path: Path) -> None:
    listing = """
import importlib.metadata, json
named = {each.name.lower().replace("_", "-"): each.version for each in importlib.metadata.distributions()}
print(json.dumps(named))
"""
    installed = json.loads(run(image, tmp_path, "python", "-c", listing).stdout)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(
        line.lower().replace("_", "-").split("==")
        for line in lines
        if "==" in line and not line.startswith("#")
    )
    differing = {
        name: installed[name] for name, pin in pins.items() if installed.get(name, pin).split("+")[0] != pin
    }
    assert not differing
    assert "pytest" not in installed


def test_the_packaged_model_is_in_it(image: Stage, tmp_path: Path) -> None:
    done = run(image, tmp_path, "diffuse", "prepare", "--model", "smollm2", "--events", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["num_layers"] == 30


def test_folders_belong_to_the_user_and_nothing_is_writable_but_them(image: Stage) -> None:
    for path in ("var/cache/diffuse", "var/lib/diffuse", "var/lib/swarm"):
        told = (image.root / path).stat()
        assert (told.st_uid, told.st_mode & 0o777) == (10001, 0o700)
    assert image.described["USER"] == "10001:10001"
    assert image.described["ENTRYPOINT"] == '["diffuse"]'


def test_it_is_no_larger_than_it_may_be(image: Stage) -> None:
    size = sum(path.lstat().st_size for path in image.root.rglob("*") if not path.is_symlink())
    assert size < SIZE_BYTES, f"{size / 1e9:.2f} GB"
