"""`diffuse serve`: the gateway, an OpenAI-compatible API in front of nodes or a whole swarm."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import options as opt
from cli import serve_flags as flags
from cli import show
from cli.setting_names import parameter_of
from cli.settings_command import ConfigOption
from cli.state import default_state_dir
from cli.telling import Teller

if TYPE_CHECKING:
    from app.engine.library import LibrarySettings
    from app.engine.network import MemberSettings
    from app.settings import GatewaySettings
    from routing.tls import Tls
    from routing.tls_files import TlsFiles
    from routing.types import NodeAddress

GATEWAY_THREADS = 1  # the ends are small beside the layers, and nodes may run beside us


def serve(
    ctx: typer.Context,
    config: ConfigOption = None,
    # network
    listen: flags.Listen = "127.0.0.1:8000",
    public_addr: flags.PublicAddr = None,
    node: opt.NodesOption = None,
    bootstrap: opt.BootstrapOption = None,
    network: opt.NetworkOption = opt.DEFAULT_NETWORK,
    scope: opt.ScopeOption = opt.Scope.AUTO,
    psk_file: opt.PskFileOption = None,
    key: opt.KeyOption = None,
    allow_file: opt.AllowFileOption = None,
    token_file: opt.TokenFileOption = None,
    pad: opt.PadOption = False,
    pin: flags.Pin = None,
    avoid: flags.Avoid = None,
    max_hops: flags.MaxHops = None,
    distinct_owners: flags.DistinctOwners = False,
    # models
    model: flags.Models = None,
    name: flags.Name = None,
    model_aliases: flags.ModelAliases = None,
    open_any: flags.OpenAny = False,
    ends: opt.EndsOption = opt.Ends.LOCAL,
    local_layers: opt.LocalLayersOption = "1:0",
    wire: opt.WireOption = opt.Wire.AUTO,
    per_block: opt.PerBlockOption = False,
    draft: opt.DraftOption = None,
    weights: opt.WeightsOption = opt.Weights.AUTO,
    runner: opt.RunnerOption = opt.Runner.AUTO,
    dtype: flags.Dtype = opt.Dtype.AUTO,
    threads: flags.Threads = GATEWAY_THREADS,
    # keys
    api_keys: flags.ApiKeys = None,
    keys_file: flags.KeysFile = None,
    allow_open: flags.AllowOpen = False,
    allowed_hosts: flags.AllowedHosts = None,
    cors_origins: flags.CorsOrigins = None,
    # limits
    max_requests: flags.MaxRequests = 32,
    max_queued: flags.MaxQueued = 64,
    max_requests_per_key: flags.MaxRequestsPerKey = None,
    requests_per_minute: flags.RequestsPerMinute = None,
    max_choices: flags.MaxChoices = 8,
    max_body_bytes: flags.MaxBodyBytes = "32MiB",
    # deadlines
    queue_timeout: flags.QueueTimeout = "30s",
    first_token_timeout: flags.FirstTokenTimeout = "10m",  # noqa: S107 - no password
    stall_timeout: flags.StallTimeout = "2m",
    request_timeout: flags.RequestTimeout = "0",
    body_timeout: flags.BodyTimeout = "1m",
    load_wait: flags.LoadWait = "10s",
    keepalive: flags.Keepalive = "10s",
    heartbeat: flags.Heartbeat = "30s",
    drain: flags.Drain = "10s",
    # media
    max_upload_bytes: flags.MaxUploadBytes = "100MiB",
    max_recording: flags.MaxRecording = "1h",
    media_bytes: flags.MediaBytes = "1GiB",
    max_pixels: flags.MaxPixels = 4096 * 4096,
    max_media: flags.MaxMedia = 16,
    max_media_pixels: flags.MaxMediaPixels = 2 * 4096 * 4096,
    max_heard: flags.MaxHeard = "10m",
    allow_remote_media: flags.AllowRemoteMedia = None,
    pictures_bytes: flags.PicturesBytes = "256MiB",
    pictures_lifetime: flags.PicturesLifetime = "1h",
    videos_bytes: flags.VideosBytes = "4GiB",
    videos_lifetime: flags.VideosLifetime = "24h",
    videos_at_once: flags.VideosAtOnce = 1,
    videos_waiting: flags.VideosWaiting = 32,
    # storage
    state: flags.State = None,
    state_dir: opt.StateDirOption = None,
    videos_dir: flags.VideosDir = None,
    cache_dir: opt.CacheDirOption = None,
    prefix_secret: flags.PrefixSecret = None,
    # TLS
    tls_cert: opt.TlsCertOption = None,
    tls_key: opt.TlsKeyOption = None,
    tls_ca: opt.TlsCaOption = None,
    # logs and metrics
    log_level: opt.LogLevelOption = opt.LogLevel.WARNING,
    log_format: opt.LogFormatOption = opt.LogFormat.TEXT,
    traces: opt.TracesOption = None,
    vllm_metrics: flags.VllmMetrics = False,
    events: opt.EventsOption = opt.Events.TEXT,
    until_eof: opt.UntilEofOption = False,
    listen_fd: Annotated[int | None, typer.Option("--listen-fd", hidden=True)] = None,
) -> None:
    """Serve an OpenAI-compatible API over nodes (--node), or over a swarm (--bootstrap)."""
    from cli.membership import read_prefix_secret
    from cli.runtime import heavy_imports, start_logging
    from routing.tls import https_tls
    from routing.tls_files import TlsFiles

    if until_eof:
        from cli.lifeline import end_with_parent

        end_with_parent()
    start_logging(log_level.value, log_format.value, is_service=True)
    opt.use_threads(threads)  # before anything imports torch
    nodes, bootstraps = opt.parse_addresses(node, "--node"), opt.parse_addresses(bootstrap, "--bootstrap")
    models = _named_models(model, name, is_swarm=bool(bootstraps), is_anywhere=bool(nodes or bootstraps))
    gateway = gateway_settings(ctx.params)
    layers = opt.parse_local_layers(local_layers)
    files = TlsFiles(tls_cert, tls_key, tls_ca)
    tls = https_tls(files)
    member = {
        **_membership(
            network, psk_file, scope, key, allow_file, token_file, files, named=(*bootstraps, *nodes)
        ),
        "nodes": nodes,
        "bootstraps": bootstraps,
        "pad": pad,
    }
    shared_secret = read_prefix_secret(prefix_secret)
    listener = _listener(gateway, listen_fd)
    gateway = gateway.model_copy(update=_places(gateway, ctx.params))
    with heavy_imports():  # once everything that can be wrong with a flag has been looked at
        from app.engine.library import LibrarySettings, NamedModel
        from app.engine.model import EndsSettings
        from app.engine.network import MemberSettings

    library = LibrarySettings(
        tuple(NamedModel(*named) for named in models),
        opens_any=open_any,
        ends=EndsSettings(
            ends=ends.value,
            local_layers=layers,
            wire=wire.value,
            per_block=per_block,
            dtype=dtype.value,
            weights=weights.value,
            runner=runner.value,
            threads=threads,
            cache_dir=cache_dir,
            prefix_secret=shared_secret,
        ),
    )
    _serve(gateway, MemberSettings(**member), library, Teller(events, public_addr), listener, tls)


def _named_models(
    models: list[str] | None, name: str | None, *, is_swarm: bool, is_anywhere: bool
) -> list[tuple[str, str | None]]:
    """Each model to serve with its name for clients; none: what the swarm announces."""
    if not is_anywhere:
        raise typer.BadParameter(
            "say where the nodes are: --bootstrap ID@HOST:PORT joins a swarm, --node names single ones",
            param_hint="'--bootstrap'",
        )
    chosen = models or ([] if is_swarm else [opt.DEFAULT_MODEL])
    if name is not None and len(chosen) != 1:
        raise typer.BadParameter("it names one --model; several go by their own names", param_hint="'--name'")
    return [(model, name) for model in chosen]


def _membership(
    network: str,
    psk_file: Path | None,
    scope: opt.Scope,
    key: Path | None,
    allow_file: Path | None,
    token_file: Path | None,
    files: TlsFiles,
    named: tuple[NodeAddress, ...],
) -> dict[str, Any]:
    """What a member must know and be; `named` are always allowed."""
    from cli.key_files import live_move, load_or_make
    from cli.membership import read_allow_list, read_membership, read_token
    from routing import address_policy

    membership = read_membership(network, psk_file, files)
    identity = load_or_make(key) if key else None
    return {
        "allow": read_allow_list(allow_file, membership, named),
        "network_id": membership.network_id,
        "psk": membership.psk,
        "accepted_psks": membership.accepted_psks,
        "scope": None if scope is opt.Scope.AUTO else address_policy.Scope(scope.value),
        "identity": identity,
        "moved": live_move(key, identity) if key and identity else b"",
        "token": read_token(token_file),
        "tls": membership.tls,
    }


def gateway_settings(params: Mapping[str, Any]) -> GatewaySettings:
    """The settings that the flags of the same names say, checked. Raises pydantic's `ValidationError`."""
    from app.settings import GatewaySettings

    values = {name: params.get(parameter_of(name)) for name in GatewaySettings.model_fields}
    values["host"], values["port"] = opt.parse_host_port(params["listen"], "--listen")
    if params["public_addr"]:  # clients use the name that they are told
        told, _ = opt.parse_host_port(params["public_addr"], "--public-addr")
        values["allowed_hosts"] = [*(values["allowed_hosts"] or ()), told]
    return GatewaySettings.model_validate(
        {name: value for name, value in values.items() if value is not None}
    )


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


