"""`diffuse serve`: the gateway, an OpenAI-compatible API in front of nodes or a whole swarm."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import options as opt
from cli import show
from cli.telling import Teller

if TYPE_CHECKING:
    from app.engine.library import LibrarySettings
    from app.engine.network import MemberSettings
    from app.settings import GatewaySettings
    from routing.types import NodeAddress

GATEWAY_THREADS = 1  # the ends are small beside the layers, and nodes may run beside us


def serve(
    node: opt.NodesOption = None,
    bootstrap: opt.BootstrapOption = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="Hub id, folder, .gguf file, or `smollm2`. Repeatable. Left out with --bootstrap: whatever the swarm "
            "serves and this machine has.",
        ),
    ] = None,
    open_any: Annotated[
        bool,
        typer.Option(
            "--open-any", help="Also fetch from the hub, for their ends, models that nodes announce."
        ),
    ] = False,
    name: Annotated[str | None, typer.Option("--name", help="What clients call the one --model.")] = None,
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
    per_block: opt.PerBlockOption = False,
    network: opt.NetworkOption = opt.DEFAULT_NETWORK,
    scope: opt.ScopeOption = opt.Scope.AUTO,
    psk_file: opt.PskFileOption = None,
    key: opt.KeyOption = None,
    allow_file: opt.AllowFileOption = None,
    token_file: opt.TokenFileOption = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(
            "--pin", metavar="ID", help="A node that every route uses, unless a request says others."
        ),
    ] = None,
    avoid: Annotated[
        list[str] | None, typer.Option("--avoid", metavar="ID", help="A node that no route ever uses.")
    ] = None,
    max_hops: Annotated[
        int | None,
        typer.Option("--max-hops", min=1, help="Nodes on a route at most, unless a request says otherwise."),
    ] = None,
    distinct_owners: Annotated[
        bool,
        typer.Option(
            "--distinct-owners",
            help="First and last node of different owners, unless a request says otherwise.",
        ),
    ] = False,
    draft: opt.DraftOption = None,
    pad: opt.PadOption = False,
    weights: opt.WeightsOption = opt.Weights.AUTO,
    runner: opt.RunnerOption = opt.Runner.AUTO,
    dtype: Annotated[opt.Dtype, typer.Option("--dtype", help="Compute type of the ends.")] = opt.Dtype.AUTO,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Threads for the ends.")] = GATEWAY_THREADS,
    cache_dir: opt.CacheDirOption = None,
    videos_dir: Annotated[
        Path | None,
        typer.Option(
            "--videos-dir",
            help="Where video jobs and their files are kept over restarts. Left out: a folder of this user's and port.",
        ),
    ] = None,
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
    allow_remote_media: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-remote-media",
            metavar="HOST[,HOST]|any",
            help="Fetch pictures and recordings of chat messages from these hosts. Left out: from none.",
        ),
    ] = None,
    prefix_secret: Annotated[
        Path | None,
        typer.Option(
            "--prefix-secret",
            metavar="FILE",
            help="A secret that gateways share, so that they find what nodes kept of each other's chats. "
            "Left out: each keeps its own.",
        ),
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
    """Serve an OpenAI-compatible API over nodes (--node), or over a swarm (--bootstrap)."""
    from cli.membership import read_prefix_secret
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
        "allow_remote_media": ",".join(allow_remote_media) if allow_remote_media else None,
        "model_aliases": ",".join(alias) if alias else None,
        "max_requests": max_requests,
        "request_timeout_s": request_timeout,
        "drain_s": drain,
        "pin": pin,
        "avoid": avoid,
        "max_hops": max_hops,
        "distinct_owners": distinct_owners or None,
        "draft": draft.value if draft else None,
        "videos_dir": videos_dir,
    }
    if listen is not None:
        chosen["host"], chosen["port"] = opt.parse_host_port(listen, "--listen")
    nodes, bootstraps = opt.parse_addresses(node, "--node"), opt.parse_addresses(bootstrap, "--bootstrap")
    models = _named_models(model, name, is_swarm=bool(bootstraps), is_anywhere=bool(nodes or bootstraps))
    gateway = _gateway_settings(chosen)
    layers = opt.parse_local_layers(local_layers)
    member = {
        **_membership(network, psk_file, scope, key, allow_file, token_file, named=(*bootstraps, *nodes)),
        "nodes": nodes,
        "bootstraps": bootstraps,
        "pad": pad,
    }
    shared_secret = read_prefix_secret(prefix_secret)
    listener = _listener(gateway, listen_fd)
    port = gateway.port if listen_fd is None else int(listener.getsockname()[1])
    if gateway.videos_dir is None and port:
        gateway = gateway.model_copy(update={"videos_dir": _videos_dir(port)})
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
    _serve(gateway, MemberSettings(**member), library, Teller(events, public_addr), listener)


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
    named: tuple[NodeAddress, ...],
) -> dict[str, Any]:
    """What a member must know and be; `named` are always allowed."""
    from cli.key_files import live_move, load_or_make
    from cli.membership import read_allow_list, read_membership, read_token
    from routing import address_policy

    membership = read_membership(network, psk_file)
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
    }


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


def _videos_dir(port: int) -> Path:
    """Where videos are kept unless a flag says so: gateways of one user differ by their ports."""
    from cli.state import default_state_dir

    return default_state_dir() / "videos" / str(port)


def _serve(
    gateway: GatewaySettings,
    member: MemberSettings,
    library: LibrarySettings,
    teller: Teller,
    listener: socket.socket,
) -> None:
    from app.serving import run_gateway
    from cli.runtime import run_fast, run_until_signal

    serving = run_gateway(gateway, member, library, on_event=teller.tell, sockets=[listener])
    run_fast(run_until_signal(serving))
    show.note("stopped")
