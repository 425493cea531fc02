"""Names weights and forms of computing: equal fingerprint, seed and request, equal answer."""

from __future__ import annotations

import hashlib

from routing.types import Route, WireDtype
from slicing.batch import Runner


def fingerprint(
    digest: bytes, runner: Runner | None, wire: WireDtype | None, route: Route | None, *more: str
) -> str:
    """Return the name of a model's weights over a route; `more` is what else an answer depends on.

    `runner`: that of the ends, None where they are remote. `wire`: None where rows travel as they are computed.
    """
    forms = sorted({f"{hop.offer.form}/{hop.offer.dtype.name}" for hop in route.hops}) if route else []
    ends = "thin" if runner is None else runner.form
    parts = [digest.hex(), *more, ends, wire.name if wire else "compute", *forms]
    return "fp_" + hashlib.sha256("|".join(parts).encode()).hexdigest()[:12]
