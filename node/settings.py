"""What a node is told before it starts: its model slice, its addresses and its limits.

Parsed and checked here once; everything behind trusts it. Knows nothing of flags or the environment (see `cli`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from routing.address_policy import Scope
from routing.addresses import parse_address
from routing.admission import is_this_machine
from routing.announcement import Owner
from routing.errors import SettingsError
from routing.tls import Tls
from routing.types import Capabilities, NodeAddress, NodeId, SliceSpec

DEVICE = re.compile(r"cpu|cuda(:\d{1,2})?")
LAYERS = re.compile(r"\d+:\d+")
WILDCARDS = frozenset({"0.0.0.0", "::"})  # noqa: S104 - to refuse them as addresses to tell others
MAX_ROWS = 4096  # rows of one step: 64 MiB of float32 at a hidden size of 4096, the largest message (transport.md 5.6)
MAX_SESSIONS = (
    256  # beyond it a step waits for whole seconds on any CPU; the planner should have gone elsewhere
)
MAX_SESSIONS_PER_PEER = 128  # half of the places: one neighbour alone cannot fill the node
MAX_IDLE_TIMEOUT_S = 600  # a gateway may ask for less; memory is not held longer for a silent one
DEFAULT_OVERHEAD = 0.6  # of the memory that is free: the rest is the machine owner's
DEFAULT_DRAIN_S = 30.0  # a short answer ends well within it; a longer one is continued elsewhere


class HostPort(BaseModel):
    """An address to bind or to tell; port 0 binds a free port."""

    model_config = ConfigDict(frozen=True)

    host: str
    port: Annotated[int, Field(ge=0, le=65535)]

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_host_port(text: object) -> object:
    """Turn "HOST:PORT" or "[V6]:PORT" into the fields of `HostPort`; anything else is left for pydantic to judge."""
    if not isinstance(text, str):
        return text
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or (":" in host and not host.startswith("[")):
        raise ValueError(f"{text!r} is not HOST:PORT")
    return HostPort(host=host.strip("[]") or "0.0.0.0", port=int(port))  # noqa: S104 - ":8001" asks for it


def check_metrics(place: HostPort | None, *, is_open: bool) -> None:
    """Raise ValueError for metrics that others could read without anybody having said so: they tell who works when."""
    if place is None or is_open or place.host == "localhost" or is_this_machine(place.host):
        return
    raise ValueError(
        f"metrics at {place} could be read by whoever reaches that address: bind them to 127.0.0.1, "
        "or say --metrics-open where only your scraper gets there"
    )


def check_device_name(device: str) -> str:
    """A device's name. Raises ValueError for one that no layers are computed on."""
    if not DEVICE.fullmatch(device):
        raise ValueError("it is cpu, cuda, or cuda:N for one of several GPUs")
    return device


def parse_layers(text: object) -> object:
    """Turn "A:B" into a half-open `SliceSpec`."""
    if not isinstance(text, str):
        return text
    start, colon, end = text.partition(":")
    if not colon or not start.isdecimal() or not end.isdecimal() or int(start) >= int(end):
        raise ValueError(f"{text!r} is not A:B with A below B (layers A up to, not including, B)")
    return SliceSpec(int(start), int(end))


def parse_bootstraps(value: object) -> object:
    """Turn "id@host:port" texts among the bootstraps into addresses."""
    if not isinstance(value, list | tuple):
        return value
    try:
        return tuple(parse_address(item) if isinstance(item, str) else item for item in value)
    except SettingsError as error:
        raise ValueError(str(error)) from error


def parse_scope(value: object) -> object:
    """Turn "auto" into None: the scope is found from the addresses."""
    return None if value == "auto" else value


