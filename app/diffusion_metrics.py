"""Prometheus metrics of pictures, videos and sounds: steps, the time they take, and what patches and prefetch did.

Labels are the model and the number of a stage; a hostile chain cannot make more than a few. Knows no HTTP.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from app.engine.diffusion.request import DiffusionTimings, Made, PatchVerdict, Started, StepDone
from app.request_meter import RequestMeter

STEP_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 40, 80, 160, 320, 640)
SHARE_BUCKETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1)
MAX_STAGES = 16  # of their own label; the rest share the last one
FINISHED = "stop"  # the reason under which whole answers are counted, as those of text


class DiffusionMetrics:
    """All of them, in the registry of the gateway."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.steps = Counter("diffuse_denoising_steps", "Denoising steps done", ["model"], registry=registry)
        self.step_seconds = Histogram(
            "diffuse_step_seconds", "One denoising step", ["model"], buckets=STEP_BUCKETS, registry=registry
        )
        self.busy = Histogram(
            "diffuse_stage_busy_share",
            "Share of a step that a stage of the route computed",
            ["model", "stage"],
            buckets=SHARE_BUCKETS,
            registry=registry,
        )
        self.verdicts = Counter(
            "diffuse_patch_verdicts",
            "Checks of whether steps may run as patches",
            ["model", "verdict"],
            registry=registry,
        )
        self.passes = Counter(
            "diffuse_passes", "Passes through a stack of blocks", ["model", "form"], registry=registry
        )
        self.prefetched = Counter(
            "diffuse_prefetched_passes",
            "Passes of the other guidance branch begun before they were asked for",
            ["model", "outcome"],
            registry=registry,
        )
        self.bytes = Counter(
            "diffuse_pass_bytes", "What passes sent and received", ["model", "direction"], registry=registry
        )

    def count_step(self, model: str, step: StepDone) -> None:
        """Note one step the moment it is done."""
        self.steps.labels(model).inc()
        self.step_seconds.labels(model).observe(step.seconds)
        for stage, share in enumerate(step.busy):
            self.busy.labels(model, str(min(stage, MAX_STAGES - 1))).observe(share)

    def count_verdict(self, model: str, verdict: PatchVerdict) -> None:
        self.verdicts.labels(model, "allowed" if verdict.allowed else "refused").inc()

    def count_passes(self, model: str, timings: DiffusionTimings) -> None:
        """Note what one answer took in all."""
        self.passes.labels(model, "whole").inc(timings.passes - timings.patched)
        self.passes.labels(model, "patched").inc(timings.patched)
        self.prefetched.labels(model, "used").inc(timings.hits)
        self.prefetched.labels(model, "discarded").inc(timings.prefetched - timings.hits)
        self.bytes.labels(model, "sent").inc(timings.bytes_sent)
        self.bytes.labels(model, "received").inc(timings.bytes_received)


class DiffusionMeter(RequestMeter):
    """Times a request for pictures, videos or sounds."""

    def count(self, event: object) -> None:
        """Note what an event says."""
        match event:
            case StepDone():
                self._metrics.diffusion.count_step(self._model, event)
            case PatchVerdict():
                self._metrics.diffusion.count_verdict(self._model, event)
            case Made():
                self._metrics.answers.labels(self._model, self.endpoint, FINISHED).inc()
                self._metrics.replays.labels(self._model).inc(event.replays)
                self._metrics.diffusion.count_passes(self._model, event.timings)


class SongMeter(DiffusionMeter):
    """Times a song that is made of tokens: counted as those of text are, a frame for a token."""

    def count(self, event: object) -> None:
        metrics = self._metrics
        match event:
            case Started():
                metrics.prompt_tokens.labels(self._model).inc(event.text_tokens)
            case StepDone():
                metrics.generated_tokens.labels(self._model).inc()
                metrics.inter_token.labels(self._model).observe(event.seconds)
            case Made():
                metrics.answers.labels(self._model, self.endpoint, FINISHED).inc()
                metrics.replays.labels(self._model).inc(event.replays)
