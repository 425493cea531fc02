"""The slices that this node holds, of one or several models: which of them does a piece of work, and which are leaving.

A draining slice takes no new session and is offered to nobody; those it has go on until they end, or until it is
removed. Belongs to the event loop. Knows nothing of links, and of sessions only how many there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from node.held_slice import HeldSlice, check_shape
from node.speed import LayerSpeed
from routing.errors import ErrorCode, WorkError
from routing.types import HopEntry, SliceOffer


@dataclass(slots=True, eq=False)
class _Place:
    """One held slice and what happens to it."""

    held: HeldSlice
    speed: LayerSpeed
    num_sessions: int = 0
    is_draining: bool = False
    emptied: asyncio.Event = field(default_factory=asyncio.Event)


class SliceTable:
    """Held slices in the order in which they came; a later one that does the same work is preferred.

    `on_removed` is told of a slice that is taken away: whoever has sessions on it ends them (NO_SLICE).
    """

    def __init__(self, slices: Iterable[HeldSlice] = ()) -> None:
        self.on_removed: Callable[[HeldSlice], None] | None = None
        self._is_closed = False
        self._places: list[_Place] = []
        for held in slices:
            self.add(held)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, held: HeldSlice) -> bool:
        return any(place.held is held for place in self._places)

    @property
    def held(self) -> tuple[HeldSlice, ...]:
        """Every slice that is here, those that drain too."""
        return tuple(place.held for place in self._places)

    @property
    def serving(self) -> tuple[HeldSlice, ...]:
        """The slices that take new sessions."""
        return tuple(place.held for place in self._places if not place.is_draining and not self._is_closed)

    @property
    def weights_bytes(self) -> int:
        """Bytes of all slices that are here."""
        return sum(place.held.weights_bytes for place in self._places)

    @property
    def num_draining(self) -> int:
        """Slices that are on their way out."""
        return sum(place.is_draining for place in self._places)

    def offers(self) -> tuple[SliceOffer, ...]:
        """What others may ask for, with the ms per layer of late."""
        return tuple(
            replace(place.held.offer, layer_ms=place.speed.told_ms)
            for place in self._places
            if not place.is_draining and not self._is_closed
        )

    def find(self, entry: HopEntry, session_held: HeldSlice | None = None) -> HeldSlice:
        """The slice that does this work; `session_held`, which a live session has its state on, before all others.

        Raises WorkError NO_SLICE naming what is held, or ProtocolError for what no correct gateway asks.
        """
        check_shape(entry)
        serving = self.serving[::-1]
        if session_held is not None and session_held in self:
            serving = (session_held, *serving)  # it may be draining: its keys and values are worth more
        for held in serving:
            if held.serves(entry):
                held.check(entry)
                return held
        raise WorkError(ErrorCode.NO_SLICE, self._refusal(entry))

    def add(self, held: HeldSlice) -> None:
        """Take in a slice that can compute."""
        assert held not in self, "a slice is added once"
        place = _Place(held, LayerSpeed(held.offer.layer_ms))
        place.emptied.set()
        self._places.append(place)

    def attach(self, held: HeldSlice) -> None:
        """Count one more session of a slice."""
        place = self._place(held)
        assert place is not None, "the slice is not here"
        place.num_sessions += 1
        place.emptied.clear()

    def detach(self, held: HeldSlice) -> None:
        """Count one session less; that of a slice which was removed before is fine."""
        place = self._place(held)
        if place is None:
            return
        assert place.num_sessions > 0, "more sessions left than came"
        place.num_sessions -= 1
        if not place.num_sessions:
            place.emptied.set()

    def num_sessions(self, held: HeldSlice) -> int:
        """Live sessions of a slice."""
        place = self._place(held)
        return 0 if place is None else place.num_sessions

    def drain(self, held: HeldSlice) -> None:
        """Offer a slice no more and give it no new session."""
        place = self._place(held)
        assert place is not None, "the slice is not here"
        place.is_draining = True

    def close_doors(self) -> None:
        """Drain every slice, those still to come too: the node leaves."""
        self._is_closed = True

    async def wait_empty(self, held: HeldSlice) -> None:
        """Return when a slice has no session (any more)."""
        place = self._place(held)
        if place is not None:
            await place.emptied.wait()

    def remove(self, held: HeldSlice) -> None:
        """Take a slice away. Sessions it still has are ended by whoever listens at `on_removed`."""
        place = self._place(held)
        assert place is not None, "the slice is not here"
        self._places.remove(place)
        place.emptied.set()
        if self.on_removed is not None:
            self.on_removed(held)

    def note_compute(self, held: HeldSlice, entry: HopEntry, rows: int, compute_s: float) -> None:
        """A step of `rows` rows was computed: decode steps tell how fast a layer is now."""
        place = self._place(held)
        num_layers = entry.end - entry.start
        if place is None or rows != 1 or not num_layers:
            return
        head_ms = held.head_ms if entry.run_closing else 0.0
        place.speed.note(max(0.0, compute_s * 1000 - head_ms) / num_layers)

    def layer_ms(self, held: HeldSlice) -> float:
        """What one decode row takes in one layer of late, in milliseconds."""
        place = self._place(held)
        return held.offer.layer_ms if place is None else place.speed.layer_ms

    def tell_speeds(self) -> bool:
        """Bring the offers' ms per layer up to date; whether that changed one enough to be told (see `LayerSpeed`)."""
        changed = [
            place.speed.tell() for place in self._places
        ]  # each of them: `any` alone would stop at the first
        return any(changed)

    def _place(self, held: HeldSlice) -> _Place | None:
        return next((place for place in self._places if place.held is held), None)

    def _refusal(self, entry: HopEntry) -> str:
        held = ", ".join(slice_.name for slice_ in self.serving) or "nothing now"
        digests = {slice_.offer.model_digest for slice_ in self.serving}
        if digests and entry.model_digest not in digests:
            return f"another model is asked for; held here: {held}"
        ends = [
            text
            for text, is_asked in (
                ("the opening end", entry.run_opening),
                ("the closing end", entry.run_closing),
            )
            if is_asked
        ]
        asked = " with ".join((f"layers {entry.start}:{entry.end}", *ends))
        return f"{asked} asked; held here: {held}"
