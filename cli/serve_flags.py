"""The flags that only a gateway has, one for each field of `GatewaySettings` that a person may set.

A flag is called as its field, without the unit that a field's name ends in: `--queue-timeout` sets `queue_timeout_s`.
What a value may be is checked there; here stands how it is written and explained.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from cli import choices, panels, units

_models = partial(typer.Option, rich_help_panel=panels.MODELS)
_network = partial(typer.Option, rich_help_panel=panels.NETWORK)
_keys = partial(typer.Option, rich_help_panel=panels.KEYS)
_limits = partial(typer.Option, rich_help_panel=panels.LIMITS, metavar="N")
_limit_size = partial(typer.Option, rich_help_panel=panels.LIMITS, metavar="SIZE", parser=units.size)
_deadlines = partial(typer.Option, rich_help_panel=panels.DEADLINES, metavar="TIME", parser=units.duration)
_media = partial(typer.Option, rich_help_panel=panels.MEDIA)
_media_count = partial(typer.Option, rich_help_panel=panels.MEDIA, metavar="N")
_media_size = partial(typer.Option, rich_help_panel=panels.MEDIA, metavar="SIZE", parser=units.size)
_media_time = partial(typer.Option, rich_help_panel=panels.MEDIA, metavar="TIME", parser=units.duration)
_storage = partial(typer.Option, rich_help_panel=panels.STORAGE)
_logs = partial(typer.Option, rich_help_panel=panels.LOGS)

# Models

Models = Annotated[
    list[str] | None,
    _models(
        "--model",
        metavar="MODEL",
        help="Hub id, folder, .gguf file, or `smollm2`. Repeatable. Left out with --bootstrap: whatever the swarm "
        "serves and this machine has.",
    ),
]
Name = Annotated[str | None, _models("--name", metavar="NAME", help="What clients call the one --model.")]
ModelAliases = Annotated[
    list[str] | None,
    _models(
        "--model-aliases",
        metavar="ALIAS=MODEL",
        help="Another name for a model. Repeatable, or separated by commas.",
    ),
]
OpenAny = Annotated[
    bool, _models("--open-any", help="Also fetch from the hub, for their ends, models that nodes announce.")
]
LoadWait = Annotated[
    Any,
    _deadlines("--load-wait", help="How long a request waits for a model that is being loaded."),
]

Dtype = Annotated[choices.Dtype, _models("--dtype", help="Compute type of the ends.")]
Threads = Annotated[int, _models("--threads", metavar="N", min=1, help="Threads for the ends.")]

# Network: where it listens, and where routes may go

Listen = Annotated[str, _network("--listen", metavar="HOST:PORT", help="What to bind.")]
PublicAddr = Annotated[
    str | None,
    _network("--public-addr", metavar="HOST:PORT", help="What clients are told, where it differs."),
]

Pin = Annotated[
    list[str] | None,
    _network("--pin", metavar="ID", help="A node that every route uses, unless a request says others."),
]
Avoid = Annotated[list[str] | None, _network("--avoid", metavar="ID", help="A node that no route ever uses.")]
MaxHops = Annotated[
    int | None,
    _network("--max-hops", metavar="N", help="Nodes on a route at most, unless a request says otherwise."),
]
DistinctOwners = Annotated[
    bool,
    _network(
        "--distinct-owners",
        help="First and last node of different owners, unless a request says otherwise.",
    ),
]

# Keys

ApiKeys = Annotated[
    list[str] | None,
    _keys(
        "--api-keys",
        metavar="KEY",
        help="A key that clients must show. Repeatable, or separated by commas. A variable or --keys-file keeps it out "
        "of the list of processes.",
    ),
]
KeysFile = Annotated[
    Path | None,
    _keys(
        "--keys-file",
        metavar="FILE",
        help="Hashed keys, with models and limits of their own, as `diffuse keys api` writes them.",
    ),
]
AllowOpen = Annotated[bool, _keys("--allow-open", help="Let others on the network in without a key.")]
AllowedHosts = Annotated[
    list[str] | None,
    _keys(
        "--allowed-hosts",
        metavar="HOST",
        help="Another Host name that clients may use; * allows any. Repeatable, or separated by commas.",
    ),
]
CorsOrigins = Annotated[
    list[str] | None,
    _keys(
        "--cors-origins",
        metavar="ORIGIN",
        help="A web origin whose pages may call; * allows any. Repeatable, or separated by commas.",
    ),
]

# Limits

MaxRequests = Annotated[int, _limits("--max-requests", help="Answers at once; others wait in the queue.")]
MaxQueued = Annotated[
    int, _limits("--max-queued", help="Requests that wait for a place; beyond it they get a 503 at once.")
]
MaxRequestsPerKey = Annotated[
    int | None,
    _limits(
        "--max-requests-per-key",
        help="Answers at once of each key that does not say otherwise in --keys-file. Left out: no limit.",
    ),
]
RequestsPerMinute = Annotated[
    int | None,
    _limits("--requests-per-minute", help="Requests of each such key in a minute. Left out: no limit."),
]
MaxChoices = Annotated[int, _limits("--max-choices", help="Answers that one request may ask for (n).")]
MaxBodyBytes = Annotated[Any, _limit_size("--max-body-bytes", help="Of a JSON request.")]

# Deadlines

QueueTimeout = Annotated[
    Any, _deadlines("--queue-timeout", help="How long a request waits for a place; 0: not at all.")
]
FirstTokenTimeout = Annotated[
    Any, _deadlines("--first-token-timeout", help="From its place to an answer's first token; 0: no limit.")
]
StallTimeout = Annotated[
    Any, _deadlines("--stall-timeout", help="Between two signs of life of an answer; 0: no limit.")
]
RequestTimeout = Annotated[Any, _deadlines("--request-timeout", help="A whole answer; 0: no limit.")]
BodyTimeout = Annotated[Any, _deadlines("--body-timeout", help="Until a request's body is here.")]
Keepalive = Annotated[
    Any, _deadlines("--keepalive", help="How often a silent stream gets a comment line; 0: never.")
]
Heartbeat = Annotated[Any, _deadlines("--heartbeat", help="How often a silent stream gets an empty chunk.")]
Drain = Annotated[Any, _deadlines("--drain", help="How long running answers may take when stopping.")]

# Media

MaxUploadBytes = Annotated[Any, _media_size("--max-upload-bytes", help="Of a form with a recording.")]
MaxRecording = Annotated[Any, _media_time("--max-recording", help="Of a recording to write down.")]
MediaBytes = Annotated[
    Any, _media_size("--media-bytes", help="Memory for all recordings that are held at once.")
]
MaxPixels = Annotated[int, _media_count("--max-pixels", help="Of a picture, or a frame of a video.")]
MaxMedia = Annotated[int, _media_count("--max-media", help="Pictures and recordings of one chat.")]
MaxMediaPixels = Annotated[int, _media_count("--max-media-pixels", help="Of all pictures of one chat.")]
MaxHeard = Annotated[Any, _media_time("--max-heard", help="Of all recordings of one chat.")]
AllowRemoteMedia = Annotated[
    list[str] | None,
    _media(
        "--allow-remote-media",
        metavar="HOST|any",
        help="Fetch pictures and recordings of chat messages from this host. Repeatable, or separated by commas. "
        "Left out: from none.",
    ),
]
PicturesBytes = Annotated[
    Any, _media_size("--pictures-bytes", help="Memory for pictures that wait under a URL.")
]
PicturesLifetime = Annotated[Any, _media_time("--pictures-lifetime", help="How long they wait.")]
VideosBytes = Annotated[Any, _media_size("--videos-bytes", help="Disk for videos.")]
VideosLifetime = Annotated[
    Any, _media_time("--videos-lifetime", help="How long a video job is kept after its end.")
]
VideosAtOnce = Annotated[
    int, _media_count("--videos-at-once", help="Video jobs that run together; the others wait.")
]
VideosWaiting = Annotated[
    int, _media_count("--videos-waiting", help="Video jobs that are not over; beyond it they get a 503.")
]

# Storage

State = Annotated[
    str | None,
    _storage(
        "--state",
        metavar="URL",
        help="Where limits, jobs and records of requests are kept: sqlite:///FILE, redis://HOST for several gateways, "
        "or memory: for until the end. Left out: a SQLite file in --state-dir for each port.",
    ),
]
VideosDir = Annotated[
    Path | None,
    _storage(
        "--videos-dir",
        metavar="FOLDER",
        help="Where files of video jobs are kept, unless in Redis. Left out: a folder in --state-dir for each port.",
    ),
]
PrefixSecret = Annotated[
    Path | None,
    _storage(
        "--prefix-secret",
        metavar="FILE",
        help="A secret that gateways share, so that they find what nodes kept of each other's chats. "
        "Left out: each keeps its own.",
    ),
]

# Logs and metrics

VllmMetrics = Annotated[
    bool,
    _logs("--vllm-metrics", help="Metrics also under the names that boards and autoscalers for vLLM read."),
]
