"""What is wrong with a swarm, judged from what its nodes say: pure functions from reports to findings.

Asks nobody and reads nothing; `survey` asks, `doctor` reads files and ports.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from cli import failures, show
from cli.survey import NodeReport, name_of
from routing.planner import RouteRequest, missing_layers
from routing.types import Description, NodeRecord, SliceOffer, SliceSpec

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; `text` names the port, key or layers and says what to do."""

    level: Level
    subject: str
    text: str


@dataclass(frozen=True, slots=True)
class HomeParts:
    """Which parts of the model the gateway keeps: the first and last layers, or (thin) nothing at all."""

    first: int = 1
    last: int = 0
    is_thin: bool = False

    def middle(self, num_layers: int) -> SliceSpec:
        """The layers that nodes must serve."""
        return SliceSpec(0, num_layers) if self.is_thin else SliceSpec(self.first, num_layers - self.last)


@dataclass(frozen=True, slots=True)
class OwnModel:
    """The model that a gateway here would load: what the user calls it, and its digest."""

    name: str
    digest: bytes


def examine(reports: Sequence[NodeReport], home: HomeParts, own: OwnModel | None = None) -> list[Finding]:
    """Everything there is to say about these nodes, taken one by one and then together."""
    return [
        *(_reachable(report) for report in reports),
        *(_own_model(reports, own) if own else ()),
        *_same_model(reports),
        *_same_weights(reports),
        *_coverage(reports, home),
    ]


def _reachable(report: NodeReport) -> Finding:
    if report.error is not None:
        return Finding("problem", name_of(report.address), failures.explain(report.error))
    description = report.description or Description(())
    slices = ", ".join(f"{offer.model_name} {offer.spec}" for offer in description.slices)
    rtt = f", {report.rtt_ms:.1f} ms away" if report.rtt_ms is not None else ""
    if not slices:
        return Finding("warning", name_of(report.address), f"serves nothing yet{rtt}: is it still loading?")
    return Finding("ok", name_of(report.address), f"serves {slices}{rtt}, {description.load} sessions")


def _same_model(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Nodes of one model must have the same digest, or the gateway cannot use them together."""
    held = sorted(_offers(reports), key=lambda pair: pair[1].model_name)
    for model, group in groupby(held, key=lambda pair: pair[1].model_name):
        by_digest: dict[bytes, list[NodeReport]] = {}
        for report, offer in group:
            by_digest.setdefault(offer.model_digest, []).append(report)
        if len(by_digest) > 1:
            camps = "; ".join(
                f"{digest.hex()[:12]} on {', '.join(name_of(report.address) for report in camp)}"
                for digest, camp in by_digest.items()
            )
            yield Finding(
                "problem", model, f"nodes hold different models of this name: {camps}. Load the same files"
            )
        else:
            yield Finding("ok", model, f"one digest, {next(iter(by_digest)).hex()[:12]}")


def _own_model(reports: Sequence[NodeReport], own: OwnModel) -> Iterator[Finding]:
    """A gateway uses only nodes whose model has the digest of its own files."""
    for report in reports:
        slices = report.description.slices if report.description else ()
        if slices and all(offer.model_digest != own.digest for offer in slices):
            held = ", ".join(
                sorted({f"{offer.model_name} ({offer.model_digest.hex()[:12]})" for offer in slices})
            )
            yield Finding(
                "problem",
                name_of(report.address),
                f"serves {held}, but {own.name} here is {own.digest.hex()[:12]}: "
                "give both sides the same --model files",
            )


def _same_weights(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Replicas must have loaded the same bytes for the same layer."""
    first: dict[tuple[bytes, int], tuple[bytes, NodeReport]] = {}
    differing: dict[tuple[str, str, str], list[int]] = {}
    for report, offer in _offers(reports):
        for layer, content in zip(range(offer.spec.start, offer.spec.end), offer.layer_hashes, strict=False):
            known, holder = first.setdefault((offer.model_digest, layer), (content, report))
            if known != content:
                differing.setdefault(
                    (offer.model_name, name_of(holder.address), name_of(report.address)), []
                ).append(layer)
    for (model, one, other), layers in differing.items():
        where = show.ranges(_as_ranges(layers))
        yield Finding(
            "problem", model, f"{one} and {other} hold different weights for layers {where}: reload one"
        )


def _coverage(reports: Sequence[NodeReport], home: HomeParts) -> Iterator[Finding]:
    """Every layer that does not stay at home must be served by somebody."""
    seen: dict[bytes, SliceOffer] = {offer.model_digest: offer for _, offer in _offers(reports)}
    records = [_record(report) for report in reports]
    for offer in seen.values():
        middle = home.middle(offer.num_layers)
        if middle.start > middle.end:
            yield Finding(
                "problem",
                offer.model_name,
                f"--local-layers keeps more than the model's {offer.num_layers} layers",
            )
            continue
        gaps = missing_layers(records, RouteRequest(offer.model_name, offer.model_digest, middle))
        if gaps:
            where = show.ranges(gaps)
            start = " and ".join(
                f"`diffuse host --model {offer.model_name} --layers {low}:{high}`" for low, high in gaps
            )
            yield Finding("problem", offer.model_name, f"no node serves layers {where}: start {start}")
        else:
            yield Finding("ok", offer.model_name, f"layers {middle} of {offer.num_layers} are served")
        if home.is_thin:
            yield from _ends_served(reports, offer)
    if not seen:
        yield Finding("problem", "layers", "no node serves any layer")


def _ends_served(reports: Sequence[NodeReport], model: SliceOffer) -> Iterator[Finding]:
    """With the ends on nodes, somebody must embed and somebody must keep the head."""
    offers = [offer for _, offer in _offers(reports) if offer.model_digest == model.model_digest]
    if not any(offer.has_opening and offer.spec.start == 0 for offer in offers):
        yield Finding(
            "problem", model.model_name, "no node embeds tokens: start the first one with --hold-ends"
        )
    if not any(offer.has_closing and offer.spec.end == model.num_layers for offer in offers):
        yield Finding(
            "problem", model.model_name, "no node keeps the head: start the last one with --hold-ends"
        )


def _offers(reports: Iterable[NodeReport]) -> Iterator[tuple[NodeReport, SliceOffer]]:
    for report in reports:
        for offer in report.description.slices if report.description else ():
            yield report, offer


def _record(report: NodeReport) -> NodeRecord:
    slices = report.description.slices if report.description else ()
    return NodeRecord(report.address, b"", (), slices)


def _as_ranges(layers: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as half-open ranges."""
    found: list[tuple[int, int]] = []
    for layer in sorted(layers):
        if found and found[-1][1] == layer:
            found[-1] = (found[-1][0], layer + 1)
        else:
            found.append((layer, layer + 1))
    return found
