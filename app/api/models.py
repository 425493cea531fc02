"""`GET /v1/models` and `GET /v1/models/{id}`: what is served, and whether a whole route exists now."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.engine.request import TextEngine
from app.gateway import Gateway

PATH = "/v1/models"
ONE_PATH = "/v1/models/{model:path}"  # ids hold slashes, which clients send as %2F


class Models:
    """The endpoints, over one gateway. List and retrieve say the same of a model."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def index(self, request: Request) -> Response:
        """List the models; `status` says which can answer now."""
        data = [describe_model(name, engine) for name, engine in self._gateway.engines.items()]
        return JSONResponse({"object": "list", "data": data})

    async def retrieve(self, request: Request) -> Response:
        """Describe one model, under the id or alias that was asked for."""
        name = request.path_params["model"]
        return JSONResponse(describe_model(name, self._gateway.engine(name)))


def describe_model(name: str, engine: TextEngine) -> dict[str, Any]:
    """Return OpenAI's four fields and what operators ask for; ranges of layers are half-open."""
    status = engine.coverage()
    return {
        "id": name,
        "object": "model",
        "created": engine.tokenizer.created,
        "owned_by": "diffuse",
        "max_model_len": engine.max_positions,
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "status": status.state,
        "layers": status.num_layers,
        "layers_covered": status.layers_covered,
        "missing_layers": [list(span) for span in status.missing],
    }
