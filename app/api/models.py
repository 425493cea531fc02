"""`GET /v1/models` and `GET /v1/models/{id}`: what is served, and whether a whole route exists now."""

from __future__ import annotations

from typing import Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.errors import ApiError, not_ready
from app.api.messages import Lenient
from app.api.scope import key_of
from app.engine.request import KnownModel, Modality, ModelState
from app.gateway import Gateway

PATH = "/v1/models"
ONE_PATH = "/v1/models/{model:path}"  # ids hold slashes, which clients send as %2F


class Architecture(Lenient):
    """What goes in and what comes out."""

    input_modalities: tuple[Modality, ...] = ("text",)
    output_modalities: tuple[Modality, ...] = ("text",)


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
    reason: str | None = None


class UnservedModel(Lenient):
    """A name that nodes announce and that is not served here."""

    id: str
    reason: str


class ModelList(Lenient):
    """Every model that this gateway serves, and what else nodes announce."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    unserved: list[UnservedModel]


class Models:
    """The endpoints, over one gateway. List and retrieve say the same of a model."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def index(self, request: Request) -> Response:
        """List the models that this key may use; `status` says which can answer now.

        One that was found is listed while it has a route.
        """
        key = key_of(request.scope)
        data = [describe_model(known.name, known) for known in self._gateway.listed(key)]
        unserved = [
            UnservedModel(id=name, reason=reason)
            for name, reason in self._gateway.library.unserved().items()
            if key.may_use(name)
        ]
        return JSONResponse(ModelList(data=data, unserved=unserved).model_dump())

    async def retrieve(self, request: Request) -> Response:
        """Describe one model, under the id or alias that was asked for."""
        name = request.path_params["model"]
        known = self._gateway.model(name, key_of(request.scope))
        if not known.is_listed:
            why = not_ready(known.name, known.status)
            raise ApiError(
                404, "model_not_found", f"{why.message}; it is not listed until then", param="model"
            )
        return JSONResponse(describe_model(name, known).model_dump())


def describe_model(name: str, known: KnownModel) -> ModelCard:
    """Describe a model under `name`, as it is at this moment."""
    status = known.status
    return ModelCard(
        id=name,
        created=known.created,
        max_model_len=known.max_positions,
        architecture=Architecture(input_modalities=known.takes, output_modalities=(known.makes,)),
        status=status.state,
        layers=status.num_layers,
        layers_covered=status.layers_covered,
        missing_layers=list(status.missing),
        reason=status.reason or None,
    )