def _places(gateway: GatewaySettings, params: Mapping[str, Any]) -> dict[str, Any]:
    """Where things are kept that no setting places: gateways of one user differ by their ports.

    One on any free port has nothing to come back to.
    """
    from pydantic import SecretStr

    if not gateway.port:
        return {}
    folder = params["state_dir"] or default_state_dir()
    places: dict[str, Any] = {}
    if gateway.videos_dir is None:
        places["videos_dir"] = folder / "videos" / str(gateway.port)
    if params["state"] is None and _can_write(folder):
        places["state"] = SecretStr(f"sqlite://{folder.absolute() / f'gateway-{gateway.port}.sqlite'}")
    return places


def _can_write(folder: Path) -> bool:
    """Whether we may keep something there; a home that cannot be written is no reason not to serve."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        trouble = error.strerror
    else:
        trouble = None if os.access(folder, os.W_OK) else "cannot be written"
    if trouble:
        show.note(
            f"{folder}: {trouble}: limits and records end with this process; --state-dir or --state keeps them"
        )
    return not trouble


def _serve(
    gateway: GatewaySettings,
    member: MemberSettings,
    library: LibrarySettings,
    teller: Teller,
    listener: socket.socket,
    tls: Tls | None,
) -> None:
    from app.serving import run_gateway
    from cli.runtime import run_fast, run_until_signal

    serving = run_gateway(gateway, member, library, on_event=teller.tell, sockets=[listener], tls=tls)
    run_fast(run_until_signal(serving))
    show.note("stopped")
