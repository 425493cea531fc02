"""Puts the gateway together: settings, engines and metrics in, an ASGI application out."""

from __future__ import annotations

import secrets
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request

from app.api import (
    chat,
    compat,
    completions,
    embeddings,
    images,
    models,
    picture_links,
    requests,
    responses,
    route,
    speech,
    tokenizing,
    transcriptions,
    videos,
)
from app.api import page as page_files
from app.api.allowed_methods import AllowedMethods
from app.api.chat import ChatCompletions
from app.api.compat import Compat
from app.api.completions import Completions
from app.api.connection import MAX_HEAD_BYTES, Connection
from app.api.embeddings import Embeddings
from app.api.health import Health
from app.api.images import Images
from app.api.middleware import ApiKeys, ErrorBoundary, HostCheck, PathAliases, RequestIds
from app.api.models import Models
from app.api.named_route import NamedRoute
from app.api.page import Page
from app.api.picture_links import PictureLinks
from app.api.rate_limit import RateLimit
from app.api.requests import Requests
from app.api.responses import Responses
from app.api.route import RoutePlans
from app.api.secured_connection import secured_connection
from app.api.speech import Speech
from app.api.tokenizing import Tokenizing
from app.api.transcriptions import Transcriptions
from app.api.unread_body import UnreadBody
from app.api.videos import Videos
from app.engine.request import Library
from app.gateway import Gateway
from app.jobs.folder import JobFolder
from app.jobs.runner import JobRunner
from app.jobs.store import JobStore
from app.metrics import GatewayMetrics
from app.openapi import describe
from app.settings import GatewaySettings
from app.state.state import State
from routing.tls import Tls

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

# Longer than clients and proxies keep an idle connection: whoever closes first must not be the one who is written to.
KEEP_ALIVE_S = 75
EXPOSED_HEADERS = (
    "x-request-id",
    "retry-after",
    "server-timing",
    "openai-processing-ms",
    "x-ignored-params",
    "openai-poll-after-ms",
    "content-range",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-should-retry",
)
# FastAPI would hand exceptions, whose texts may quote prompts, to whatever OpenTelemetry the process has.
NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}


def create_app(
    settings: GatewaySettings,
    library: Library,
    metrics: GatewayMetrics,
    state: State | None = None,
    *,
    tracer: Tracer | None = None,
) -> FastAPI:
    """Build the application over the models of a library; without a `state` it goes with the process.

    With a `tracer` requests are traced.

    `app.state.gateway` drains it; `app.state.jobs` is closed at the end, after that.
    """
    gateway = Gateway(settings, library, metrics, state)
    metrics.watch_models(library)
    if settings.vllm_metrics:
        metrics.speak_vllm(library)
    metrics.watch_coverage(library)
    metrics.watch_ends(library)
    metrics.watch_prefixes(library)
    app = FastAPI(
        title="Diffuse",
        version=version("diffuse"),
        redirect_slashes=False,
        separate_input_output_schemas=False,
        telemetry=NO_TELEMETRY,
    )
    app.router.route_class = NamedRoute
    app.state.gateway = gateway
    app.state.jobs = JobRunner(gateway, _job_store(gateway), videos.PATH)
    _add_routes(app, gateway)
    _add_media_routes(app, gateway, app.state.jobs)
    describe(app)
    _add_middleware(app, gateway)
    if tracer is not None:
        from app.tracing import Traced

        app.user_middleware.append(Middleware(Traced, tracer=tracer))  # within the keys: others make no spans
    for foreign in (HTTPException, RequestValidationError):
        app.add_exception_handler(foreign, _pass_on)
    return app


def serve_config(app: FastAPI, settings: GatewaySettings, tls: Tls | None = None) -> uvicorn.Config:
    """Return how uvicorn runs the application: no access log (paths and ids are in ours), no version header."""
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        http=Connection if tls is None else secured_connection(tls),
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(settings.drain_s) + 1,
    )


