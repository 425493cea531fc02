"""Key files: private, never overwritten, never printed."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest
from click.testing import Result

from app.keys import ApiKey, digest_of
from app.keys_file import read_keys
from cli.key_files import live_move, load_or_make, rotate
from cli.membership import network_id
from routing.guest_token import GuestScope, parse_guest_token, read_guest_token
from routing.identity import Identity
from routing.moved import read_moved
from tests.cli.conftest import Diffuse


def test_a_new_key_is_private_and_its_id_is_printed(diffuse: Diffuse, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "node.key"
    made = diffuse("keys", "new", str(path))
    shown = diffuse("keys", "show", str(path))
    assert made.exit_code == shown.exit_code == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert made.stdout == shown.stdout
    assert len(made.stdout.split()[0]) == 64
    assert f"public key {Identity.load(path).public_key.hex()}\n" in made.stdout
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


# --- rotation


def rotated(diffuse: Diffuse, tmp_path: Path) -> tuple[Path, Identity, Result]:
    path = tmp_path / "node.key"
    diffuse("keys", "new", str(path))
    return path, Identity.load(path), diffuse("keys", "rotate", str(path))


def test_a_rotated_key_is_new_and_says_what_it_was(diffuse: Diffuse, tmp_path: Path) -> None:
    path, old, result = rotated(diffuse, tmp_path)
    new = Identity.load(path)
    assert result.exit_code == 0, result.stderr
    assert new.node_id != old.node_id
    assert Identity.load(tmp_path / "node.key.old").node_id == old.node_id
    moved = read_moved(live_move(path, new))
    assert (moved.old_id, moved.new_id) == (old.node_id, new.node_id)
    for told in (result.stdout, diffuse("keys", "show", str(path)).stdout):
        assert f"moved from {old.node_id.hex()} on " in told


def test_a_second_rotation_waits_until_the_first_is_known(diffuse: Diffuse, tmp_path: Path) -> None:
    path, _, _ = rotated(diffuse, tmp_path)
    before = path.read_bytes()
    again = diffuse("keys", "rotate", str(path))
    assert again.exit_code == 1
    assert "was rotated less than 7 days ago" in again.stderr
    assert path.read_bytes() == before
    in_a_week = time.time() + 7 * 24 * 3600
    rotate(path, now=lambda: in_a_week)
    assert path.read_bytes() != before


def test_a_move_is_over_after_a_week_and_belongs_to_one_key(diffuse: Diffuse, tmp_path: Path) -> None:
    path, old, _ = rotated(diffuse, tmp_path)
    new, in_a_week = Identity.load(path), time.time() + 7 * 24 * 3600
    assert live_move(path, old) == live_move(path, new, now=lambda: in_a_week) == b""
    path.with_name("node.key.moved").write_bytes(b"garbage")
    assert live_move(path, new) == b""


def test_an_interrupted_rotation_leaves_the_old_key_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "node.key"
    old = load_or_make(path)

    def crash(self: Path, target: Path) -> Path:
        raise OSError("power cut")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "replace", crash)
        with pytest.raises(OSError, match="power cut"):
            rotate(path)
    assert Identity.load(path).node_id == old.node_id
    assert live_move(path, old) == b""
    assert rotate(path).old_id == old.node_id


# --- guests


def test_a_guest_token_is_one_line_that_a_list_with_the_issuer_honours(
    diffuse: Diffuse, tmp_path: Path
) -> None:
    path, client = tmp_path / "node.key", Identity.generate().node_id
    issuer = load_or_make(path)
    result = diffuse(
        "keys", "guest", str(path), "--client", client.hex(), "--expires", "2h", "--network", "home"
    )
    assert result.exit_code == 0, result.stderr
    assert f"issuer {issuer.public_key.hex()}" in result.stderr
    token = read_guest_token(parse_guest_token(result.stdout), network_id("home"), now_s=time.time())
    assert (token.issuer_key, token.client_id, token.scope) == (issuer.public_key, client, GuestScope.USE)
    assert token.expires_s - token.issued_s == 7200


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--expires", "8d"), "7 days at most"),
        (("--expires", "soon"), "give a time like 30m, 24h or 7d"),
        (("--client", "anna"), "64 hex digits"),
        (("--quota", "0"), "--quota"),
        (("--scope", "own"), "--scope"),
    ],
)
def test_a_wrong_term_is_told(flags: tuple[str, ...], said: str, diffuse: Diffuse, tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    load_or_make(path)
    result = diffuse("keys", "guest", str(path), *flags)
    assert result.exit_code != 0
    assert said in result.stderr
    assert result.stdout == ""


# --- API keys of a gateway


def test_an_api_key_is_printed_once_and_only_its_hash_is_kept(diffuse: Diffuse, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "keys.toml"
    made = diffuse("keys", "api", "--name", "anna", "--keys-file", str(path))
    assert made.exit_code == 0
    key = made.stdout.strip()
    assert key.startswith("sk-")
    assert len(key) > 40
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key not in path.read_text()
    assert key not in made.stderr
    assert str(path) in made.stderr
    assert read_keys(path) == (ApiKey(digest_of(key), "anna"),)


def test_limits_of_an_api_key_stand_in_its_entry(diffuse: Diffuse, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    flags = [
        "--model",
        "smollm2",
        "--model",
        'a "b" c',
        "--requests-per-minute",
        "60",
        "--max-concurrent",
        "4",
    ]
    before = time.time()
    made = diffuse(
        "keys", "api", "--name", "anna@example.org", "--keys-file", str(path), *flags, "--expires", "30d"
    )
    (key,) = read_keys(path)
    assert (key.digest, key.name) == (digest_of(made.stdout.strip()), "anna@example.org")
    assert key.models == {"smollm2", 'a "b" c'}
    assert (key.requests_per_minute, key.max_concurrent) == (60, 4)
    assert before - 1 <= key.expires_s - 30 * 24 * 3600 <= time.time()


def test_another_api_key_leaves_what_stands_in_the_file(diffuse: Diffuse, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    diffuse("keys", "api", "--name", "anna", "--keys-file", str(path))
    path.write_text("# mine\n" + path.read_text().rstrip("\n"))
    before = path.read_text()
    diffuse("keys", "api", "--name", "bert", "--keys-file", str(path))
    assert path.read_text().startswith(before)
    assert [key.name for key in read_keys(path)] == ["anna", "bert"]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "name", "said"),
    [
        ('[[keys]]\nname = "anna"\nsha256 = "' + "ab" * 32 + '"\n', "anna", "a key named anna already"),
        ("[[keys]", "anna", "is no TOML"),
        ("keys = []\n", "anna", "is no TOML"),
        ("", "a b", "letters, digits"),
        ("", 'a"', "letters, digits"),
    ],
)
def test_an_api_key_that_cannot_be_added_changes_nothing(
    diffuse: Diffuse, tmp_path: Path, content: str, name: str, said: str
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(content)
    path.chmod(0o600)
    refused = diffuse("keys", "api", "--name", name, "--keys-file", str(path))
    assert refused.exit_code != 0
    assert said in " ".join(refused.stderr.replace("│", " ").split())
    assert refused.stdout == ""
    assert path.read_text() == content
