"""Counts of recordings that are written down: tokens as those of text, windows, and seconds of sound."""

from __future__ import annotations

from app.diffusion_metrics import FINISHED, DiffusionMeter
from app.engine.speech import Transcribed, WindowDone


class SpeechMeter(DiffusionMeter):
    """Times one recording."""

    def count(self, event: object) -> None:
        metrics = self._metrics
        match event:
            case WindowDone():
                metrics.generated_tokens.labels(self._model).inc(event.num_tokens)
            case Transcribed():
                metrics.answers.labels(self._model, self.endpoint, FINISHED).inc()
                metrics.replays.labels(self._model).inc(event.replays)
