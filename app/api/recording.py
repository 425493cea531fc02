"""Notes in a request's record what its engine says at the end.

Knows every kind of answer, and keeps nothing of what is in it.
"""

from __future__ import annotations

from dataclasses import fields

from app.engine.diffusion.request import Made
from app.engine.embedding_request import EmbeddingFinished
from app.engine.request import Finished
from app.engine.speech import Transcribed
from app.records import EndedAnswer, RequestRecord


def note_event(record: RequestRecord, index: int, event: object) -> None:
    """Keep an event that ends answer `index`; any other says nothing that outlives the answer."""
    match event:
        case Finished():
            record.answers[index] = EndedAnswer(
                event.reason,
                event.prompt_tokens,
                event.completion_tokens,
                _seconds(event.timings),
                event.replays,
                event.route,
                event.hops,
            )
        case Made() | EmbeddingFinished():
            record.answers[index] = EndedAnswer(
                None, None, None, _seconds(event.timings), event.replays, event.route
            )
        case Transcribed():
            record.answers[index] = EndedAnswer(
                None,
                event.prompt_tokens,
                event.timings.tokens,
                _seconds(event.timings),
                event.replays,
                event.route,
            )


def _seconds(timings: object) -> dict[str, float]:
    names = [one.name for one in fields(timings) if one.name.endswith("_s")]  # type: ignore[arg-type]
    return {name: round(float(getattr(timings, name)), 6) for name in names}
