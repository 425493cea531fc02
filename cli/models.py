"""`diffuse models`: what a gateway lists, what nodes serve, or what a swarm does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from cli import failures, show
from cli import options as opt
from routing.tls_files import TlsFiles

if TYPE_CHECKING:
    from pathlib import Path

    from cli.survey import NodeReport
    from routing.network_status import ModelStatus
    from routing.types import SliceOffer


KEPT_AT_HOME = (0, 1)  # gateways keep the first layer unless told otherwise, so nodes may leave it out


def models(
    url: opt.UrlOption = None,
    api_key: opt.ApiKeyOption = None,
    node: opt.NodesOption = None,
    bootstrap: opt.BootstrapOption = None,
    network: opt.NetworkOption = opt.DEFAULT_NETWORK,
    scope: opt.ScopeOption = opt.Scope.AUTO,
    psk_file: opt.PskFileOption = None,
    tls_cert: opt.TlsCertOption = None,
    tls_key: opt.TlsKeyOption = None,
    tls_ca: opt.AskTlsCaOption = None,
    json: opt.JsonOption = False,
) -> None:
    """List the models of a gateway (--url) or a swarm (--bootstrap), or which layers each node (--node) serves.

    Exits with 1 if a node does not answer.
    """
    files = TlsFiles(tls_cert, tls_key, tls_ca)
    if bootstrap and (node or url):
        raise typer.BadParameter("give one of --url, --node and --bootstrap")
    if bootstrap:
        found = asyncio.run(_look(bootstrap, network, scope, psk_file, files))
        show.print_json({"models": [_model_entry(model) for model in found]}) if json else _print_swarm(found)
        return
    if node:
        reports = asyncio.run(_survey(node, network, psk_file, files))
        show.print_json({"nodes": [_node_entry(report) for report in reports]}) if json else _print_nodes(
            reports
        )
        if any(report.error is not None for report in reports):
            raise typer.Exit(failures.EXIT_FAILURE)
        return
    listed, unserved = asyncio.run(_list(url, api_key, tls_ca))
    if json:
        show.print_json({"data": listed, "unserved": unserved})
    else:
        _print_models(listed)
        for entry in unserved:
            show.note(f"{show.printable(str(entry.get('id')))}: {show.printable(str(entry.get('reason')))}")


async def _list(
    url: str | None, api_key: str | None, tls_ca: Path | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    from cli.gateway import DEFAULT_URL, open_gateway

    async with open_gateway(url or DEFAULT_URL, api_key=api_key, tls_ca=tls_ca, model="") as gateway:
        return await gateway.list_models(), gateway.unserved


async def _look(
    bootstrap: Sequence[str], network: str, scope: opt.Scope, psk_file: Path | None, files: TlsFiles
) -> tuple[ModelStatus, ...]:
    """Join as an onlooker, and say which models the first gossip names. Raises `CommandError`."""
    from cli.membership import read_membership
    from cli.status import look
    from cli.swarm import network_settings
    from routing.identity import Identity

    bootstraps = opt.parse_addresses(bootstrap, "--bootstrap")
    settings = network_settings(read_membership(network, psk_file, files), bootstraps, scope)
    async with look(Identity.generate(), settings) as (joined, entrances):
        errors = [entrance.error for entrance in entrances if entrance.error]
        if errors and len(errors) == len(entrances):
            raise errors[0]
        return joined.status().models


async def _survey(
    node: Sequence[str], network: str, psk_file: Path | None, files: TlsFiles
) -> list[NodeReport]:
    from cli.membership import read_membership
    from cli.survey import survey
    from routing.addresses import parse_address

    return await survey([parse_address(text) for text in node], read_membership(network, psk_file, files))


def status_of(entry: dict[str, Any]) -> str:
    """What a gateway says about one of its models, missing layers by their numbers."""
    status = str(entry.get("status", "listed"))
    missing = [(int(start), int(end)) for start, end in entry.get("missing_layers") or ()]
    told = f"{status}: no node serves layers {show.ranges(missing)}" if missing else status
    return f"{told}; {show.printable(str(reason))}" if (reason := entry.get("reason")) else told


def _print_swarm(found: Sequence[ModelStatus]) -> None:
    grid = show.table("model", "digest", "layers", "status")
    for model in found:
        missing = [span for span in model.missing if span != KEPT_AT_HOME or model.is_diffusion]
        status = f"no node serves layers {show.ranges(missing)}" if missing else "ready"
        grid.add_row(show.printable(model.name), model.digest.hex()[:8], str(model.num_layers), status)
    show.console().print(grid)


def _model_entry(model: ModelStatus) -> dict[str, Any]:
    return {
        "model": model.name,
        "model_digest": model.digest.hex(),
        "num_layers": model.num_layers,
        "is_whole": model.is_whole,
        "missing_layers": [list(span) for span in model.missing],
        "holders": list(model.holders),
    }


def _print_models(listed: Sequence[dict[str, Any]]) -> None:
    grid = show.table("model", "context", "status")
    for entry in listed:
        grid.add_row(str(entry.get("id")), str(entry.get("max_model_len", "")), status_of(entry))
    show.console().print(grid)


def _print_nodes(reports: Sequence[NodeReport]) -> None:
    from cli.survey import name_of

    grid = show.table("node", "address", "layers", "model", "form", "ends", "ms/layer", "load", "rtt")
    for report in reports:
        if report.error is not None:
            show.note(f"{name_of(report.address)}: {failures.explain(report.error)}")
        for offer in report.description.slices if report.description else ():
            grid.add_row(*_node_row(report, offer))
    if grid.row_count:
        show.console().print(grid)


def _node_row(report: NodeReport, offer: SliceOffer) -> list[str]:
    held = {"opening": offer.has_opening, "closing": offer.has_closing}
    return [
        report.address.node_id.hex()[:8],
        f"{report.address.host}:{report.address.port}",
        f"{offer.spec} of {offer.num_layers}",
        offer.model_name,
        offer.form,
        "+".join(end for end, is_held in held.items() if is_held),
        f"{offer.layer_ms:.2f}",
        str(report.description.load) if report.description else "",
        f"{report.rtt_ms:.1f} ms" if report.rtt_ms is not None else "",
    ]


def _node_entry(report: NodeReport) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "address": str(report.address),
        "error": str(report.error) if report.error else None,
    }
    if report.description is not None:
        entry |= {
            "rtt_ms": report.rtt_ms,
            "load": report.description.load,
            "slices": [
                {
                    "model": offer.model_name,
                    "model_digest": offer.model_digest.hex(),
                    "layers": [offer.spec.start, offer.spec.end],
                    "num_layers": offer.num_layers,
                    "form": offer.form,
                    "layer_ms": offer.layer_ms,
                    "has_opening": offer.has_opening,
                    "has_closing": offer.has_closing,
                }
                for offer in report.description.slices
            ],
        }
    return entry
