"""Which series exist before anything was counted: of a counter that begins with its first count, no rate is known.

What is not here can happen too, and its series begins with it. All sets are closed: nothing that a client makes up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, get_args

from app.engine.request import KnownModel
from app.state.trouble import Part

if TYPE_CHECKING:
    from app.metrics import GatewayMetrics

CHAT, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/completions"
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
ENDPOINTS: Final[Mapping[str, tuple[str, ...]]] = {  # by what a model makes
    "text": (CHAT, RESPONSES, COMPLETIONS),
    "embeddings": ("/v1/embeddings",),
    "image": ("/v1/images/generations",),
    "video": ("/v1/videos",),
    "audio": ("/v1/audio/speech",),
}
HEARD: Final = (TRANSCRIPTIONS, TRANSLATIONS)  # by models that write down what they hear
REASONS: Final = ("stop", "length")
CODES: Final = (  # that alerts and boards ask for
    "bad_node",
    "compute_failed",
    "deadline_exceeded",
    "encode_failed",
    "first_token_timeout",
    "internal_error",
    "model_failed",
    "model_loading",
    "no_route",
    "node_lost",
    "overloaded",
    "queue_timeout",
    "shutting_down",
    "stalled",
)
LIMITS: Final = ("rate_limit_exceeded", "concurrency_limit_exceeded", "overloaded", "queue_timeout")


def begin_endpoints(metrics: GatewayMetrics) -> None:
    """Let the series begin that no model is named in."""
    for endpoint in (*(one for many in ENDPOINTS.values() for one in many), *HEARD):
        metrics.aborts.labels(endpoint)
        for code in CODES:
            metrics.errors.labels(endpoint, code)
    for reason in LIMITS:
        metrics.admission.limited.labels(reason)
    for part in get_args(Part):
        metrics.state_errors.labels(part)


def begin_model(metrics: GatewayMetrics, known: KnownModel) -> None:
    """Let the series of a model begin."""
    name, makes = known.name, known.makes
    metrics.running.labels(name)
    metrics.replays.labels(name)
    is_text = makes == "text"
    for endpoint in HEARD if known.kind == "speech" else ENDPOINTS[makes]:
        metrics.request_seconds.labels(name, endpoint)
        for reason in REASONS if is_text and known.kind != "speech" else REASONS[:1]:
            metrics.answers.labels(name, endpoint, reason)
    if is_text or known.kind == "music":
        metrics.generated_tokens.labels(name)
        metrics.prompt_tokens.labels(name)
        metrics.inter_token.labels(name)
    if is_text and known.kind != "speech":
        for begun in (
            metrics.first_token,
            metrics.prefill_seconds,
            metrics.decode_seconds,
            metrics.request_prompt_tokens,
            metrics.request_generated_tokens,
            metrics.cached_tokens,
            metrics.prefix_hits,
            metrics.drafted,
            metrics.accepted,
            metrics.forced,
        ):
            begun.labels(name)
    if makes == "embeddings":
        metrics.prompt_tokens.labels(name)
        metrics.embedded.labels(name)
    if makes in ("image", "video", "audio"):
        metrics.diffusion.steps.labels(name)
