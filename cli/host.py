"""`diffuse host`: serve slices of models to gateways and other nodes, in a swarm or to whoever is given the address."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import options as opt
from cli import show
from cli.state import RunFile, default_state_dir
from cli.telling import Teller

if TYPE_CHECKING:
    from node.settings import NodeSettings
    from routing.announcement import Owner


def host(
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers",
            metavar="START:END",
            help="Layers to serve, END not included. Left out: where they help most, or all without --bootstrap.",
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="MODEL[=START:END]",
            help="Hub id, folder, .gguf file, or `smollm2` (the default); a diffusers pipeline too. Repeatable.",
        ),
    ] = None,
    bootstrap: opt.BootstrapOption = None,
    listen: Annotated[
        str,
        typer.Option(
            "--listen",
            metavar="HOST:PORT",
            help="What to bind; port 0 takes a free one. 0.0.0.0 is every interface.",
        ),
    ] = "127.0.0.1:0",
    public_addr: Annotated[
        str | None,
        typer.Option(
            "--public-addr",
            metavar="HOST:PORT",
            help="What to tell others. Left out: what was bound or, in a swarm, what others find to work.",
        ),
    ] = None,
    key: opt.KeyOption = None,
    network: opt.NetworkOption = opt.DEFAULT_NETWORK,
    scope: opt.ScopeOption = opt.Scope.AUTO,
    psk_file: opt.PskFileOption = None,
    allow_file: opt.AllowFileOption = None,
    token_file: opt.TokenFileOption = None,
    owner_key: Annotated[
        Path | None,
        typer.Option(
            "--owner-key",
            help="Key file that labels this node as its owner's, so that routes can avoid two nodes of one owner.",
        ),
    ] = None,
    sentinel: Annotated[
        bool, typer.Option("--sentinel", help="Be a sentinel as well: relay to nodes that cannot be dialled.")
    ] = False,
    overhead: Annotated[
        float | None,
        typer.Option(
            "--overhead", min=0.0, max=1.0, help="Fraction of the free memory to use. Left out: 0.6."
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", metavar="SIZE", help="Memory for weights and sessions (4GB), instead of --overhead."
        ),
    ] = None,
    hold_ends: Annotated[
        bool,
        typer.Option(
            "--hold-ends", help="Serve gateways with --ends remote: this node may read tokens then."
        ),
    ] = False,
    dtype: Annotated[
        opt.Dtype, typer.Option("--dtype", help="Compute type; auto measures.")
    ] = opt.Dtype.AUTO,
    weights: opt.WeightsOption = opt.Weights.AUTO,
    runner: opt.RunnerOption = opt.Runner.AUTO,
    threads: opt.ThreadsOption = None,
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
    drain: Annotated[
        float | None,
        typer.Option("--drain", min=0, help="Seconds that running sessions get when leaving. Left out: 30."),
    ] = None,
    metrics: opt.MetricsOption = None,
    metrics_open: opt.MetricsOpenOption = False,
    cache_dir: opt.CacheDirOption = None,
    state_dir: opt.StateDirOption = None,
    events: opt.EventsOption = opt.Events.TEXT,
    until_eof: opt.UntilEofOption = False,
) -> None:
    """Serve layers of models. With --bootstrap join a swarm; without, print the address to pass to --node.

    Ctrl+C, or `diffuse leave`, tells the swarm and lets running sessions end; a second Ctrl+C ends at once.
    """
    from cli.runtime import start_logging

    if until_eof:
        from cli.lifeline import end_with_parent

        end_with_parent()
    limits = {
        "max_sessions": max_sessions,
        "kv_budget_bytes": opt.parse_size(kv_budget, "--kv-budget") if kv_budget else None,
        "memory_bytes": opt.parse_size(memory, "--memory") if memory else None,
        "overhead": overhead,
        "drain_s": drain,
    }
    start_logging(logging.WARNING)
    opt.use_threads(threads)  # before anything imports torch
    from cli.membership import read_allow_list, read_membership, read_token
    from cli.ports import check_listen
    from node.settings import NodeSettings

    membership = read_membership(network, psk_file)
    bootstraps = opt.parse_addresses(bootstrap, "--bootstrap")
    settings = NodeSettings.model_validate(
        {
            **_slices(model, layers),
            "hold_ends": hold_ends,
            "listen": listen,
            "public_addr": public_addr,
            "key_path": key,
            "network_id": membership.network_id,
            "psk": membership.psk,
            "accepted_psks": membership.accepted_psks,
            "bootstraps": bootstraps,
            "scope": scope.value,
            "allow": read_allow_list(allow_file, membership, bootstraps),
            "token": read_token(token_file),
            "is_sentinel": sentinel,
            "state_dir": state_dir or (default_state_dir() if key else None),  # an id for once leaves nothing
            "pad": pad,
            "metrics": metrics,
            "metrics_open": metrics_open,
            "dtype": dtype.value,
            "weights": weights.value,
            "runner": runner.value,
            "threads": threads,
            "cache_dir": cache_dir,
            **_identity(key, owner_key),
            **{name: value for name, value in limits.items() if value is not None},
        }
    )
    check_listen(settings.listen.host, settings.listen.port)
    if settings.metrics is not None:
        check_listen(settings.metrics.host, settings.metrics.port, "--metrics")
    with RunFile(state_dir or default_state_dir(), "host") as run_file:
        if run_file.trouble:
            show.note(run_file.trouble)
        _serve(settings, Teller(events), run_file)


def _slices(model: list[str] | None, layers: str | None) -> dict[str, Any]:
    """What to serve: one model with --layers, or models that name their own."""
    models = model or [opt.DEFAULT_MODEL]
    if len(models) == 1 and (layers is not None or "=" not in models[0]):
        return {"model": models[0], "layers": layers}
    if layers is not None:
        raise typer.BadParameter(
            "with several --model write each one's layers behind it: --model MODEL=START:END",
            param_hint="'--layers'",
        )
    return {"models": models}


def _identity(key: Path | None, owner_key: Path | None) -> dict[str, Any]:
    """What the key files say besides the key: which one it was before, and whose node it is.

    Says what is wrong with a key before the long imports; the node reads it again.
    """
    if key is None:
        if owner_key is not None:
            raise typer.BadParameter(
                "it labels one node id for good: give --key FILE too", param_hint="'--owner-key'"
            )
        return {}
    from cli.key_files import live_move, load_or_make

    identity = load_or_make(key)
    return {"moved": live_move(key, identity), "owner": _owner(owner_key, identity.node_id)}


def _owner(owner_key: Path | None, node_id: Any) -> Owner | None:
    if owner_key is None:
        return None
    from routing.announcement import Owner
    from routing.identity import Identity

    return Owner.sign(Identity.load(owner_key), node_id)


def _serve(settings: NodeSettings, teller: Teller, run_file: RunFile) -> None:
    from cli.runtime import heavy_imports, run_fast, run_until_signal

    with heavy_imports():
        from node.main import run_node

    def on_event(event: Any) -> None:
        run_file.note(event)
        teller.tell(event)

    run_fast(run_until_signal(run_node(settings, on_event=on_event), on_second=_impatience()))
    show.note("stopped")


def _impatience() -> Callable[[], None]:
    """What a signal after the first does: the second cancels the draining, a third ends a stuck process."""
    asked_again = False

    def again() -> None:
        nonlocal asked_again
        if asked_again:
            os._exit(128 + signal.SIGTERM)
        asked_again = True

    return again
