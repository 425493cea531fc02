"""`diffuse sentinel`: a meeting point with a public address. It holds no model and needs no torch.

It introduces members to each other, tells them how they are seen from outside, and passes sealed traffic on to those
who cannot be dialled.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cli import options as opt
from cli import panels, show
from cli.settings_command import ConfigOption
from cli.state import RunFile, default_state_dir
from cli.telling import Teller

if TYPE_CHECKING:
    from node.settings import HostPort
    from routing.identity import Identity
    from routing.network import Network, NetworkSettings

OnEvent = Callable[[Mapping[str, Any]], None]

WILDCARDS: Final = ("0.0.0.0", "::")  # noqa: S104 - to tell them from addresses
_ELSEWHERE: Final = {"0.0.0.0": "192.0.2.1", "::": "2001:db8::1"}  # noqa: S104 - documentation: nothing is sent there


ListenOption = Annotated[
    str,
    typer.Option(
        "--listen",
        rich_help_panel=panels.NETWORK,
        metavar="HOST:PORT",
        help="What to bind; 0.0.0.0 is every interface, port 0 takes a free one.",
    ),
]
PublicAddrOption = Annotated[
    str | None,
    typer.Option(
        "--public-addr",
        rich_help_panel=panels.NETWORK,
        metavar="HOST:PORT",
        help="What to tell others, where that differs from --listen.",
    ),
]
KeyOption = Annotated[
    Path | None,
    typer.Option(
        "--key",
        rich_help_panel=panels.NETWORK,
        metavar="FILE",
        help="Identity key file, made if missing. Left out: sentinel.key in the state folder.",
    ),
]


def sentinel(
    config: ConfigOption = None,
    listen: ListenOption = "127.0.0.1:0",
    public_addr: PublicAddrOption = None,
    bootstrap: opt.BootstrapOption = None,
    network: opt.NetworkOption = opt.DEFAULT_NETWORK,
    scope: opt.ScopeOption = opt.Scope.AUTO,
    psk_file: opt.PskFileOption = None,
    key: KeyOption = None,
    allow_file: opt.AllowFileOption = None,
    state_dir: opt.StateDirOption = None,
    tls_cert: opt.TlsCertOption = None,
    tls_key: opt.TlsKeyOption = None,
    tls_ca: opt.TlsCaOption = None,
    log_level: opt.LogLevelOption = opt.LogLevel.WARNING,
    log_format: opt.LogFormatOption = opt.LogFormat.TEXT,
    metrics: opt.MetricsOption = None,
    metrics_open: opt.MetricsOpenOption = False,
    events: opt.EventsOption = opt.Events.TEXT,
    until_eof: opt.UntilEofOption = False,
) -> None:
    """Be a meeting point for a swarm, and print the ID@HOST:PORT that others pass to --bootstrap.

    Ctrl+C, or `diffuse leave`, tells those who use it where else to go; a second Ctrl+C ends at once.
    """
    from cli.runtime import run_fast, run_until_signal, start_logging

    if until_eof:
        from cli.lifeline import end_with_parent

        end_with_parent()
    start_logging(log_level.value, log_format.value, is_service=True)
    from cli.key_files import live_move, load_or_make
    from cli.membership import read_allow_list, read_membership
    from cli.swarm import network_settings
    from routing.tls_files import TlsFiles

    state = state_dir or default_state_dir()
    key_file = key or state / "sentinel.key"
    identity = load_or_make(key_file)
    files = TlsFiles(tls_cert, tls_key, tls_ca)
    membership = read_membership(network, psk_file, files, listens=True)
    bootstraps = opt.parse_addresses(bootstrap, "--bootstrap")
    settings = network_settings(
        membership,
        bootstraps,
        scope,
        listen=opt.parse_host_port(listen, "--listen"),
        public_addr=opt.parse_host_port(public_addr, "--public-addr") if public_addr else None,
        state_dir=state,
        is_sentinel=True,
        allow=read_allow_list(allow_file, membership, bootstraps),
        moved=live_move(key_file, identity),
    )
    place = _metrics_place(metrics, is_open=metrics_open)
    _check_port(settings)
    teller = Teller(events)
    with RunFile(state, "sentinel", identity.node_id.hex()) as run_file:
        if run_file.trouble:
            show.note(run_file.trouble)

        def on_event(event: Mapping[str, Any]) -> None:
            run_file.note(event)
            teller.tell(event)

        run_fast(run_until_signal(run_sentinel(identity, settings, on_event, metrics=place)))
    show.note("stopped")


async def run_sentinel(
    identity: Identity, settings: NetworkSettings, on_event: OnEvent, *, metrics: HostPort | None = None
) -> None:
    """Serve until cancelled; then say goodbye and close every link. Raises `SettingsError` or `LinkError`.

    `metrics` is where to serve what Prometheus asks for.
    """
    from routing.network import Network
    from routing.types import NodeAddress

    network = Network(identity, settings)
    async with AsyncExitStack() as stack:
        if metrics is not None:
            await stack.enter_async_context(_exported(network, metrics, on_event))
        stack.push_async_callback(_closed, network, on_event)
        bound = await network.start()
        assert bound is not None, "a sentinel listens"
        address = NodeAddress(identity.node_id, *told_place(settings.public_addr, bound))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(network.run())
            place = show.host_port(*bound)
            on_event({"event": "ready", "role": "sentinel", "address": str(address), "bound": place})
            try:
                await asyncio.Event().wait()
            finally:
                await network.leave()


async def _closed(network: Network, on_event: OnEvent) -> None:
    await network.close()
    on_event({"event": "stopped"})


@asynccontextmanager
async def _exported(network: Network, place: HostPort, on_event: OnEvent) -> AsyncIterator[None]:
    """Serve metrics while inside."""
    from node import events
    from node.exporter import SERVING, exporting
    from node.metrics import LOADING, MemberMetrics

    exported = MemberMetrics("sentinel")
    exported.watch_network(network)
    exported.know_state(lambda: LOADING if network.bound is None else SERVING)
    async with exporting(place, exported) as bound:
        on_event(events.metrics(bound))
        yield


def _metrics_place(text: str | None, *, is_open: bool) -> HostPort | None:
    """Where to serve metrics; says in the flags' words what is wrong with it."""
    if text is None:
        return None
    from cli.ports import check_listen
    from node.settings import HostPort, check_metrics

    host, port = opt.parse_host_port(text, "--metrics")
    place = HostPort(host=host, port=port)
    try:
        check_metrics(place, is_open=is_open)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--metrics'") from None
    check_listen(host, port, "--metrics")
    return place


def told_place(public_addr: tuple[str, int] | None, bound: tuple[str, int]) -> tuple[str, int]:
    """Where to tell people to find us. A wildcard is no address: then that of the interface that leads outside."""
    if public_addr is not None:
        return public_addr[0], public_addr[1] or bound[1]
    return (_outward_host(bound[0]) if bound[0] in WILDCARDS else bound[0]), bound[1]


def _outward_host(wildcard: str) -> str:
    """The address of ours that packets to elsewhere would carry; loopback where there is no way out."""
    family, loopback = (socket.AF_INET6, "::1") if ":" in wildcard else (socket.AF_INET, "127.0.0.1")
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((_ELSEWHERE[wildcard], 9))  # of a datagram socket: looks up the way, sends nothing
        return str(probe.getsockname()[0])
    return loopback


def _check_port(settings: NetworkSettings) -> None:
    """Say in the flags' words that a port is taken, before anything else begins."""
    from cli.ports import check_listen

    assert settings.listen is not None
    check_listen(*settings.listen)
