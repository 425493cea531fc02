"""The one line that the log has of an accepted request: how it ended, its counts, and where its time went."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from app.records import RequestRecord
from app.request_notes import current_notes

log = logging.getLogger(__name__)

# Sums over a request's answers. The rest of what a record holds is asked of /v1/requests.
TOLD_TIMES = ("prefill_s", "decode_s", "compute_s", "network_s", "queue_s")


def log_end(record: RequestRecord, outcome: str, counts: Mapping[str, int | float]) -> None:
    """Write it; `counts` are those that the endpoint knows from the request itself."""
    if (notes := current_notes()) is not None:
        notes.is_logged = True
        if notes.trace is not None:
            notes.trace.end(record, outcome, counts)
    if not log.isEnabledFor(logging.INFO):
        return
    told = " ".join(f"{name} {value}" for name, value in counts.items())
    log.info(
        "request %s: %s %s of %s, %s",
        record.request_id,
        record.answer_id,
        outcome,
        record.model,
        told,
        extra={
            "request_id": record.request_id,
            "answer_id": record.answer_id,
            "model": record.model,
            "endpoint": record.endpoint,
            "outcome": outcome,
            "code": record.error,
            "took_s": record.took_s,
            **counts,
            **_totals(record),
        },
    )


def _totals(record: RequestRecord) -> dict[str, int | float]:
    ended = record.answers.values()
    totals: dict[str, int | float] = {"replays": sum(answer.replays for answer in ended)}
    if any(answer.completion_tokens is not None for answer in ended):
        totals["completion_tokens"] = sum(answer.completion_tokens or 0 for answer in ended)
    for name in TOLD_TIMES:
        if any(name in answer.timings for answer in ended):
            totals[name] = sum(answer.timings.get(name, 0.0) for answer in ended)
    return totals