def _add_routes(app: FastAPI, gateway: Gateway) -> None:
    chats, listing, health, page = ChatCompletions(gateway), Models(gateway), Health(gateway), Page()
    app.add_api_route(chat.PATH, chats.create, methods=["POST"], response_model=None)
    answers = Responses(gateway, chats)
    app.add_api_route(responses.PATH, answers.create, methods=["POST"], response_model=None)
    app.add_api_route(completions.PATH, Completions(gateway).create, methods=["POST"], response_model=None)
    tokens = Tokenizing(gateway)
    for path, endpoint in {
        tokenizing.TOKENIZE_PATH: tokens.tokenize,
        tokenizing.DETOKENIZE_PATH: tokens.detokenize,
        tokenizing.INPUT_TOKENS_PATH: tokens.input_tokens,
    }.items():
        app.add_api_route(path, endpoint, methods=["POST"], response_model=None)
    app.add_api_route(embeddings.PATH, Embeddings(gateway).create, methods=["POST"], response_model=None)
    pages = {
        models.PATH: listing.index,
        models.ONE_PATH: listing.retrieve,
        compat.PATH: Compat(gateway).retrieve,
        route.PATH: RoutePlans(gateway).retrieve,
        requests.PATH: Requests(gateway).retrieve,
        "/health": health.health,
        "/ready": health.ready,
        "/version": health.version,
        "/metrics": health.metrics,
    }
    for path, endpoint in pages.items():
        app.add_api_route(path, endpoint, methods=["GET"], response_model=None)
        app.add_api_route(path, endpoint, methods=["HEAD"], response_model=None, include_in_schema=False)
    for path, endpoint in {page_files.ROOT: page.index, page_files.FILE_PATH: page.file}.items():
        app.add_api_route(
            path, endpoint, methods=["GET", "HEAD"], response_model=None, include_in_schema=False
        )


def _add_media_routes(app: FastAPI, gateway: Gateway, jobs: JobRunner) -> None:
    """Pictures, videos and sounds. A path that several routes fit goes to the first of them."""
    settings = gateway.settings
    links = PictureLinks(gateway.state, settings.pictures_bytes, settings.pictures_lifetime_s)
    pictures, films, sounds = Images(gateway, links), Videos(gateway, jobs), Speech(gateway)
    for path in images.NOT_BUILT:
        app.add_api_route(
            path, pictures.not_built, methods=["POST"], response_model=None, include_in_schema=False
        )
    for path in videos.NOT_BUILT:
        app.add_api_route(
            path, films.not_built, methods=["POST"], response_model=None, include_in_schema=False
        )
    for path in (images.PATH, images.ALIAS):
        is_alias = path == images.ALIAS
        app.add_api_route(
            path, pictures.create, methods=["POST"], response_model=None, include_in_schema=not is_alias
        )
    app.add_api_route(speech.PATH, sounds.create, methods=["POST"], response_model=None)
    heard = Transcriptions(gateway)
    app.add_api_route(transcriptions.PATH, heard.create, methods=["POST"], response_model=None)
    app.add_api_route(
        transcriptions.TRANSLATIONS_PATH, heard.translate, methods=["POST"], response_model=None
    )
    app.add_api_route(videos.PATH, films.create, methods=["POST"], response_model=None)
    app.add_api_route(videos.ONE_PATH, films.delete, methods=["DELETE"], response_model=None)
    pages = {
        picture_links.PATH: links.fetch,
        videos.PATH: films.index,
        videos.ONE_PATH: films.retrieve,
        videos.CONTENT_PATH: films.content,
        videos.EVENTS_PATH: films.events,
    }
    for path, endpoint in pages.items():
        app.add_api_route(path, endpoint, methods=["GET"], response_model=None)
        if path != videos.EVENTS_PATH:
            app.add_api_route(path, endpoint, methods=["HEAD"], response_model=None, include_in_schema=False)


def _job_store(gateway: Gateway) -> JobStore:
    """Where videos are kept: in the state where it keeps files, in a folder that was named, or one of this process."""
    settings, named = gateway.settings, gateway.settings.videos_dir
    folder = named or Path(tempfile.gettempdir()) / f"diffuse-videos-{secrets.token_hex(8)}"
    return JobStore(
        gateway.state,
        JobFolder(folder, is_temporary=named is None) if gateway.state.files is None else None,
        max_bytes=settings.videos_bytes,
        lifetime_s=settings.videos_lifetime_s,
    )


def _add_middleware(app: FastAPI, gateway: Gateway) -> None:
    """Wrap the routes; the first of the list is the outermost."""
    settings = gateway.settings
    paths = {route.path for route in app.routes if hasattr(route, "path")}
    layers = [
        Middleware(RequestIds),
        *_cors(settings),
        Middleware(ErrorBoundary, gateway=gateway),
        Middleware(UnreadBody),
        Middleware(HostCheck, bound=settings.host, allowed=settings.allowed_hosts),
        Middleware(PathAliases, paths=paths),
        Middleware(ApiKeys, keys=gateway.keys, metrics_are_open=settings.is_loopback),
        Middleware(RateLimit, gateway=gateway),
        Middleware(AllowedMethods),
    ]
    app.user_middleware[:] = layers


def _cors(settings: GatewaySettings) -> list[Middleware]:
    """Pages of other origins may call only where that was asked for."""
    if not settings.cors_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    ]


async def _pass_on(request: Request, error: Exception) -> NoReturn:
    """Let the error boundary translate what Starlette and FastAPI raise themselves."""
    raise error
