"""Whether a row's bits are the same alone and in a step of several, everywhere on its way. Pure."""

from __future__ import annotations

from routing.types import Route
from slicing.batch import Runner

GROUPING = "plain/"  # how the forms begin whose bits depend on how rows are grouped


def grouping_matters(route: Route | None, ends: Runner | None) -> str:
    """Say why it matters in which steps rows are sent; "" where it does not. `ends`: the runner at home, if any."""
    where = ""
    if route is None or any(hop.offer.form.startswith(GROUPING) for hop in route.hops):
        where = "a node computes"
    if ends is not None and not ends.is_invariant:
        where = "the ends compute"
    return f"{where} in a form whose bits depend on how rows are grouped" if where else ""
