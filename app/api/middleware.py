"""What every request passes on its way in, as plain ASGI: id, errors, host, key, path.

Plain, because Starlette's function middleware hides the client's leaving from what it wraps.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api import page, picture_links
from app.api.errors import ApiError, is_client_gone
from app.api.scope import CALLER, EXTRA_HEADERS, REQUEST_ID, TENANT
from app.gateway import Gateway
from app.keys import ApiKey, KeyRing, digest_of
from app.request_notes import begin_notes
from app.settings import is_loopback_host, parse_ip

SAFE_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
HOST = re.compile(r"(?P<name>\[[^\s@/?#\[\]]*\]|[^\s@/?#\[\]:]+)(:\d*)?")
OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/docs", "/openapi.json"})
METRICS_PATH = "/metrics"


class RequestIds:
    """Gives every request an id, the client's own where it is harmless, and puts it on the response.

    So does it with headers that were noted on the way in, which errors must have too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        told = Headers(scope=scope).get("x-request-id", "")
        request_id = told if SAFE_ID.fullmatch(told) else f"req_{secrets.token_hex(12)}"
        scope[REQUEST_ID] = request_id
        begin_notes(request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers.update(scope.get(EXTRA_HEADERS, {}))
            await send(message)

        await self._app(scope, receive, send_with_id)


class ErrorBoundary:
    """Turns whatever is raised further in into one enveloped response; nothing gets past it."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_started = False

        async def watched_send(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            if is_client_gone(error):
                return
            failure = self._gateway.failure(scope, error)
            if is_started:  # too late for a status: an unfinished response shows that something broke
                return
            await failure.response()(scope, receive, send)


class HostCheck:
    """Refuses requests that a foreign web page sent here by rebinding its own name (DNS rebinding).

    Allowed are loopback names, the address we bind, and a configured list. Bound to every address, any
    literal address is allowed too: a rebound request always carries a name.
    """

    def __init__(self, app: ASGIApp, bound: str, allowed: Collection[str]) -> None:
        self._app = app
        self._allowed = {_bare(name) for name in (bound, *allowed)}
        self._any = "*" in self._allowed
        address = parse_ip(bound)
        self._any_address = address is not None and address.is_unspecified

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._any:
            hosts = Headers(scope=scope).getlist("host")
            is_old_probe = not hosts and scope["http_version"] == "1.0"  # no browser sends such a request
            if not is_old_probe and (len(hosts) != 1 or not self._is_allowed(_bare(hosts[0]))):
                message = "this Host is not allowed here; name it in DIFFUSE_ALLOWED_HOSTS to allow it"
                raise ApiError(403, "host_not_allowed", message)
        await self._app(scope, receive, send)

    def _is_allowed(self, host: str) -> bool:
        if host in self._allowed or is_loopback_host(host):
            return True
        return self._any_address and parse_ip(host) is not None


def _bare(host: str) -> str:
    """Return a `Host` value without port, brackets and case; "" when it is no host at all."""
    if host == "*":
        return host
    match = HOST.fullmatch(host.lower())
    name = match["name"] if match else host  # an address of version 6 may come without its brackets
    address = parse_ip(name)
    if address is not None:
        return str(address)
    return name.rstrip(".") if match else ""


class ApiKeys:
    """Asks for a key where keys are set. Health, docs, page and preflight stay open; metrics too, on loopback.

    So do pictures under a URL, which is a secret of its own: a page shows them without the key.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, *, metrics_are_open: bool) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = OPEN_PATHS | {METRICS_PATH} if metrics_are_open else OPEN_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._keys.is_required:
            scope[CALLER] = self._keys.anyone
        elif scope["type"] == "http" and not self._is_open(scope):
            key = self._key_of(scope)
            if key is None:
                message = "missing or wrong API key: send it as `Authorization: Bearer KEY`"
                raise ApiError(401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"})
            scope[CALLER], scope[TENANT] = key, key.digest
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        path = scope["path"]
        is_file = path == page.ROOT or path.startswith((picture_links.FOLDER, page.FOLDER))
        is_open_file = is_file and scope["method"] in ("GET", "HEAD")
        return scope["method"] == "OPTIONS" or is_open_file or path in self._open_paths

    def _key_of(self, scope: Scope) -> ApiKey | None:
        headers = Headers(scope=scope)
        scheme, _, told = headers.get("authorization", "").partition(" ")
        key = told.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        return self._keys.find(digest_of(key))


class PathAliases:
    """Serves each route with and without `/v1`, and with too many slashes between its steps or at its end."""

    def __init__(self, app: ASGIApp, paths: Collection[str]) -> None:
        self._app = app
        self._versioned = {path.split("/")[2] for path in paths if path.startswith("/v1/")}
        self._plain = {path.split("/")[1] for path in paths if not path.startswith("/v1/")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["path"] = self._canonical(scope["path"])
        await self._app(scope, receive, send)

    def _canonical(self, path: str) -> str:
        steps = [step for step in path.split("/") if step]
        if steps and steps[0] in self._versioned:
            steps = ["v1", *steps]
        elif len(steps) > 1 and steps[0] == "v1" and steps[1] in self._plain:
            del steps[0]
        return "/" + "/".join(steps)
