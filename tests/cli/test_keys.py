"""Key files: private, never overwritten, never printed."""

from __future__ import annotations

import stat
from pathlib import Path

from tests.cli.conftest import Diffuse


def test_a_new_key_is_private_and_its_id_is_printed(diffuse: Diffuse, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "node.key"
    made = diffuse("keys", "new", str(path))
    shown = diffuse("keys", "show", str(path))
    assert made.exit_code == shown.exit_code == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert made.stdout == shown.stdout
    assert len(made.stdout.split()[0]) == 64
    assert path.read_bytes().hex() not in made.stdout


def test_an_existing_key_is_not_overwritten(diffuse: Diffuse, tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    diffuse("keys", "new", str(path))
    before = path.read_bytes()
    again = diffuse("keys", "new", str(path))
    assert again.exit_code == 1
    assert "not overwritten" in again.stderr
    assert path.read_bytes() == before


def test_a_key_that_is_not_there_is_told_with_the_command(diffuse: Diffuse, tmp_path: Path) -> None:
    result = diffuse("keys", "show", str(tmp_path / "none.key"))
    assert result.exit_code == 1
    assert "`diffuse keys new` makes one" in result.stderr


def test_a_key_that_others_can_read_is_refused_with_the_cure(diffuse: Diffuse, tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    diffuse("keys", "new", str(path))
    path.chmod(0o644)
    result = diffuse("keys", "show", str(path))
    assert result.exit_code == 1
    assert f"chmod 600 {path}" in result.stderr
