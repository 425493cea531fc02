"""`diffuse status`: what a swarm looks like from here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cli import failures, show
from cli import options as opt
from cli.failures import CommandError
from cli.overview import Entrance, as_json, tables

if TYPE_CHECKING:
    from routing.identity import Identity
    from routing.network import Network, NetworkSettings
    from routing.network_status import NetworkStatus
    from routing.types import NodeAddress

LOOK_TIMEOUT_S: Final = 6.0  # a dial, a handshake and the first gossip; the long one of two continents
WATCH_S: Final = 2.0  # gossip's own rhythm: nothing is newer


def status(
    bootstrap: opt.BootstrapOption = None,
    node: opt.NodesOption = None,
    key: Annotated[
        Path | None, typer.Option("--key", help="Identity key file, where only listed ids may connect.")
    ] = None,
    network: opt.NetworkOption = opt.DEFAULT_NETWORK,
    scope: opt.ScopeOption = opt.Scope.AUTO,
    psk_file: opt.PskFileOption = None,
    token_file: opt.TokenFileOption = None,
    tls_cert: opt.TlsCertOption = None,
    tls_key: opt.TlsKeyOption = None,
    tls_ca: opt.AskTlsCaOption = None,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every 2 s until Ctrl+C.")] = False,
    json: opt.JsonOption = False,
) -> None:
    """Show a swarm: its models, how many nodes hold each layer, and how each node is reached.

    Exits with 1 if no member could be reached.
    """
    from cli.key_files import load_or_make
    from cli.membership import read_membership, read_token
    from cli.runtime import run_asking, start_logging
    from cli.swarm import network_settings
    from routing.identity import Identity
    from routing.tls_files import TlsFiles

    bootstraps, nodes = opt.parse_addresses(bootstrap, "--bootstrap"), opt.parse_addresses(node, "--node")
    if not bootstraps and not nodes:
        raise typer.BadParameter(
            "say whom to ask: --bootstrap ID@HOST:PORT, or --node", param_hint="'--bootstrap'"
        )
    start_logging(logging.ERROR)
    files = TlsFiles(tls_cert, tls_key, tls_ca)
    membership, token = read_membership(network, psk_file, files), read_token(token_file)
    settings = network_settings(membership, bootstraps, scope, nodes=nodes, token=token)
    identity = load_or_make(key) if key else Identity.generate()
    run_asking(
        _watch(identity, settings, as_lines=json) if watch else _show(identity, settings, as_line=json)
    )


def _print(status: NetworkStatus, entrances: Sequence[Entrance]) -> None:
    console = show.console()
    for part in tables(status, entrances):
        console.print(part)


async def _show(identity: Identity, settings: NetworkSettings, *, as_line: bool) -> None:
    async with look(identity, settings) as (network, entrances):
        if as_line:
            show.print_json(as_json(network.status(), entrances))
        else:
            _print(network.status(), entrances)
    if all(entrance.error for entrance in entrances):
        raise typer.Exit(failures.EXIT_FAILURE) if as_line else CommandError("no member could be reached")


async def _watch(identity: Identity, settings: NetworkSettings, *, as_lines: bool) -> None:
    """Look again and again: on a terminal in place, elsewhere one below the other."""
    from rich.console import Group
    from rich.live import Live

    console = show.console()
    is_in_place = console.is_terminal and not as_lines
    async with look(identity, settings) as (network, entrances):
        with Live(console=console, auto_refresh=False) if is_in_place else nullcontext() as live:
            while True:
                if as_lines:
                    show.print_json(as_json(network.status(), entrances))
                elif live is None:
                    _print(network.status(), entrances)
                else:
                    live.update(Group(*tables(network.status(), entrances)), refresh=True)
                await asyncio.sleep(WATCH_S)


@asynccontextmanager
async def look(
    identity: Identity, settings: NetworkSettings
) -> AsyncIterator[tuple[Network, list[Entrance]]]:
    """Join a swarm as a mere onlooker, and wait until its first gossip is heard or the time is over."""
    from routing.network import Network

    network = Network(identity, settings)
    async with network.running():
        entrances = await enter(network, (*settings.bootstraps, *settings.nodes))
        if any(entrance.error is None for entrance in entrances):
            await network.first_look(LOOK_TIMEOUT_S)
        yield network, entrances


async def enter(network: Network, addresses: Sequence[NodeAddress]) -> list[Entrance]:
    """Dial everybody we were told of, and say what became of it."""
    return list(await asyncio.gather(*(_enter(network, address) for address in addresses)))


async def _enter(network: Network, address: NodeAddress) -> Entrance:
    from routing.errors import ErrorCode, LinkError, RemoteError

    try:
        async with asyncio.timeout(LOOK_TIMEOUT_S):
            link = await network.endpoint.dial(address)
            rtt_ms = await link.ping()
    except TimeoutError:
        return Entrance(address, LinkError(ErrorCode.TIMEOUT, "no answer"))
    except RemoteError as error:
        return Entrance(address, error)
    return Entrance(address, rtt_ms=rtt_ms)
