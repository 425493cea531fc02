"""`diffuse host`: serve a slice of a model to gateways and other nodes."""

from __future__ import annotations

import logging
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from cli import options as opt
from cli import show
from cli.telling import Teller

if TYPE_CHECKING:
    from node.settings import HostPort, NodeSettings


def host(
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers", metavar="START:END", help="Layers to serve, END not included. Left out: all."
        ),
    ] = None,
    model: opt.ModelOption = opt.DEFAULT_MODEL,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="What to bind; port 0 takes a free one.")
    ] = "127.0.0.1:0",
    public_addr: Annotated[
        str | None,
        typer.Option("--public-addr", metavar="HOST:PORT", help="What to tell others, where that differs."),
    ] = None,
    key: opt.KeyOption = None,
    hold_ends: Annotated[
        bool,
        typer.Option(
            "--hold-ends", help="Serve gateways with --ends remote: this node may read tokens then."
        ),
    ] = False,
    dtype: Annotated[
        opt.Dtype, typer.Option("--dtype", help="Compute type; auto measures.")
    ] = opt.Dtype.AUTO,
    threads: opt.ThreadsOption = None,
    network: opt.NetworkOption = opt.DEFAULT_NETWORK,
    psk_file: opt.PskFileOption = None,
    pad: opt.PadOption = False,
    max_sessions: Annotated[
        int | None,
        typer.Option("--max-sessions", min=1, help="Sessions held at once; more are sent elsewhere."),
    ] = None,
    kv_budget: Annotated[
        str | None,
        typer.Option(
            "--kv-budget", metavar="SIZE", help="Memory for sessions (500MB, 2GB). Left out: a share."
        ),
    ] = None,
    cache_dir: opt.CacheDirOption = None,
    events: opt.EventsOption = opt.Events.TEXT,
    until_eof: opt.UntilEofOption = False,
) -> None:
    """Serve layers of a model and print the address that gateways pass to --node."""
    from cli.runtime import start_logging

    if until_eof:
        from cli.lifeline import end_with_parent

        end_with_parent()
    limits = {
        "max_sessions": max_sessions,
        "kv_budget_bytes": opt.parse_size(kv_budget, "--kv-budget") if kv_budget else None,
    }
    start_logging(logging.WARNING)
    opt.use_threads(threads)  # before anything imports torch
    from cli.membership import read_membership
    from node.settings import NodeSettings
    from routing.identity import Identity

    membership = read_membership(network, psk_file)
    if key is not None and key.exists():
        Identity.load(key)  # says what is wrong with it before the long imports; the node reads it again
    settings = NodeSettings.model_validate(
        {
            "model": model,
            "layers": layers,
            "hold_ends": hold_ends,
            "listen": listen,
            "public_addr": public_addr,
            "key_path": key,
            "network_id": membership.network_id,
            "psk": membership.psk,
            "pad": pad,
            "dtype": dtype.value,
            "threads": threads,
            "cache_dir": cache_dir,
            **{name: value for name, value in limits.items() if value is not None},
        }
    )
    _check_port(settings.listen)
    _serve(settings, Teller(events))


def _check_port(listen: HostPort) -> None:
    """Say before the weights are loaded that a port is taken; the node binds it when it can serve."""
    from cli.ports import cannot_listen, listen_on

    try:
        with suppress(socket.gaierror):  # the node may resolve what we cannot
            listen_on(listen.host, listen.port).close()
    except OSError as error:
        raise cannot_listen(listen.host, listen.port, error, "--listen") from error


def _serve(settings: NodeSettings, teller: Teller) -> None:
    from cli.runtime import heavy_imports, run_fast, run_until_signal

    with heavy_imports():
        from node.main import run_node

    run_fast(run_until_signal(run_node(settings, on_event=teller.tell)))
    show.note("stopped")
