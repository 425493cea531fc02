"""Statements that a key has moved."""

from __future__ import annotations

import pytest

from routing.errors import SecurityError
from routing.identity import CLOCK_SKEW_S, Identity
from routing.moved import LIFETIME_S, MOVED_SIZE, read_moved, sign_moved

NOW_S = 1_800_000_000


def test_a_statement_names_both_keys() -> None:
    old, new = Identity.generate(), Identity.generate()
    statement = sign_moved(old, new, NOW_S)
    moved = read_moved(statement)
    assert len(statement) == MOVED_SIZE == 200
    assert (moved.old_id, moved.new_id, moved.issued_s) == (old.node_id, new.node_id, NOW_S)


@pytest.mark.parametrize("at", [0, 40, 70, 80, 199])
def test_a_changed_statement_is_refused(at: int) -> None:
    statement = bytearray(sign_moved(Identity.generate(), Identity.generate(), NOW_S))
    statement[at] ^= 1
    with pytest.raises(SecurityError, match="not signed by both keys"):
        read_moved(bytes(statement))


def test_one_key_cannot_speak_for_the_other() -> None:
    old, new, thief = Identity.generate(), Identity.generate(), Identity.generate()
    statement, stolen = sign_moved(old, new, NOW_S), sign_moved(thief, new, NOW_S)
    with pytest.raises(SecurityError):
        read_moved(old.public_key + stolen[32:])
    with pytest.raises(SecurityError):
        read_moved(statement[:32] + thief.public_key + statement[64:])
    with pytest.raises(SecurityError, match="wrong size"):
        read_moved(statement[:-1])


@pytest.mark.parametrize(
    ("now_s", "is_live"),
    [
        (NOW_S, True),
        (NOW_S + LIFETIME_S - 1, True),
        (NOW_S + LIFETIME_S, False),
        (NOW_S - CLOCK_SKEW_S, True),
        (NOW_S - CLOCK_SKEW_S - 1, False),
    ],
)
def test_a_statement_holds_for_a_week(now_s: int, is_live: bool) -> None:
    moved = read_moved(sign_moved(Identity.generate(), Identity.generate(), NOW_S))
    assert moved.is_live(now_s) is is_live
