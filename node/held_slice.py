"""The slice that this node holds: what it offers, and whether a route may ask it for some work.

Knows nothing of sessions or links.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from routing.errors import ErrorCode, ProtocolError, WorkError
from routing.types import HopEntry, SliceOffer, WireDtype
from slicing.batch import Runner

if TYPE_CHECKING:
    from node.call_job import CallRunner

SPOKEN_DTYPES = (WireDtype.FLOAT32, WireDtype.BFLOAT16, WireDtype.FLOAT16)
KEY_BYTES = 32
KIB = 1024


@dataclass(frozen=True, slots=True, eq=False)
class HeldSlice:
    """A loaded slice and the offer that describes it. Two are the same only where they are one."""

    runner: Runner | CallRunner
    offer: SliceOffer
    cache_bytes_per_position: int  # in all held layers
    weights_bytes: int = 0
    head_ms: float = 0.0  # measured at the load: norm and head on one row, where they are held

    @property
    def name(self) -> str:
        """What it is, for errors and logs."""
        return f"layers {self.offer.spec} of {self.offer.model_name}"

    @property
    def takes_calls(self) -> bool:
        """Whether blocks of diffusion are held: they are called, and have no positions."""
        return not hasattr(self.runner, "run_layers_batch")

    @property
    def layers(self) -> Runner:
        """The runner of a slice that does not take calls."""
        assert not self.takes_calls
        return self.runner  # type: ignore[return-value]

    @property
    def blocks(self) -> CallRunner:
        """The runner of a slice that takes calls."""
        assert self.takes_calls
        return self.runner  # type: ignore[return-value]

    def cache_bytes(self, entry: HopEntry, num_positions: int) -> int:
        """What a session of this work takes for so many positions, the room to grow and its memory included.

        Layers are taken as equal. For a session of calls: so many KiB of each block, for kept keys and values.
        """
        num_layers = entry.end - entry.start
        if entry.calls:
            return num_positions * KIB * num_layers
        num_held = self.offer.spec.end - self.offer.spec.start
        memory_bytes = self.layers.memory_bytes(entry.memory_rows) if entry.memory_rows else 0
        return self.layers.cache_bytes(num_positions) * entry.branches * num_layers // num_held + memory_bytes

    def serves(self, entry: HopEntry) -> bool:
        """Whether the layers and ends asked for are held."""
        offer = self.offer
        return (
            entry.model_digest == offer.model_digest
            and offer.spec.start <= entry.start <= entry.end <= offer.spec.end
            and (not entry.run_opening or (offer.has_opening and entry.start == 0))
            and (not entry.run_closing or (offer.has_closing and entry.end == offer.num_layers))
        )

    def check(self, entry: HopEntry) -> None:
        """Refuse work that this slice cannot do. Raises WorkError NO_SLICE, or ProtocolError."""
        check_shape(entry)
        if not self.serves(entry):
            raise WorkError(ErrorCode.NO_SLICE, f"layers {entry.start}:{entry.end} asked; held: {self.name}")
        if entry.calls is not self.takes_calls:
            raise ProtocolError(ErrorCode.MALFORMED, f"calls and hidden states are confused: {self.name}")
        if not entry.calls:
            self._check_rows(entry)

    def _check_rows(self, entry: HopEntry) -> None:
        """Refuse positions and rows that the model does not have. Raises ProtocolError."""
        layers = self.layers
        if entry.max_positions > layers.max_positions:
            text = f"{entry.max_positions} positions asked, the model has {layers.max_positions}"
            raise ProtocolError(ErrorCode.TOO_BIG, text)
        has_end, has_memory = entry.run_opening or entry.run_closing, bool(entry.memory_rows)
        needs_memory = layers.takes_memory and entry.start < entry.end
        shares_calls = layers.max_works > 1  # in which all positions have as many axes
        problems = {
            "memory": (needs_memory and not has_memory) or (has_memory and not layers.takes_memory),
            "axes": entry.axes > layers.max_axes or (shares_calls and entry.axes not in (0, layers.max_axes)),
            "branches": entry.branches > layers.max_branches,
            "streams": has_end and entry.streams != layers.num_streams,
        }
        if wrong := [name for name, is_wrong in problems.items() if is_wrong]:
            raise ProtocolError(
                ErrorCode.MALFORMED, f"what is asked does not fit the model: {', '.join(wrong)}"
            )


def check_shape(entry: HopEntry) -> None:
    """Refuse what no correct gateway would seal. Raises ProtocolError."""
    is_last = entry.hop == entry.num_hops - 1
    problems = {
        "hop numbers": not 0 <= entry.hop < entry.num_hops,
        "next hop": is_last is not (entry.next_hop is None),
        "route key": len(entry.route_key) != KEY_BYTES,
        "answer key": is_last and len(entry.answer_key) != KEY_BYTES,
        "opening hop": entry.run_opening is not (entry.wire_in is WireDtype.INT32),
        "closing hop": entry.run_closing and not is_last,
        "wire dtype": entry.wire_out not in SPOKEN_DTYPES,
        "positions": entry.max_positions < 1,
        "empty range": entry.start == entry.end and not (entry.run_opening or entry.run_closing),
        "calls": entry.calls and (entry.run_opening or entry.run_closing or entry.resumes or entry.prefixes),
        "rows": entry.calls and (entry.branches > 1 or entry.streams > 1 or entry.axes or entry.memory_rows),
        "prefixes": entry.prefixes and (entry.branches > 1 or entry.memory_rows),
    }
    wrong = [name for name, is_wrong in problems.items() if is_wrong]
    if wrong:
        raise ProtocolError(ErrorCode.MALFORMED, f"the route entry is wrong: {', '.join(wrong)}")
