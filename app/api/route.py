"""`GET /v1/route?model=`: the route that a request would take now, and what each machine on it can see."""

from __future__ import annotations

from typing import Final, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.errors import ApiError, not_ready
from app.api.messages import Lenient
from app.api.scope import key_of
from app.engine.planned import PlannedHop, RoutePlan
from app.engine.request import KnownModel, ModelState
from app.gateway import Gateway
from app.keys import ApiKey

PATH = "/v1/route"

# What a machine can read of a request, from its memory or its links.
Sight = Literal[
    "hidden_states", "encoder_states", "prompt_embeddings", "token_ids", "answer", "answer_length"
]
ENCODED_KINDS: Final = frozenset({"seq2seq", "speech", "music"})  # encoder states go to every hop
PIPELINE_KINDS: Final = frozenset({"picture", "video", "audio"})  # of those, what the text encoder made
SIGHTS: Final[dict[Sight, str]] = {
    "hidden_states": "computes on hidden states, from which whoever knows the weights can reconstruct the prompt",
    "encoder_states": "holds the encoder's states of the prompt",
    "prompt_embeddings": "holds the prompt as the text encoder encoded it",
    "token_ids": "reads the token ids of the prompt, and of the answer as it grows",
    "answer": "draws and reads the answer",
    "answer_length": "sees how long the answer becomes",
}


class PlannedHopField(Lenient):
    """One hop, in the order of the route. `layers` are half-open, in the model's own numbers.

    `layer_ms` is one token (of a pipeline: one pass) through one layer; `token_ms` all layers of the hop and its
    queue. They are measured here where `is_measured`, else claimed by the node. null: not known.
    """

    node: str
    layers: tuple[int, int]
    stack: str | None
    path: Literal["direct", "relayed"]
    rtt_ms: float | None
    layer_ms: float | None
    queue_ms: float
    token_ms: float | None
    is_measured: bool
    dtype: str
    form: str
    sees: tuple[Sight, ...]
    statement: str


class PrivacyField(Lenient):
    """Who sees what, for programs: what stays at the gateway, and what nobody on the way can read."""

    in_transit: Literal["encrypted"] = "encrypted"
    ends: Literal["home", "nodes"]
    stays_home: tuple[str, ...]
    relays_see: tuple[str, ...] = ("sizes", "times", "addresses")
    statement: str


class RouteReport(Lenient):
    """The route of one model. `replicas` counts live nodes by layer; layers in `home_layers` need none."""

    object: Literal["route"] = "route"
    model: str
    kind: str
    status: ModelState
    layers: int
    home_layers: list[tuple[int, int]]
    hops: list[PlannedHopField]
    replicas: list[int]
    expected_ms: float | None
    privacy: PrivacyField


class RoutePlans:
    """The endpoint, over one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def retrieve(self, request: Request) -> Response:
        """Plan a route as a request without wishes would, and tell it; nothing is opened or kept."""
        key = key_of(request.scope)
        asked = request.query_params.get("model") or self._first(key)
        known = self._gateway.model(asked, key)
        if known.status.state in ("partial", "failed"):
            raise not_ready(known.name, known.status)
        plan = self._gateway.library.plan(known.name, self._gateway.settings.route)
        return JSONResponse(report_of(asked, known, plan).model_dump(mode="json"))

    def _first(self, key: ApiKey) -> str:
        """The first listed model, one that can answer before others. Raises `ApiError` 404."""
        found = self._gateway.listed(key)
        if not found:
            raise ApiError(404, "model_not_found", "no model is served here now", param="model")
        return min(found, key=lambda known: not known.status.can_answer).name


def report_of(asked: str, known: KnownModel, plan: RoutePlan) -> RouteReport:
    """A plan as clients see it."""
    return RouteReport(
        model=asked,
        kind=known.kind,
        status=known.status.state,
        layers=plan.num_layers,
        home_layers=list(plan.home),
        hops=[_hop(hop, known.kind) for hop in plan.hops],
        replicas=list(plan.replicas),
        expected_ms=plan.expected_ms,
        privacy=_privacy(plan, known.kind),
    )


def _hop(planned: PlannedHop, kind: str) -> PlannedHopField:
    hop, sees = planned.hop, _sees(planned, kind)
    layer_ms = planned.layer_ms
    whole_ms = None if layer_ms is None else layer_ms * (hop.end - hop.start) + planned.queue_ms
    return PlannedHopField(
        node=hop.node,
        layers=(hop.start, hop.end),
        stack=planned.stack or None,
        path="relayed" if hop.is_relayed else "direct",
        rtt_ms=_rounded(planned.rtt_ms),
        layer_ms=_rounded(layer_ms, 4),
        queue_ms=round(planned.queue_ms, 3),
        token_ms=_rounded(whole_ms),
        is_measured=planned.is_measured,
        dtype=planned.dtype,
        form=planned.form,
        sees=sees,
        statement="; ".join(SIGHTS[sight] for sight in sees),
    )


def _sees(planned: PlannedHop, kind: str) -> tuple[Sight, ...]:
    sees: list[Sight] = ["token_ids"] if planned.opens else []
    sees.append("hidden_states")
    sees += ["encoder_states"] if kind in ENCODED_KINDS else []
    sees += ["prompt_embeddings"] if kind in PIPELINE_KINDS else []
    if planned.closes:
        sees.append("answer")
    elif kind not in PIPELINE_KINDS:
        sees.append("answer_length")
    return tuple(sees)


def _privacy(plan: RoutePlan, kind: str) -> PrivacyField:
    parts: tuple[str, ...] = ("everything",)
    if not plan.hops:
        said = "The whole model runs here: nothing leaves this gateway."
    elif kind in PIPELINE_KINDS:
        parts = ("text encoder", "noise schedule", "decoder")
        said = "The prompt's text and the finished work stay here; nodes run the blocks between."
    elif plan.has_ends:
        parts = ("tokenizer", "embedding", "head", "sampler")
        said = (
            "Embedding, head and sampler are here: no node gets the text. Activations can still give it away."
        )
    else:
        parts = ("tokenizer",)
        said = "The first node reads token ids, the last one reads the answer: use nodes that you trust."
    ends: Literal["home", "nodes"] = "home" if plan.has_ends else "nodes"
    return PrivacyField(ends=ends, stays_home=parts, statement=said)


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)
