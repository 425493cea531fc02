"""`diffuse host`: serve slices of models to gateways and other nodes, in a swarm or to whoever is given the address."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import options as opt
from cli import panels, show, units
from cli.setting_names import parameter_of
from cli.settings_command import ConfigOption, is_flag
from cli.state import RunFile, default_state_dir
from cli.telling import Teller

if TYPE_CHECKING:
    from node.settings import NodeSettings
    from routing.announcement import Owner


_network = partial(typer.Option, rich_help_panel=panels.NETWORK)
_models = partial(typer.Option, rich_help_panel=panels.MODELS)
_limits = partial(typer.Option, rich_help_panel=panels.LIMITS)

ListenOption = Annotated[
    str,
    _network(
        "--listen",
        metavar="HOST:PORT",
        help="What to bind; port 0 takes a free one. 0.0.0.0 is every interface.",
    ),
]
PublicAddrOption = Annotated[
    str | None,
    _network(
        "--public-addr",
        metavar="HOST:PORT",
        help="What to tell others. Left out: what was bound or, in a swarm, what others find to work.",
    ),
]
OwnerKeyOption = Annotated[
    Path | None,
    _network(
        "--owner-key",
        metavar="FILE",
        help="Key file that labels this node as its owner's, so that routes can avoid two nodes of one owner.",
    ),
]
SentinelOption = Annotated[
    bool, _network("--sentinel", help="Be a sentinel as well: relay to nodes that cannot be dialled.")
]
ModelsOption = Annotated[
    list[str] | None,
    _models(
        "--model",
        metavar="MODEL[=START:END]",
        help="Hub id, folder, .gguf file, or `smollm2` (the default); a diffusers pipeline too. Repeatable.",
    ),
]
LayersOption = Annotated[
    str | None,
    _models(
        "--layers",
        metavar="START:END",
        help="Layers to serve, END not included. Left out: where they help most, or all without --bootstrap.",
    ),
]
HoldEndsOption = Annotated[
    bool,
    _models("--hold-ends", help="Serve gateways with --ends remote: this node may read tokens then."),
]
DtypeOption = Annotated[opt.Dtype, _models("--dtype", help="Compute type; auto measures.")]
DeviceOption = Annotated[
    str,
    _models(
        "--device",
        metavar="DEVICE",
        help="Where layers are computed: cpu, or cuda, or cuda:1 (not tried yet).",
    ),
]
OverheadOption = Annotated[
    float, _limits("--overhead", metavar="FRACTION", help="Of the free memory, what may be used.")
]
MemoryOption = Annotated[
    Any,
    _limits(
        "--memory",
        metavar="SIZE",
        parser=units.size,
        help="Memory for weights and sessions (4GB), instead of --overhead.",
    ),
]
KvBudgetOption = Annotated[
    Any,
    _limits(
        "--kv-budget",
        metavar="SIZE",
        parser=units.size,
        help="Memory for sessions (500MB, 2GB). Left out: a share.",
    ),
]
MaxSessionsOption = Annotated[
    int, _limits("--max-sessions", metavar="N", help="Sessions held at once; more are sent elsewhere.")
]
DrainOption = Annotated[
    Any,
    typer.Option(
        "--drain",
        rich_help_panel=panels.DEADLINES,
        metavar="TIME",
        parser=units.duration,
        help="How long running sessions may go on when leaving.",
    ),
]


def host(
    ctx: typer.Context,
    config: ConfigOption = None,
    # network
    listen: ListenOption = "127.0.0.1:0",
    public_addr: PublicAddrOption = None,
    bootstrap: opt.BootstrapOption = None,
    network: opt.NetworkOption = opt.DEFAULT_NETWORK,
    scope: opt.ScopeOption = opt.Scope.AUTO,
    psk_file: opt.PskFileOption = None,
    key: opt.KeyOption = None,
    owner_key: OwnerKeyOption = None,
    allow_file: opt.AllowFileOption = None,
    token_file: opt.TokenFileOption = None,
    sentinel: SentinelOption = False,
    pad: opt.PadOption = False,
    # models
    model: ModelsOption = None,
    layers: LayersOption = None,
    hold_ends: HoldEndsOption = False,
    weights: opt.WeightsOption = opt.Weights.AUTO,
    runner: opt.RunnerOption = opt.Runner.AUTO,
    dtype: DtypeOption = opt.Dtype.AUTO,
    device: DeviceOption = "cpu",
    threads: opt.ThreadsOption = None,
    # limits
    overhead: OverheadOption = 0.6,
    memory: MemoryOption = None,
    kv_budget: KvBudgetOption = None,
    max_sessions: MaxSessionsOption = 256,
    # deadlines
    drain: DrainOption = "30s",
    # storage
    state_dir: opt.StateDirOption = None,
    cache_dir: opt.CacheDirOption = None,
    # TLS
    tls_cert: opt.TlsCertOption = None,
    tls_key: opt.TlsKeyOption = None,
    tls_ca: opt.TlsCaOption = None,
    # logs and metrics
    log_level: opt.LogLevelOption = opt.LogLevel.WARNING,
    log_format: opt.LogFormatOption = opt.LogFormat.TEXT,
    traces: opt.TracesOption = None,
    metrics: opt.MetricsOption = None,
    metrics_open: opt.MetricsOpenOption = False,
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
    start_logging(log_level.value, log_format.value, is_service=True)
    opt.use_threads(threads)  # before anything imports torch
    from cli.membership import read_allow_list, read_membership, read_token
    from cli.ports import check_listen
    from routing.tls_files import TlsFiles

    state = state_dir or default_state_dir()
    files = TlsFiles(tls_cert, tls_key, tls_ca)
    membership = read_membership(network, psk_file, files, listens=True)
    bootstraps = opt.parse_addresses(bootstrap, "--bootstrap")
    settings = node_settings(
        ctx.params,
        network_id=membership.network_id,
        psk=membership.psk,
        accepted_psks=membership.accepted_psks,
        tls=membership.tls,
        allow=read_allow_list(allow_file, membership, bootstraps),
        token=read_token(token_file),
        state_dir=state if key or is_flag(ctx, "state_dir") else None,  # an id for once leaves nothing
        **_identity(key, owner_key),
    )
    check_listen(settings.listen.host, settings.listen.port)
    if settings.metrics is not None:
        check_listen(settings.metrics.host, settings.metrics.port, "--metrics")
    with RunFile(state, "host") as run_file:
        if run_file.trouble:
            show.note(run_file.trouble)
        _serve(settings, Teller(events), run_file)


def node_settings(params: Mapping[str, Any], **told: Any) -> NodeSettings:
    """The settings that flags say, with what files say (`told`). Raises pydantic's `ValidationError`."""
    from node.settings import NodeSettings

    values = {name: params.get(parameter_of(name)) for name in NodeSettings.model_fields.keys() - told.keys()}
    plain = {name: getattr(value, "value", value) for name, value in values.items() if value is not None}
    bootstraps = opt.parse_addresses(params["bootstrap"], "--bootstrap")
    slices = _slices(params["model"], params["layers"])
    return NodeSettings.model_validate(
        plain | {"model": "", "models": (), "layers": None, "bootstraps": bootstraps} | slices | told
    )


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
