from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.address_policy import (
    AddressFault,
    AddressKind,
    AddressPolicy,
    Scope,
    canonical_host,
    kind_of,
    prefixes_of,
    scope_of,
)

LOOPBACK = ("127.0.0.1", "127.9.9.9", "::1")
PRIVATE = ("10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1", "fd00::1")
PUBLIC = ("1.1.1.1", "172.32.0.1", "100.128.0.1", "192.169.0.1", "2a00::1")
NEVER = (
    "0.0.0.0",
    "0.1.2.3",
    "169.254.1.1",
    "224.0.0.1",
    "239.255.255.255",
    "255.255.255.255",
    "192.0.2.1",
    "198.51.100.7",
    "203.0.113.9",
    "::",
    "fe80::1",
    "fe80::1%eth0",
    "ff02::1",
    "2001:db8::1",
    "2002:7f00:1::",  # 6to4 of 127.0.0.1
    "2001::1",  # Teredo
    "64:ff9b::7f00:1",  # NAT64 of 127.0.0.1
    "fec0::1",
)


@pytest.mark.parametrize(
    ("scope", "accepted", "refused"),
    [
        (Scope.LOOPBACK, LOOPBACK + PRIVATE + PUBLIC, NEVER),
        (Scope.LAN, PRIVATE + PUBLIC, LOOPBACK + NEVER),
        (Scope.PUBLIC, PUBLIC, LOOPBACK + PRIVATE + NEVER),
    ],
)
def test_each_scope_takes_its_own_addresses_and_wider_ones(
    scope: Scope, accepted: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    policy = AddressPolicy(scope)
    assert {host for host in accepted if policy.check(host, 9000)} == set()
    assert {host for host in refused if policy.check(host, 9000) is None} == set()


def test_every_refusal_says_why() -> None:
    policy = AddressPolicy(Scope.PUBLIC)
    assert policy.check("node.example.com", 9000) is AddressFault.NOT_LITERAL
    assert policy.check("localhost", 9000) is AddressFault.NOT_LITERAL
    assert policy.check("2A00:0::1", 9000) is AddressFault.NOT_CANONICAL
    assert policy.check("0.0.0.0", 9000) is AddressFault.UNUSABLE
    assert policy.check("192.168.0.1", 9000) is AddressFault.TOO_NARROW
    assert policy.check("1.1.1.1", 0) is AddressFault.PORT
    assert policy.check("1.1.1.1", 65536) is AddressFault.PORT


@pytest.mark.parametrize("host", ["::ffff:127.0.0.1", "::ffff:1.1.1.1", "::ffff:0.0.0.0"])
@pytest.mark.parametrize("scope", Scope)
def test_an_ipv4_address_in_ipv6_clothes_is_never_announced(scope: Scope, host: str) -> None:
    assert AddressPolicy(scope).check(host, 9000) is AddressFault.NOT_CANONICAL
    assert kind_of(host) is kind_of(host.removeprefix("::ffff:"))


def test_an_observed_host_is_brought_into_its_one_form() -> None:
    assert canonical_host("::ffff:1.2.3.4") == "1.2.3.4"
    assert canonical_host("2A00:0:0::1") == "2a00::1"
    assert canonical_host("example.com") is None


def test_automatic_scope_is_the_widest_that_an_address_shows() -> None:
    assert scope_of([]) is Scope.LOOPBACK
    assert scope_of(["127.0.0.1", "0.0.0.0"]) is Scope.LOOPBACK
    assert scope_of(["127.0.0.1", "192.168.0.2"]) is Scope.LAN
    assert scope_of(["192.168.0.2", "1.1.1.1"]) is Scope.PUBLIC
    assert scope_of(["some.name"]) is Scope.LOOPBACK


def test_prefix_caps_hold_in_open_public_swarms_only() -> None:
    assert AddressPolicy(Scope.PUBLIC).has_prefix_caps
    assert not AddressPolicy(Scope.PUBLIC, is_private_swarm=True).has_prefix_caps
    assert not AddressPolicy(Scope.LAN).has_prefix_caps
    assert not AddressPolicy(Scope.LOOPBACK).has_prefix_caps


def test_prefixes_are_24_and_16_or_48_and_32_bits() -> None:
    assert prefixes_of("1.2.3.4") == (b"\1\2\3", b"\1\2")
    assert prefixes_of("::ffff:1.2.3.4") == prefixes_of("1.2.3.9")
    narrow, wide = prefixes_of("2a00:1:2:3::4")
    assert (len(narrow), len(wide)) == (6, 4)
    with pytest.raises(ValueError, match="no prefix"):
        prefixes_of("example.com")


@given(st.ip_addresses(), st.sampled_from(Scope))
def test_a_public_scope_takes_nothing_that_the_standard_library_calls_special(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, scope: Scope
) -> None:
    host = str(address)
    if AddressPolicy(Scope.PUBLIC).check(host, 1) is None:
        special = (address.is_loopback, address.is_link_local, address.is_multicast, address.is_unspecified)
        assert not any((*special, address.is_reserved))
        assert kind_of(host) is AddressKind.PUBLIC
        assert AddressPolicy(scope).check(host, 1) is None


@given(st.text(max_size=60), st.integers(-5, 70_000))
def test_any_text_is_judged_without_an_error(host: str, port: int) -> None:
    AddressPolicy(Scope.LOOPBACK).check(host, port)
    kind_of(host)
