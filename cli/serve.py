"""`diffuse serve`: the gateway, an OpenAI-compatible API in front of nodes."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import options as opt
from cli import show
from cli.telling import Teller

if TYPE_CHECKING:
    from app.engine.swarm import SwarmSettings
    from app.settings import GatewaySettings

GATEWAY_THREADS = 1  # the ends are small beside the layers, and nodes may run beside us


def serve(
    node: Annotated[
        list[str], typer.Option("--node", metavar="ID@HOST:PORT", help="A node, as `diffuse host` prints it.")
    ],
    model: opt.ModelOption = opt.DEFAULT_MODEL,
    name: Annotated[str | None, typer.Option("--name", help="What clients call the model.")] = None,
    listen: Annotated[
        str | None,
        typer.Option("--listen", metavar="HOST:PORT", help="What to bind. Left out: 127.0.0.1:8000."),
    ] = None,
    public_addr: Annotated[
        str | None,
        typer.Option("--public-addr", metavar="HOST:PORT", help="What clients are told, where it differs."),
    ] = None,
    ends: opt.EndsOption = opt.Ends.LOCAL,
    local_layers: opt.LocalLayersOption = "1:0",
    wire: opt.WireOption = opt.Wire.AUTO,
    network: opt.NetworkOption = opt.DEFAULT_NETWORK,
    psk_file: opt.PskFileOption = None,
    pad: opt.PadOption = False,
    dtype: Annotated[opt.Dtype, typer.Option("--dtype", help="Compute type of the ends.")] = opt.Dtype.AUTO,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Threads for the ends.")] = GATEWAY_THREADS,
    cache_dir: opt.CacheDirOption = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option("--api-key", help="A key clients must show. Repeatable; or DIFFUSE_API_KEYS."),
    ] = None,
    allow_open: Annotated[
        bool, typer.Option("--allow-open", help="Let others on the network in without a key.")
    ] = False,
    allowed_host: Annotated[
        list[str] | None, typer.Option("--allowed-host", help="Another Host name that clients may use.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option("--cors-origin", help="A web origin whose pages may call.")
    ] = None,
    alias: Annotated[
        list[str] | None, typer.Option("--alias", metavar="ALIAS=MODEL", help="Another name for the model.")
    ] = None,
    max_requests: Annotated[
        int | None, typer.Option("--max-requests", min=1, help="Answers at once; more get a 503.")
    ] = None,
    request_timeout: Annotated[
        float | None,
        typer.Option("--request-timeout", min=0, help="Seconds an answer may take; 0: no limit."),
    ] = None,
    drain: Annotated[
        float | None, typer.Option("--drain", min=0, help="Seconds running answers get when stopping.")
    ] = None,
    events: opt.EventsOption = opt.Events.TEXT,
    until_eof: opt.UntilEofOption = False,
    listen_fd: Annotated[int | None, typer.Option("--listen-fd", hidden=True)] = None,
) -> None:
    """Serve an OpenAI-compatible API over nodes."""
    from cli.runtime import heavy_imports, start_logging

    if until_eof:
        from cli.lifeline import end_with_parent

        end_with_parent()
    start_logging(logging.WARNING)
    opt.use_threads(threads)  # before anything imports torch
    chosen: dict[str, Any] = {
        "api_keys": api_key,
        "allow_open": allow_open or None,
        "allowed_hosts": _hosts(allowed_host, public_addr),
        "cors_origins": cors_origin,
        "model_aliases": ",".join(alias) if alias else None,
        "max_requests": max_requests,
        "request_timeout_s": request_timeout,
        "drain_s": drain,
    }
    if listen is not None:
        chosen["host"], chosen["port"] = opt.parse_host_port(listen, "--listen")
    from cli.membership import read_membership
    from routing.addresses import parse_address

    gateway, membership = _gateway_settings(chosen), read_membership(network, psk_file)
    nodes = tuple(parse_address(text) for text in node)
    layers = opt.parse_local_layers(local_layers)
    listener = _listener(gateway, listen_fd)
    with heavy_imports():  # once everything that can be wrong with a flag has been looked at
        from app.engine.swarm import SwarmSettings

    swarm = SwarmSettings(
        model=model,
        nodes=nodes,
        network_id=membership.network_id,
        name=name,
        ends=ends.value,
        local_layers=layers,
        wire=wire.value,
        psk=membership.psk,
        pad=pad,
        dtype=dtype.value,
        threads=threads,
        cache_dir=cache_dir,
    )
    _serve(gateway, swarm, Teller(events, public_addr), listener)


def _hosts(allowed_host: list[str] | None, public_addr: str | None) -> list[str] | None:
    """The Host names to allow: those named, and the one that clients are told."""
    public = [opt.parse_host_port(public_addr, "--public-addr")[0]] if public_addr else []
    return [*(allowed_host or ()), *public] or None


def _gateway_settings(chosen: dict[str, Any]) -> GatewaySettings:
    """Only what a flag says is passed on: the rest may come from DIFFUSE_* variables."""
    from app.settings import GatewaySettings

    return GatewaySettings(**{name: value for name, value in chosen.items() if value is not None})


def _listener(gateway: GatewaySettings, listen_fd: int | None) -> socket.socket:
    """The socket that clients reach, ours from now on; a supervisor may have taken it already."""
    from cli.ports import cannot_listen, listen_on

    if listen_fd is not None:
        return socket.socket(fileno=listen_fd)
    host = gateway.host.strip("[]")
    try:
        return listen_on(host, gateway.port)
    except OSError as error:
        raise cannot_listen(host, gateway.port, error, "--listen") from error


def _serve(gateway: GatewaySettings, swarm: SwarmSettings, teller: Teller, listener: socket.socket) -> None:
    from app.serving import run_gateway
    from cli.runtime import run_fast, run_until_signal

    run_fast(run_until_signal(run_gateway(gateway, swarm, on_event=teller.tell, sockets=[listener])))
    show.note("stopped")
