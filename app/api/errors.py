"""Every way a request can fail, as clients see it: a status and `{"error": {message, type, param, code}}`.

Foreign exceptions (ours from below, Starlette's, pydantic's) are translated here and nowhere else. Texts are
bounded and hold no traceback, no path and nothing of a prompt; what a node says about an error is not passed
on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from app.engine.merge import StoppedError
from app.engine.request import ModelStatus, ModelUnavailableError, RequestError
from app.engine.watch import LateError
from app.media.errors import MediaError
from app.state.state import StateError
from routing.errors import (
    ErrorCode,
    LinkError,
    NoRouteError,
    ProtocolError,
    RemoteError,
    SecurityError,
    TooLargeError,
)
from slicing.errors import LogitsError

MAX_MESSAGE = 500  # characters
ROUTE_RETRY_S = 5  # a restarted node takes about this long to load a slice and be seen again
BUSY_RETRY_S = 2
MAX_RETRY_S = 30  # clients do not retry at all when told to wait for minutes (openai.md, section 1.1)

NO_RETRY = {"x-should-retry": "false"}


class ClientGoneError(Exception):
    """The client left: there is nobody to answer."""


class ApiError(Exception):
    """A failure with everything that its response needs."""

    def __init__(
        self,
        status: int,
        code: str | None,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message[:MAX_MESSAGE]
        self.param = param
        self.headers = dict(headers or {})

    def envelope(self) -> dict[str, Any]:
        """Return the body; all four keys are always there."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.envelope(), status_code=self.status, headers=self.headers)


def invalid(
    param: str | None,
    message: str,
    *,
    code: str | None = "invalid_value",
    headers: Mapping[str, str] | None = None,
) -> ApiError:
    """The caller's mistake in the field `param`."""
    return ApiError(400, code, message, param=param, headers=headers)


def unsupported(param: str, message: str) -> ApiError:
    """A field that would change the answer and that is not honoured here."""
    return invalid(param, message, code="unsupported_parameter")


def unavailable(code: str, message: str, retry_s: int, *, param: str | None = None) -> ApiError:
    """Not now: try again after `retry_s` seconds."""
    headers = {"retry-after": str(min(max(retry_s, 1), MAX_RETRY_S))}
    return ApiError(503, code, message, param=param, headers=headers)


def not_ready(model: str, status: ModelStatus) -> ApiError:
    """The model cannot answer now: it is loading, cannot be opened, or layers have no node."""
    if status.state == "loading":
        return unavailable("model_loading", f"the model `{model}` is still loading", ROUTE_RETRY_S)
    if status.state == "failed":
        return unavailable("model_failed", f"the model `{model}`: {status.reason}", MAX_RETRY_S)
    message = _no_route(NoRouteError(status.missing, model, status.missing_ends))
    return unavailable("no_route", f"{message}; {status.reason}" if status.reason else message, ROUTE_RETRY_S)


def internal(request_id: str) -> ApiError:
    return ApiError(500, "internal_error", f"internal error; request {request_id}")


def deadline_exceeded() -> ApiError:
    message = "the answer took longer than this gateway allows"
    return ApiError(504, "deadline_exceeded", message, headers=NO_RETRY)


def _late(error: LateError) -> ApiError:
    """A prompt that takes so long takes as long again; an answer that stands still may go on over other nodes."""
    if error.code == "stalled":
        return ApiError(504, error.code, "nothing more of the answer came for longer than this gateway waits")
    message = "nothing of the answer came for longer than this gateway waits"
    return ApiError(504, error.code, message, headers=NO_RETRY)


def from_exception(error: Exception, request_id: str = "") -> ApiError:
    """Translate whatever was raised below the API; the unknown becomes a 500 that says nothing."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(error.status, error.code, error.message, param=error.param)
        case ModelUnavailableError():
            return unavailable(error.code, error.message, error.retry_s, param=error.param)
        case NoRouteError():
            param = "diffuse" if error.reason and not error.missing else None
            return unavailable("no_route", _no_route(error), ROUTE_RETRY_S, param=param)
        case TooLargeError():
            return invalid("size", str(error))
        case RemoteError():
            return _from_network(error)
        case HTTPException():
            return _from_http(error)
        case RequestValidationError():
            return invalid(None, "the request is not valid")
        case LateError():
            return _late(error)
        case TimeoutError():
            return deadline_exceeded()
        case LogitsError():
            return ApiError(500, "compute_failed", "the model's output holds no token to choose")
        case MediaError():
            return ApiError(500, "encode_failed", str(error), headers=NO_RETRY)
        case StoppedError():
            return unavailable("shutting_down", "the gateway is shutting down", ROUTE_RETRY_S)
        case StateError():
            message = "the store that holds jobs and records cannot be reached"
            return unavailable("state_unavailable", message, ROUTE_RETRY_S)
        case _:
            return internal(request_id)


def _no_route(error: NoRouteError) -> str:
    if error.missing_ends:
        return f"{error}; with --ends remote the first and last node are started with --hold-ends"
    return f"{error}; start one, or wait for it" if error.missing else str(error)


def is_client_gone(error: BaseException) -> bool:
    return isinstance(error, ClientGoneError | ClientDisconnect)


def _from_network(error: RemoteError) -> ApiError:
    where = "" if error.hop is None else f" at hop {error.hop}"
    match error.code:
        case ErrorCode.BUSY:
            return unavailable(
                "overloaded", f"a node is busy{where}", -(-error.retry_ms // 1000) or BUSY_RETRY_S
            )
        case ErrorCode.NO_ROOM:
            message = f"the nodes have room for {error.room} tokens of prompt and answer together{where}"
            return ApiError(400, "context_length_exceeded", message, param="messages")
        case ErrorCode.NO_SLICE:
            return unavailable("no_route", f"a node no longer serves its layers{where}", ROUTE_RETRY_S)
        case ErrorCode.DEADLINE:
            return deadline_exceeded()
        case ErrorCode.HOP_LOST | ErrorCode.NO_SESSION:
            return unavailable(
                "node_lost", f"a node was lost{where} and none could replace it", ROUTE_RETRY_S
            )
        case ErrorCode.COMPUTE:
            return ApiError(500, "compute_failed", f"a node failed to compute{where}")
    if isinstance(error, LinkError):
        return unavailable("node_lost", f"the link to a node was lost{where}", ROUTE_RETRY_S)
    if isinstance(error, SecurityError | ProtocolError):
        return ApiError(
            502, "bad_node", f"a node broke the rules{where}: {error.code.name}", headers=NO_RETRY
        )
    return ApiError(502, "bad_node", f"a node failed{where}: {error.code.name}")


def _from_http(error: HTTPException) -> ApiError:
    texts = {
        404: ("not_found", "no such route; the API lives under /v1"),
        405: ("method_not_allowed", "this route does not know that method"),
    }
    code, message = texts.get(error.status_code, (None, "the request cannot be served"))
    return ApiError(error.status_code, code, message, headers=error.headers)


def from_validation(error: ValidationError) -> ApiError:
    """Name the first field that pydantic refused, as a dotted path; values are not quoted."""
    first = error.errors(include_url=False, include_input=False)[0]
    path = [str(step) for step in first["loc"]]
    path += [first["ctx"]["field"]] if "field" in first.get("ctx", {}) else []
    param = ".".join(path) or None
    if first["type"] == "missing":
        return invalid(param, f"missing required parameter: '{param}'", code="missing_required_parameter")
    code = first["type"] if first["type"] == "unsupported_parameter" else "invalid_value"
    return invalid(param, f"invalid '{param}': {_lower_first(first['msg'])}", code=code)


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
