"""`diffuse models`: what a gateway lists, or what nodes serve."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from cli import failures, show
from cli import options as opt

if TYPE_CHECKING:
    from pathlib import Path

    from cli.survey import NodeReport
    from routing.types import SliceOffer


def models(
    url: opt.UrlOption = None,
    api_key: opt.ApiKeyOption = None,
    node: opt.NodesOption = None,
    network: opt.NetworkOption = opt.DEFAULT_NETWORK,
    psk_file: opt.PskFileOption = None,
    json: opt.JsonOption = False,
) -> None:
    """List the models of a gateway (--url), or which layers each node (--node) serves.

    Exits with 1 if a node does not answer.
    """
    if node:
        reports = asyncio.run(_survey(node, network, psk_file))
        show.print_json({"nodes": [_node_entry(report) for report in reports]}) if json else _print_nodes(
            reports
        )
        if any(report.error is not None for report in reports):
            raise typer.Exit(failures.EXIT_FAILURE)
        return
    listed = asyncio.run(_list(url, api_key))
    show.print_json({"data": listed}) if json else _print_models(listed)


async def _list(url: str | None, api_key: str | None) -> list[dict[str, Any]]:
    from cli.gateway import DEFAULT_URL, open_gateway

    async with open_gateway(url or DEFAULT_URL, api_key=api_key, model="") as gateway:
        return await gateway.list_models()


async def _survey(node: Sequence[str], network: str, psk_file: Path | None) -> list[NodeReport]:
    from cli.membership import read_membership
    from cli.survey import survey
    from routing.addresses import parse_address

    return await survey([parse_address(text) for text in node], read_membership(network, psk_file))


def status_of(entry: dict[str, Any]) -> str:
    """What a gateway says about one of its models, missing layers by their numbers."""
    status = str(entry.get("status", "listed"))
    missing = [(int(start), int(end)) for start, end in entry.get("missing_layers") or ()]
    return f"{status}: no node serves layers {show.ranges(missing)}" if missing else status


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
