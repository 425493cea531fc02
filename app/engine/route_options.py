"""What a request may ask of its route: nodes it must use, nodes it must not, how many hops, whose.

Nodes are named by their id in hex digits, or by the beginning of it. Knows which nodes there are only as far as it
is told; planning is `routing.planner`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields

from routing.types import NodeId

MIN_DIGITS = 8  # of a beginning: 4 billion nodes tell apart
ID_DIGITS = 64


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """Wishes for one route. Ids are lower-case hex digits, whole or the first `MIN_DIGITS` and more."""

    pin: tuple[str, ...] = ()  # every one of these is a hop
    avoid: tuple[str, ...] = ()  # none of these ever is
    max_hops: int | None = None
    distinct_owners: bool = False  # of the first and the last hop

    @property
    def names(self) -> list[str]:
        """The options that are asked for."""
        return [option.name for option in fields(self) if getattr(self, option.name) not in ((), None, False)]


ANY_ROUTE = RouteOptions()


class NodeNameError(Exception):
    """A beginning of an id that names no node, or several; `option` is the field it stood in."""

    def __init__(self, option: str, message: str, *, is_unknown: bool) -> None:
        super().__init__(message)
        self.option = option
        self.message = message
        self.is_unknown = is_unknown


def pinned_nodes(options: RouteOptions, known: Collection[NodeId]) -> frozenset[NodeId]:
    """Return the ids to pin. Raises `NodeNameError` for a beginning that does not name one known node."""
    return frozenset(_one(text, known) for text in options.pin)


def avoided_nodes(options: RouteOptions, known: Collection[NodeId]) -> frozenset[NodeId]:
    """Return the ids to avoid; of an ambiguous beginning all of them.

    Raises `NodeNameError` for a beginning that no known node has: the node could come back in the middle of an
    answer, and would not be avoided then.
    """
    found: set[NodeId] = set()
    for text in options.avoid:
        matching = list(_matching(text, known))
        if not matching:
            message = f"no known node's id begins with {text}: give the whole id to avoid a node that is away"
            raise NodeNameError("avoid", message, is_unknown=True)
        found.update(matching)
    return frozenset(found)


def _one(text: str, known: Collection[NodeId]) -> NodeId:
    matching = list(_matching(text, known))
    if not matching:
        raise NodeNameError("pin", f"no live node's id begins with {text}", is_unknown=True)
    if len(matching) > 1:
        message = f"{len(matching)} nodes' ids begin with {text}: give more digits"
        raise NodeNameError("pin", message, is_unknown=False)
    return matching[0]


def _matching(text: str, known: Collection[NodeId]) -> Iterable[NodeId]:
    if len(text) == ID_DIGITS:
        return [NodeId(bytes.fromhex(text))]
    return [node_id for node_id in known if node_id.hex().startswith(text)]
