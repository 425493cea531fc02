"""A library of engines that are all open: what a fixed set of models looks like to the API. Knows no network.

What engines tell of themselves beyond their protocol is taken: `model_kind`, `takes`, and `plan`, a `RoutePlan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from app.engine.planned import RoutePlan
from app.engine.request import AnyEngine, KnownModel, Modality, TextEngine
from app.engine.route_options import RouteOptions

if TYPE_CHECKING:
    from app.engine.diffusion.request import DiffusionEngine


class Shelf:
    """A `Library` over engines by name; they may be added to later."""

    def __init__(self, engines: Mapping[str, AnyEngine]) -> None:
        self._engines = engines

    def models(self) -> tuple[KnownModel, ...]:
        return tuple(_known(name, engine) for name, engine in self._engines.items())

    def find(self, name: str) -> KnownModel | None:
        engine = self._engines.get(name)
        return None if engine is None else _known(name, engine)

    def unserved(self) -> dict[str, str]:
        return {}

    def plan(self, name: str, options: RouteOptions) -> RoutePlan:
        engine = self._engines[name]
        plan: RoutePlan | None = getattr(engine, "plan", None)
        return plan or RoutePlan.at_home(engine.coverage().num_layers)

    async def engine(self, name: str) -> AnyEngine:
        return self._engines[name]


def _known(name: str, engine: AnyEngine) -> KnownModel:
    if hasattr(engine, "kind"):
        pictures = cast("DiffusionEngine", engine)
        longest = pictures.defaults.max_text or 0
        return KnownModel(name, engine.coverage(), pictures.created, longest, kind=pictures.kind.value)
    text = cast("TextEngine", engine)
    kind: str = getattr(engine, "model_kind", "text")
    takes: tuple[Modality, ...] = getattr(engine, "takes", ("text",))
    created, longest = text.tokenizer.created, text.max_positions
    return KnownModel(name, text.coverage(), created, longest, kind=kind, takes=takes)
