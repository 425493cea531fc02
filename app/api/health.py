"""`/health`, `/ready`, `/version` and `/metrics`: for probes, scrapers and people with curl."""

from __future__ import annotations

from importlib.metadata import version
from typing import Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.messages import Lenient
from app.engine.request import ModelState, ModelStatus
from app.gateway import Gateway
from app.keys import ANYONE


class HealthReport(Lenient):
    """Whether the process takes requests."""

    status: Literal["ok", "shutting_down"]


class ModelReadiness(Lenient):
    """Whether a whole route exists; ranges of layers are half-open."""

    status: ModelState
    layers: int
    missing_layers: list[tuple[int, int]]
    reason: str | None = None


class ReadyReport(Lenient):
    """Whether every model can answer now."""

    status: Literal["ready", "loading", "not_ready"]
    models: dict[str, ModelReadiness]


class VersionReport(Lenient):
    """This software."""

    name: str = "diffuse"
    version: str


class Health:
    """The endpoints, over one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def health(self, request: Request) -> Response:
        """Say whether this process takes requests: 200, or 503 once it is shutting down."""
        is_draining = self._gateway.is_draining
        report = HealthReport(status="shutting_down" if is_draining else "ok")
        return JSONResponse(report.model_dump(), status_code=503 if is_draining else 200)

    async def ready(self, request: Request) -> Response:
        """Say whether every listed model (or `?model=`) can answer: 200, or 503 with what is missing.

        A model whose ends the first request will load counts as one that can.
        """
        asked = request.query_params.get("model")
        listed = {known.name: known for known in self._gateway.listed(ANYONE)}
        known = {asked: self._gateway.model(asked, ANYONE)} if asked else listed
        statuses = {name: model.status for name, model in known.items()}
        is_whole = bool(statuses) and all(status.can_answer for status in statuses.values())
        is_ready = is_whole and not (self._gateway.is_draining or self._gateway.is_loading)
        report = ReadyReport(
            status="ready" if is_ready else "loading" if self._gateway.is_loading else "not_ready",
            models={name: _describe(status) for name, status in statuses.items()},
        )
        return JSONResponse(report.model_dump(), status_code=200 if is_ready else 503)

    async def version(self, request: Request) -> Response:
        """Name this software and its version."""
        return JSONResponse(VersionReport(version=version("diffuse")).model_dump())

    async def metrics(self, request: Request) -> Response:
        """Prometheus metrics."""
        metrics = self._gateway.metrics
        return Response(metrics.render(), headers={"content-type": metrics.content_type})


def _describe(status: ModelStatus) -> ModelReadiness:
    return ModelReadiness(
        status=status.state,
        layers=status.num_layers,
        missing_layers=list(status.missing),
        reason=status.reason or None,
    )
