"""What nodes may hold of a session before its first step, and how that is named without telling what it is.

A prefix is named by a hash over its tokens (made by whoever knows them, with a secret of theirs) and over everything
else that the bits of keys and values depend on: which nodes run which layers in which form, and what travels between
them. Nobody can ask for a prefix without having been told its name, and names differ from tenant to tenant.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgpack

from routing.types import Buffer, NodeId, Prefix, Route, SliceSpec, WireDtype

NAME_SIZE = 16  # B
# What a step of so many prompt rows costs, in tokens of an answer, and how long an answer is taken to be, where a route
# that holds a prefix is weighed against a faster one (performance.md 13: eight rows cost about twice one).
ROWS_PER_TOKEN = 4
ANSWER_TOKENS = 64


class Beginning(Protocol):
    """What a chain needs to know of the tokens of its session, from whoever has them."""

    @property
    def num_rows(self) -> int:
        """Rows of the prompt."""

    @property
    def holders(self) -> Mapping[NodeId, SliceSpec]:
        """The nodes that are believed to hold most of it, and which layers."""

    @property
    def num_held(self) -> int:
        """How much of it they are believed to hold, in positions."""

    def candidates(self, context: bytes) -> Sequence[Prefix]:
        """What a route of this context may hold, the longest first; at most `sealing.MAX_PREFIXES`."""

    def note_held(self, context: bytes, num_held: int) -> None:
        """What it does hold."""

    async def rows(self, start: int, end: int, wire: WireDtype) -> Buffer:
        """The payload of a step over positions [start, end) of the prompt, which no step was sent for."""

    def names(self, context: bytes, num_positions: int) -> Sequence[bytes]:
        """The hashes of all full blocks within the first `num_positions`, prompt and answer."""


def context_of(route: Route, wires: Sequence[WireDtype]) -> bytes:
    """A digest of what keys and values on this route depend on besides the tokens."""
    hops = [
        [
            hop.address.node_id,
            hop.offer.model_digest,
            hop.spec.start,
            hop.spec.end,
            hop.offer.form,
            int(hop.offer.dtype),
            int(wire),
        ]
        for hop, wire in zip(route.hops, wires, strict=False)
    ]
    return hashlib.blake2b(msgpack.packb(hops), digest_size=32, person=b"diffuse-route/1").digest()


def prefers_holders(
    free_ms: float,
    holders_ms: float,
    *,
    num_rows: int,
    num_held: int,
    free_lines_ms: float = 0.0,
    holders_lines_ms: float = 0.0,
) -> bool:
    """Whether a route whose nodes hold `num_held` of `num_rows` is worth its slower tokens (ms each).

    Of these `lines_ms` is what a row takes on lines: there, rows of a prompt are no cheaper than others.
    """

    def costs(ms: float, rows: int, on_lines_ms: float) -> float:
        return ms * (rows / ROWS_PER_TOKEN + ANSWER_TOKENS) + on_lines_ms * rows * (1 - 1 / ROWS_PER_TOKEN)

    return costs(holders_ms, num_rows - num_held, holders_lines_ms) <= costs(free_ms, num_rows, free_lines_ms)
