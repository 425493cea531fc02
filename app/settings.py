"""What the gateway is told before it starts: where it listens, who may use it, and its limits.

A plain model: it is given values, checks them, and is trusted everywhere else. It knows neither flags nor variables
nor files, from which `cli` takes the values; a field that counts seconds is called there without its `_s`.
Which model and which nodes stand behind it is said in `app.engine.swarm.SwarmSettings`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from app.engine.drafts import DraftMode
from app.engine.route_options import ID_DIGITS, RouteOptions
from app.state.opening import check_form
from app.state.state import StateError

MAX_BODY_BYTES = 32 << 20  # of a JSON request: openai.md, section 1.1
MAX_UPLOAD_BYTES = 100 << 20  # of a form with a recording, alike
MAX_RECORDING_S = 3600.0
MEDIA_BYTES = 1 << 30
MAX_REQUESTS = 32  # answers at once; each holds a session on every node of its route
MAX_QUEUED = 64
QUEUE_TIMEOUT_S = 30.0
FIRST_TOKEN_TIMEOUT_S = 600.0  # the patience of OpenAI's clients
STALL_TIMEOUT_S = 120.0  # a lost node is replaced within seconds; replaying a long session takes longer
MAX_CHOICES = 8
MAX_PIXELS = 4096 * 4096  # of one picture
REMOTE_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?\.?")
MAX_MEDIA = 16  # pictures and recordings of one chat
MAX_MEDIA_PIXELS = 2 * MAX_PIXELS  # 100 MB, decoded
MAX_HEARD_S = 600.0  # of all recordings of one chat
PICTURES_BYTES = 256 << 20  # of pictures that are waited for under a URL, in memory
PICTURES_LIFETIME_S = 3600.0  # what OpenAI's links live
VIDEOS_BYTES = 4 << 30  # of videos on disk
VIDEOS_LIFETIME_S = 24 * 3600.0
MAX_PINNED = 8  # nodes; the planner tries their orders
MAX_AVOIDED = 256
MAX_HOPS = 128  # what one Open may hold
LOAD_WAIT_S = 10.0  # a client that waits silently for longer thinks that we are dead
KEEPALIVE_S = 10.0  # proxies and read time-outs need a sign of life this often: openai.md, section 0
HEARTBEAT_S = 30.0  # clients that ignore comments need a parsed chunk at least every 60 s


def _whole_id(text: str) -> str:
    """An id in lower case; its beginning would not do: these must hold for nodes that are away, too."""
    digits = text.strip().lower()
    if len(digits) != ID_DIGITS or any(digit not in "0123456789abcdef" for digit in digits):
        raise ValueError(f"give the node's whole id, {ID_DIGITS} hex digits: what stands before the @")
    return digits


WholeId = Annotated[str, AfterValidator(_whole_id)]


def _parts(value: str | Sequence[object]) -> Iterator[object]:
    """The items, of a text those between its commas."""
    for item in [value] if isinstance(value, str) else value:
        if isinstance(item, str):
            yield from (part for piece in item.split(",") if (part := piece.strip()))
        else:
            yield item


class GatewaySettings(BaseModel):
    """Settings of `diffuse serve` about HTTP. An item of a list may be several, separated by commas."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000  # 0 binds a free one

    api_keys: tuple[SecretStr, ...] = ()
    keys_file: Path | None = None  # hashed keys with limits of their own, see `app.keys`
    allow_open: bool = False  # serve without a key on an address that others can reach
    allowed_hosts: tuple[str, ...] = ()  # more `Host` names; "*" allows any
    cors_origins: tuple[str, ...] = ()  # browsers' pages that may call; "*" allows any
    tls_cert: Path | None = None  # HTTPS, with the chain; None: plain HTTP
    tls_key: Path | None = None
    model_aliases: dict[str, str] = {}  # other names for a model: "gpt-4o-mini=smollm2"

    # Where routes may go, for requests that do not say so themselves. `avoid` counts for every request.
    pin: Annotated[tuple[WholeId, ...], Field(max_length=MAX_PINNED)] = ()
    avoid: Annotated[tuple[WholeId, ...], Field(max_length=MAX_AVOIDED)] = ()
    max_hops: Annotated[int | None, Field(ge=1, le=MAX_HOPS)] = None
    distinct_owners: bool = False  # of the first and the last hop

    draft: DraftMode = "auto"  # of requests that do not say: guess tokens ahead, see `app.engine.drafts`

    load_wait_s: Annotated[float, Field(gt=0)] = LOAD_WAIT_S  # how long a request waits for a model's ends
    max_requests: Annotated[int, Field(ge=1)] = MAX_REQUESTS
    max_queued: Annotated[int, Field(ge=0)] = MAX_QUEUED  # that wait for a place; beyond it 503 at once
    queue_timeout_s: Annotated[float, Field(ge=0)] = QUEUE_TIMEOUT_S  # 0: nobody waits
    # Of each key that does not say otherwise in `keys_file`; None: no limit.
    max_requests_per_key: Annotated[int | None, Field(ge=1)] = None  # choices at once
    requests_per_minute: Annotated[int | None, Field(ge=1)] = None
    max_choices: Annotated[int, Field(ge=1)] = MAX_CHOICES
    max_body_bytes: Annotated[int, Field(ge=1024)] = MAX_BODY_BYTES
    max_upload_bytes: Annotated[int, Field(ge=1024)] = MAX_UPLOAD_BYTES  # of a recording
    max_recording_s: Annotated[float, Field(gt=0, le=24 * 3600)] = MAX_RECORDING_S
    media_bytes: Annotated[int, Field(ge=1 << 20)] = MEDIA_BYTES  # of all recordings that are held at once
    body_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    # Of one answer; 0 = no limit. Each ends it with a code of its own.
    first_token_timeout_s: Annotated[float, Field(ge=0)] = FIRST_TOKEN_TIMEOUT_S  # from admission
    stall_timeout_s: Annotated[float, Field(ge=0)] = STALL_TIMEOUT_S  # nothing came from the engine
    request_timeout_s: Annotated[float, Field(ge=0)] = 0.0  # the whole of it
    keepalive_s: Annotated[float, Field(ge=0)] = KEEPALIVE_S  # comment lines in a silent stream; 0 = off
    heartbeat_s: Annotated[float, Field(gt=0)] = HEARTBEAT_S  # empty chunks in a silent stream

    max_pixels: Annotated[int, Field(ge=64)] = MAX_PIXELS  # of one picture, or one frame of a video
    pictures_bytes: Annotated[int, Field(ge=0)] = PICTURES_BYTES
    pictures_lifetime_s: Annotated[float, Field(gt=0)] = PICTURES_LIFETIME_S
    # What chat messages may carry, per request; pictures are bounded by `max_pixels` too.
    max_media: Annotated[int, Field(ge=0)] = MAX_MEDIA
    max_media_pixels: Annotated[int, Field(ge=64)] = MAX_MEDIA_PIXELS
    max_heard_s: Annotated[float, Field(gt=0)] = MAX_HEARD_S
    allow_remote_media: tuple[str, ...] = ()  # hosts to fetch from; "any" allows all

    # Where limits, jobs and request records are kept: sqlite:///FILE, redis://HOST, or memory: (goes with the process).
    state: SecretStr = SecretStr("memory:")
    traces: str | None = None  # URL of an OTLP collector; None: OTEL_EXPORTER_OTLP_ENDPOINT, or nowhere
    vllm_metrics: bool = False  # also under the names that vLLM's dashboards and autoscalers read

    videos_dir: Path | None = None  # unless the state keeps files; None: one that goes with us
    videos_bytes: Annotated[int, Field(ge=1 << 16)] = VIDEOS_BYTES
    videos_lifetime_s: Annotated[float, Field(gt=0)] = VIDEOS_LIFETIME_S  # of a job that is over
    videos_at_once: Annotated[int, Field(ge=1)] = 1  # the others wait: two at once take twice as long each
    videos_waiting: Annotated[int, Field(ge=1)] = 32  # jobs that are not over; beyond it 503

    drain_s: Annotated[float, Field(ge=0)] = (
        10.0  # how long running answers may take when we are told to stop
    )

    @field_validator(
        "api_keys", "allowed_hosts", "cors_origins", "allow_remote_media", "pin", "avoid", mode="before"
    )
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(_parts(value)) if isinstance(value, str | list | tuple) else value

    @field_validator("model_aliases", mode="before")
    @classmethod
    def _pair(cls, value: object) -> object:
        if not isinstance(value, str | list | tuple):
            return value
        pairs = [part.partition("=") for part in _parts(value) if isinstance(part, str)]
        if any(not (alias.strip() and model.strip()) for alias, _, model in pairs):
            raise ValueError("write aliases as alias=model, separated by commas")
        return {alias.strip(): model.strip() for alias, _, model in pairs}

    @field_validator("api_keys")
    @classmethod
    def _no_weak_keys(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for key in keys:
            if not key.get_secret_value().isascii() or any(c.isspace() for c in key.get_secret_value()):
                raise ValueError("an API key is ASCII without spaces: it travels in a header")
        return keys

    @field_validator("allow_remote_media")
    @classmethod
    def _are_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if not REMOTE_HOST.fullmatch(host):
                raise ValueError("name hosts alone, without scheme, port or path, or say any")
        return tuple(host.lower().rstrip(".") for host in hosts)

    @field_validator("state")
    @classmethod
    def _is_state(cls, url: SecretStr) -> SecretStr:
        try:
            check_form(url.get_secret_value())
        except StateError as error:
            raise ValueError(str(error)) from None
        return url

    @model_validator(mode="after")
    def _closed_to_others(self) -> Self:
        if not (self.is_loopback or self.api_keys or self.keys_file or self.allow_open):
            raise ValueError(
                f"{self.host} can be reached by others: set API keys (--api-keys, --keys-file), "
                "or say --allow-open"
            )
        return self

    @model_validator(mode="after")
    def _routes_exist(self) -> Self:
        if both := set(self.pin) & set(self.avoid):
            raise ValueError(f"node {min(both)[:8]} is both pinned and avoided")
        if self.max_hops is not None and len(set(self.pin)) > self.max_hops:
            raise ValueError(f"{len(set(self.pin))} pinned nodes do not fit {self.max_hops} hops")
        if self.distinct_owners and self.max_hops == 1:
            raise ValueError("one hop cannot have two owners: distinct_owners needs max_hops of 2 or more")
        return self

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect to the address we bind."""
        return is_loopback_host(self.host)

    @property
    def route(self) -> RouteOptions:
        """The wishes of a request that has none; `avoid` is kept by the engines themselves."""
        return RouteOptions(tuple(self.pin), (), self.max_hops, self.distinct_owners)


def is_loopback_host(host: str) -> bool:
    """Whether a host name or address, without port, means this machine only."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    address = parse_ip(host)
    return address is not None and address.is_loopback


def parse_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that `host` spells, with or without brackets; None for a name."""
    is_bracketed = host.startswith("[") and host.endswith("]")
    try:
        return ipaddress.ip_address(host[1:-1] if is_bracketed else host)
    except ValueError:
        return None
