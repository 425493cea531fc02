"""Guest tokens: who issued them, for whom, for how long."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.errors import SecurityError, SettingsError
from routing.guest_token import (
    MAX_LIFETIME_S,
    GuestScope,
    format_guest_token,
    parse_guest_token,
    read_guest_token,
    sign_guest_token,
)
from routing.identity import CLOCK_SKEW_S, Identity

NETWORK = b"n" * 32
NOW_S = 1_800_000_000
ISSUER, CLIENT = Identity.generate(), Identity.generate()


def token(**changes: Any) -> bytes:
    terms: dict[str, Any] = {"client_id": CLIENT.node_id, "now_s": NOW_S, "lifetime_s": 3600, "quota": 3}
    return sign_guest_token(ISSUER, NETWORK, **terms | changes)


def test_a_token_says_who_may_do_what_until_when() -> None:
    content = token(scope=GuestScope.SERVE)
    read = read_guest_token(content, NETWORK, now_s=NOW_S)
    assert len(content) <= 200
    assert (read.issuer_key, read.client_id, read.scope) == (
        ISSUER.public_key,
        CLIENT.node_id,
        GuestScope.SERVE,
    )
    assert (read.expires_s, read.quota) == (NOW_S + 3600, 3)
    assert read_guest_token(token(client_id=None), NETWORK, now_s=NOW_S).client_id is None


@given(at=st.integers(0, 146), bit=st.integers(0, 7))
def test_no_bit_of_a_token_can_be_changed(at: int, bit: int) -> None:
    content = bytearray(token())
    content[at] ^= 1 << bit
    with pytest.raises(SecurityError):
        read_guest_token(bytes(content), NETWORK, now_s=NOW_S)


def test_a_token_counts_in_its_network_only() -> None:
    with pytest.raises(SecurityError, match="not signed by its issuer for this network"):
        read_guest_token(token(), b"m" * 32, now_s=NOW_S)


def test_a_token_counts_in_its_time_only() -> None:
    with pytest.raises(SecurityError, match="has expired"):
        read_guest_token(token(), NETWORK, now_s=NOW_S + 3600)
    with pytest.raises(SecurityError, match="compare clocks"):
        read_guest_token(token(), NETWORK, now_s=NOW_S - CLOCK_SKEW_S - 1)


def test_a_token_lives_for_a_week_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    for lifetime_s in (0, MAX_LIFETIME_S + 1):
        with pytest.raises(SettingsError, match="7 days at most"):
            token(lifetime_s=lifetime_s)
    monkeypatch.setattr("routing.guest_token.MAX_LIFETIME_S", 2 * MAX_LIFETIME_S)
    generous = token(lifetime_s=MAX_LIFETIME_S + 1)  # by an issuer who does not keep the rule
    monkeypatch.undo()
    with pytest.raises(SecurityError, match="lifetime over 7 days"):
        read_guest_token(generous, NETWORK, now_s=NOW_S + MAX_LIFETIME_S)


@pytest.mark.parametrize("quota", [0, 1 << 16])
def test_a_quota_is_a_number_of_sessions(quota: int) -> None:
    with pytest.raises(SettingsError, match="sessions at once"):
        token(quota=quota)


def test_a_token_travels_as_one_line_of_text() -> None:
    text = format_guest_token(token())
    assert text.startswith("diffuse-guest-")
    assert parse_guest_token(f" {text}\n") == token()
    for wrong in ("", text[:-4], "diffuse-guest-é", text + "!"):
        with pytest.raises(SettingsError, match="whole line"):
            parse_guest_token(wrong)
