"""What is remembered over a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from routing.identity import Identity
from routing.known_peers import MAX_PEERS, KnownPeers
from routing.types import NodeAddress, NodeId

OWN = Identity.generate().node_id


def address(number: int) -> NodeAddress:
    return NodeAddress(NodeId(bytes([number]) * 32), "127.0.0.1", 7000 + number)


def test_peers_and_the_sequence_survive(tmp_path: Path) -> None:
    known = KnownPeers(tmp_path, OWN)
    known.note(address(1))
    known.note(address(2))
    known.note(address(1))
    assert known.next_sequence(500) == 500
    again = KnownPeers(tmp_path, OWN)
    assert again.addresses == (address(1), address(2))
    assert again.next_sequence(400) == 501
    assert again.next_sequence(400, above=900) == 901


def test_two_identities_in_one_folder_do_not_share(tmp_path: Path) -> None:
    KnownPeers(tmp_path, OWN).next_sequence(500)
    other = KnownPeers(tmp_path, Identity.generate().node_id)
    assert other.sequence == -1
    other.next_sequence(1)
    assert {path.name for path in tmp_path.iterdir()} > {f"peers-{OWN.hex()[:16]}.json"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        '{"sequence": "x", "peers": []}',
        '{"sequence": true, "peers": []}',
        '{"sequence": 9223372036854775806, "peers": []}',  # it would leave none to sign with
        '{"sequence": 1, "peers": ["nobody"]}',
        "\x00",
    ],
)
def test_a_broken_file_is_started_anew_with_a_word(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    KnownPeers(tmp_path, OWN).next_sequence(500)
    path = next(tmp_path.iterdir())
    path.write_text(text)
    known = KnownPeers(tmp_path, OWN)
    assert (known.sequence, known.addresses) == (-1, ())
    assert "cannot be read" in caplog.text
    known.next_sequence(600)
    assert KnownPeers(tmp_path, OWN).sequence == 600


def test_a_folder_that_cannot_be_written_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    known = KnownPeers(blocked, OWN)
    assert [known.next_sequence(5), known.next_sequence(5)] == [5, 6]
    assert caplog.text.count("cannot keep") == 1


def test_only_the_latest_peers_are_kept(tmp_path: Path) -> None:
    known = KnownPeers(tmp_path, OWN)
    for number in range(MAX_PEERS + 10):
        known.note(address(number))
    assert len(known.addresses) == MAX_PEERS
    assert known.addresses[0] == address(MAX_PEERS + 9)
