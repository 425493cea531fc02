"""The `diffuse` object of a request: what it asks of its route, checked and put over the gateway's own wishes.

Knows ids as hex digits; which nodes there are is for the engine to say.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from app.api.errors import invalid
from app.api.messages import refuse
from app.engine.drafts import DraftMode
from app.engine.route_options import ID_DIGITS, MIN_DIGITS, RouteOptions
from app.settings import MAX_AVOIDED, MAX_HOPS, MAX_PINNED


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


NodeName = Annotated[
    str,
    BeforeValidator(_lower, json_schema_input_type=str),
    Field(pattern=rf"^[0-9a-f]{{{MIN_DIGITS},{ID_DIGITS}}}$"),
]


class RoutingField(BaseModel):
    """Wishes for the route, and whether tokens are guessed ahead on it (`draft`).

    Nodes are named by their id in hex digits, or the first 8 digits and more.

    Unlike elsewhere in the body, an unknown field is refused: it would be a wish that is not kept.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", hide_input_in_errors=True)

    pin: Annotated[list[NodeName] | None, Field(max_length=MAX_PINNED)] = None
    avoid: Annotated[list[NodeName] | None, Field(max_length=MAX_AVOIDED)] = None
    max_hops: Annotated[int | None, Field(ge=1, le=MAX_HOPS)] = None
    distinct_owners: bool | None = None
    draft: DraftMode | None = None

    @model_validator(mode="after")
    def _can_be(self) -> Self:
        """Refuse what no swarm could give."""
        if set(self.pin or ()) & set(self.avoid or ()):
            raise refuse("a node is both pinned and avoided", field="pin")
        return self

    def over(self, own: RouteOptions) -> RouteOptions:
        """Put what is asked over the gateway's own wishes. Raises `ApiError` 400 where both make nonsense."""
        pin = own.pin if self.pin is None else tuple(dict.fromkeys(self.pin))
        avoid = tuple(dict.fromkeys(self.avoid or ()))
        max_hops = own.max_hops if self.max_hops is None else self.max_hops
        distinct = own.distinct_owners if self.distinct_owners is None else self.distinct_owners
        if max_hops is not None and len(pin) > max_hops:
            raise invalid("diffuse.max_hops", f"{len(pin)} pinned nodes do not fit {max_hops} hops")
        if distinct and max_hops == 1:
            raise invalid("diffuse.max_hops", "one hop cannot have two owners (distinct_owners)")
        return RouteOptions(pin, avoid, max_hops, distinct)
