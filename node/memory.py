"""How much of a machine's memory a node takes: for the slices that placement decides about, and for their sessions.

Only says numbers; `budget` counts what sessions have taken of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

from node.budget import default_budget_bytes, free_memory_bytes
from node.placing import Room
from node.settings import NodeSettings
from node.slice_table import SliceTable
from routing.errors import SettingsError

SESSIONS_SHARE = 0.1  # of the memory allowed: for keys and values, however much the weights take


@dataclass(frozen=True, slots=True)
class Memory:
    """What weights and sessions may take on this machine, in bytes."""

    settings: NodeSettings
    allowed_bytes: int
    fixed_bytes: int  # of it: slices that stay as they are

    def check(self) -> None:
        """Raise SettingsError where layers that were asked for take more than the memory that was."""
        limit_bytes = self.settings.memory_bytes
        if limit_bytes is not None and self.fixed_bytes > limit_bytes:
            raise SettingsError(
                f"these layers take {self.fixed_bytes / 1e6:.0f} MB, and --memory allows "
                f"{limit_bytes / 1e6:.0f} MB: give more, or serve fewer with --layers"
            )

    def room(self, slices: SliceTable) -> Room:
        """For slices that placement decides about: in all, and beside those held now."""
        allowed = self.allowed_bytes - self.fixed_bytes
        if self.settings.memory_bytes is not None:
            return Room(allowed, self.allowed_bytes - slices.weights_bytes)
        free_bytes = free_memory_bytes(self.settings.device)
        return Room(allowed, int(free_bytes * self.settings.overhead))

    def budget_bytes(self, slices: SliceTable, *, is_placed: bool) -> int:
        """For keys and values: as set, else a share; with placement or --memory what weights leave of that."""
        if self.settings.kv_budget_bytes is not None:
            return self.settings.kv_budget_bytes
        if not is_placed and self.settings.memory_bytes is None:
            return default_budget_bytes(self.settings.device)
        weights_bytes = sum(held.weights_bytes for held in slices.serving)
        return max(int(self.allowed_bytes * SESSIONS_SHARE), self.allowed_bytes - weights_bytes)