class ModelSlice(BaseModel):
    """A model to serve, and which of its layers; None leaves them to placement."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    model: Annotated[str, Field(min_length=1)]
    layers: Annotated[SliceSpec | None, BeforeValidator(parse_layers)] = None


def parse_models(value: object) -> object:
    """Turn "MODEL", "MODEL=A:B" and (model, layers) among the models into fields of `ModelSlice`."""
    return tuple(map(_parse_model, value)) if isinstance(value, list | tuple) else value


def _parse_model(item: object) -> object:
    if isinstance(item, tuple) and len(item) == 2:
        return {"model": item[0], "layers": item[1]}
    if not isinstance(item, str):
        return item
    model, equals, layers = item.rpartition("=")
    return {"model": model, "layers": layers} if equals and LAYERS.fullmatch(layers) else {"model": item}


class NodeSettings(BaseModel):
    """Everything `run_node` needs. `listen` is what is bound, `public_addr` what is told to others."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True, hide_input_in_errors=True)

    model: str = ""  # the first model, with `layers`; more of them in `models`
    layers: Annotated[SliceSpec | None, BeforeValidator(parse_layers)] = None  # None: see `is_placed`
    models: Annotated[tuple[ModelSlice, ...], BeforeValidator(parse_models)] = ()
    overhead: Annotated[float, Field(gt=0, le=1)] = DEFAULT_OVERHEAD  # fraction of free memory to use
    memory_bytes: Annotated[int | None, Field(gt=0)] = (
        None  # for weights and sessions; None: `overhead` decides
    )
    hold_ends: bool = False  # the thin mode: embed on the first slice, norm and head on the last
    listen: Annotated[HostPort, BeforeValidator(parse_host_port)] = HostPort(host="127.0.0.1", port=0)
    public_addr: Annotated[HostPort | None, BeforeValidator(parse_host_port)] = None  # None: what was bound

    key_path: Path | None = None  # None: an identity for this process only
    network_id: Annotated[bytes, Field(min_length=32, max_length=32)]
    psk: Annotated[bytes | None, Field(min_length=32, max_length=32, repr=False)] = None
    accepted_psks: Annotated[
        tuple[bytes, ...], Field(repr=False)
    ] = ()  # others that are taken while one changes
    tls: Annotated[Tls | None, Field(repr=False)] = None  # around links; None: plain websockets
    pad: bool = False
    token: Annotated[bytes, Field(repr=False)] = b""  # a guest's permission, told in our handshakes
    moved: bytes = b""  # which identity we were before, see `routing.identity`
    allow: Annotated[Callable[[NodeId, Capabilities], bool] | None, Field(repr=False)] = None  # None: anyone

    bootstraps: Annotated[tuple[NodeAddress, ...], BeforeValidator(parse_bootstraps)] = ()
    scope: Annotated[Scope | None, BeforeValidator(parse_scope)] = None  # None: from the addresses
    owner: Owner | None = None  # a signed label
    is_sentinel: bool = False
    state_dir: Path | None = None  # None: known peers and sequence are not kept over a restart
    drain_s: Annotated[float, Field(ge=0)] = DEFAULT_DRAIN_S

    metrics: Annotated[HostPort | None, BeforeValidator(parse_host_port)] = None  # None: not served
    metrics_open: bool = False  # on an address that others can reach
    traces: str | None = None  # URL of an OTLP collector; None: OTEL_EXPORTER_OTLP_ENDPOINT, or nowhere

    device: Annotated[str, AfterValidator(check_device_name)] = "cpu"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    weights: Literal["auto", "bf16", "fp32", "int8"] = (
        "auto"  # auto: the checkpoint's own bits, nothing is lost
    )
    runner: Literal["auto", "fast", "invariant", "plain"] = (
        "auto"  # auto: the fastest that is exact in company
    )
    threads: Annotated[int | None, Field(ge=1)] = None  # None: measured
    cache_dir: Path | None = None  # None: see slicing.cache

    kv_budget_bytes: Annotated[int | None, Field(ge=0)] = None  # None: a share of the memory that is free
    max_sessions: Annotated[int, Field(ge=1)] = MAX_SESSIONS
    max_sessions_per_peer: Annotated[int, Field(ge=1)] = MAX_SESSIONS_PER_PEER
    max_rows: Annotated[int, Field(ge=1, le=65535)] = MAX_ROWS
    max_idle_timeout_s: Annotated[int, Field(ge=1)] = MAX_IDLE_TIMEOUT_S

    @property
    def wanted(self) -> tuple[ModelSlice, ...]:
        """Every model and range asked for."""
        first = (ModelSlice(model=self.model, layers=self.layers),) if self.model else ()
        return (*first, *self.models)

    @property
    def is_placed(self) -> bool:
        """Whether layers that are not named follow the network's needs; all of a model where there is none."""
        return bool(self.bootstraps) or self.is_sentinel

    @model_validator(mode="after")
    def _has_a_model(self) -> Self:
        if not self.wanted:
            raise ValueError("a node serves at least one model: name it with --model")
        if self.layers is not None and not self.model:
            raise ValueError("--layers needs --model")
        return self

    @model_validator(mode="after")
    def _metrics_are_closed(self) -> Self:
        check_metrics(self.metrics, is_open=self.metrics_open)
        return self

    @model_validator(mode="after")
    def _can_be_dialled(self) -> Self:
        is_found_out = bool(self.bootstraps)  # others tell the address that they see, see `routing.reach`
        if self.public_addr is None and self.listen.host in WILDCARDS and not is_found_out:
            raise ValueError(
                f"{self.listen} is bound on every interface, which is no address to tell others: "
                "name the one they should dial with --public-addr HOST:PORT"
            )
        if self.public_addr is not None and self.public_addr.host in WILDCARDS:
            raise ValueError(f"--public-addr {self.public_addr} is no address that others can dial")
        return self
