"""Counts one request for vectors, in the metrics that answers of text have too. Knows no HTTP."""

from __future__ import annotations

from app.engine.embedding_request import Embedded, EmbeddingAdmitted, EmbeddingEvent, EmbeddingFinished
from app.request_meter import RequestMeter

FINISHED = "stop"  # the reason under which whole answers are counted, as those of text


class EmbeddingMeter(RequestMeter):
    """Times a request for vectors."""

    def count(self, event: EmbeddingEvent) -> None:
        """Note what an event says."""
        match event:
            case EmbeddingAdmitted():
                self._metrics.prompt_tokens.labels(self._model).inc(event.prompt_tokens)
            case Embedded():
                self._metrics.embedded.labels(self._model).inc()
            case EmbeddingFinished():
                self._metrics.answers.labels(self._model, self.endpoint, FINISHED).inc()
                self._metrics.replays.labels(self._model).inc(event.replays)
