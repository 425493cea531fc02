"""Whether this machine could take part in a swarm: what `diffuse doctor --bootstrap` finds.

Each question is one finding, with what to do where the answer is bad. `outlook` asks; here it is judged, purely.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from cli import failures, show
from cli.diagnosis import Finding
from cli.membership import Membership
from cli.outlook import Onlooker, Outlook
from cli.survey import name_of
from routing.address_policy import AddressKind, kind_of
from routing.errors import LinkError, RemoteError
from routing.identity import Identity
from routing.types import NodeAddress

SKEW_WARNING_MS: Final = 5_000.0
SKEW_PROBLEM_MS: Final = 30_000.0  # records of the future are refused from 60 s on, and two may differ


async def check_up(
    identity: Identity,
    membership: Membership,
    bootstraps: Sequence[NodeAddress],
    *,
    listen: tuple[str, int] | None = None,
    token: bytes = b"",
) -> list[Finding]:
    """Listen as a node would, ask each sentinel how it sees us, and say what that means."""
    onlooker = Onlooker(identity, membership, token)
    try:
        async with onlooker.listening(*(listen or (_any_host(bootstraps[0].host), 0))):
            outlooks = await onlooker.ask_all(bootstraps)
    except LinkError as error:
        return [Finding("problem", "--listen", f"{error.text}: choose another with --listen")]
    return list(judge(onlooker.bound, outlooks))


def judge(bound: tuple[str, int], outlooks: Sequence[Outlook]) -> Iterator[Finding]:
    """Say what the sentinels' answers mean, one by one and together."""
    yield Finding("ok", "bind", f"{show.host_port(*bound)} was free and took connections")
    for outlook in outlooks:
        yield from _judge_one(outlook)
    answering = [outlook for outlook in outlooks if outlook.error is None]
    if not answering:
        yield Finding(
            "problem",
            "way in",
            "no sentinel answers, so nothing else could be checked: start one, or name another with --bootstrap",
        )
        return
    yield _way_in(answering)


def _judge_one(outlook: Outlook) -> Iterator[Finding]:
    name = name_of(outlook.sentinel).replace("node", "sentinel", 1)
    if outlook.error is not None:
        yield Finding("problem", name, failures.explain(outlook.error))
        return
    yield Finding("ok", name, f"answers, {outlook.rtt_ms or 0:.1f} ms away")
    if outlook.skew_ms is not None:
        yield _clock(name, outlook.skew_ms)
    if outlook.observed is not None:
        yield from _address(name, outlook, outlook.observed)
    yield from _relay(name, outlook)


def _clock(name: str, skew_ms: float) -> Finding:
    side = "ahead of" if skew_ms > 0 else "behind"
    text = f"our clock is {abs(skew_ms) / 1000:.1f} s {side} its own"
    if abs(skew_ms) >= SKEW_PROBLEM_MS:
        return Finding("problem", f"{name}, clock", f"{text}: set this machine's clock, or the sentinel's")
    if abs(skew_ms) >= SKEW_WARNING_MS:
        return Finding("warning", f"{name}, clock", f"{text}: let both machines keep time by the network")
    return Finding("ok", f"{name}, clock", "agrees with ours")


def _address(name: str, outlook: Outlook, observed: tuple[str, int]) -> Iterator[Finding]:
    place = show.host_port(*observed)
    yield Finding("ok", f"{name}, address", f"sees us at {observed[0]}, {_kind(observed[0])}")
    if outlook.dial_back is None:
        yield Finding("ok", f"{name}, dial-back", f"reaches us at {place}: a node here would announce that")
        return
    yield Finding(
        "warning",
        f"{name}, dial-back",
        f"cannot reach us at {place} ({_code(outlook.dial_back)}): forward that TCP port to this machine and give it "
        "with --listen, or let sentinels relay",
    )


def _relay(name: str, outlook: Outlook) -> Iterator[Finding]:
    if outlook.reservation is not None:
        why = _code(outlook.reservation)
        yield Finding(
            "warning", f"{name}, relay", f"gives no reservation ({why}): it may be a plain node, or full"
        )
        return
    yield Finding("ok", f"{name}, relay", "holds a reservation for us")
    if outlook.echo is not None:
        why = failures.explain(outlook.echo)
        yield Finding("problem", f"{name}, echo", f"we do not reach ourselves through it: {why}")
    elif outlook.echo_ms is not None:
        yield Finding("ok", f"{name}, echo", f"{outlook.echo_ms:.1f} ms through it to ourselves and back")


def _way_in(outlooks: Sequence[Outlook]) -> Finding:
    """What a node on this machine would announce."""
    direct = {
        show.host_port(*outlook.observed) for outlook in outlooks if outlook.is_dialled and outlook.observed
    }
    num_relays = sum(outlook.is_relayed for outlook in outlooks)
    relays = f"{num_relays} relay{'' if num_relays == 1 else 's'}"
    if direct:
        return Finding("ok", "way in", f"direct at {', '.join(sorted(direct))}, and through {relays}")
    if num_relays:
        spare = "" if num_relays > 1 else "; with a second sentinel the node outlives the loss of the first"
        return Finding("ok", "way in", f"through {relays} only{spare}")
    return Finding(
        "problem",
        "way in",
        "nobody could reach a node here: open a port to it, or name a sentinel with --bootstrap",
    )


def _kind(host: str) -> str:
    kinds = {
        AddressKind.LOOPBACK: "this machine only",
        AddressKind.PRIVATE: "a private address: in a public swarm it is not announced",
        AddressKind.PUBLIC: "a public address",
    }
    return kinds.get(kind_of(host), "which is never announced")


def _code(error: RemoteError) -> str:
    return f"E{int(error.code)} {error.code.name}"


def _any_host(bootstrap_host: str) -> str:
    """What a node would bind to be seen by that bootstrap: every interface, or this machine alone."""
    if kind_of(bootstrap_host) is AddressKind.LOOPBACK:
        return bootstrap_host
    return "::" if ":" in bootstrap_host else "0.0.0.0"  # noqa: S104 - as a node that is to be dialled
