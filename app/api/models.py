"""`GET /v1/models` and `GET /v1/models/{id}`: what is served, and whether a whole route exists now."""

from __future__ import annotations

from typing import Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.messages import Lenient
from app.engine.request import ModelState, TextEngine
from app.gateway import Gateway

PATH = "/v1/models"
ONE_PATH = "/v1/models/{model:path}"  # ids hold slashes, which clients send as %2F


class Architecture(Lenient):
    """What goes in and what comes out."""

    input_modalities: tuple[Literal["text"], ...] = ("text",)
    output_modalities: tuple[Literal["text"], ...] = ("text",)


class ModelCard(Lenient):
    """OpenAI's four fields and what operators ask for; ranges of layers are half-open."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "diffuse"
    max_model_len: int
    architecture: Architecture = Architecture()
    status: ModelState
    layers: int
    layers_covered: int
    missing_layers: list[tuple[int, int]]


class ModelList(Lenient):
    """Every model that this gateway knows."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Models:
    """The endpoints, over one gateway. List and retrieve say the same of a model."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def index(self, request: Request) -> Response:
        """List the models; `status` says which can answer now."""
        data = [describe_model(name, engine) for name, engine in self._gateway.engines.items()]
        return JSONResponse(ModelList(data=data).model_dump())

    async def retrieve(self, request: Request) -> Response:
        """Describe one model, under the id or alias that was asked for."""
        name = request.path_params["model"]
        return JSONResponse(describe_model(name, self._gateway.engine(name)).model_dump())


def describe_model(name: str, engine: TextEngine) -> ModelCard:
    """Describe a model under `name`, as it is at this moment."""
    status = engine.coverage()
    return ModelCard(
        id=name,
        created=engine.tokenizer.created,
        max_model_len=engine.max_positions,
        status=status.state,
        layers=status.num_layers,
        layers_covered=status.layers_covered,
        missing_layers=list(status.missing),
    )
