"""Flags that several commands share, spelled and explained once, and how their values are read.

Knows the syntax of flags, not what the commands do with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from cli import panels, patch_help
from cli.choices import Draft as Draft
from cli.choices import Dtype as Dtype
from cli.choices import Ends as Ends
from cli.choices import Events as Events
from cli.choices import LogFormat as LogFormat
from cli.choices import LogLevel as LogLevel
from cli.choices import Runner as Runner
from cli.choices import Scope as Scope
from cli.choices import Weights as Weights
from cli.choices import Wire as Wire
from cli.flag_values import messages_of as messages_of
from cli.flag_values import parse_addresses as parse_addresses
from cli.flag_values import parse_duration as parse_duration
from cli.flag_values import parse_host_port as parse_host_port
from cli.flag_values import parse_local_layers as parse_local_layers
from cli.flag_values import parse_pixels as parse_pixels
from cli.flag_values import read_prompt as read_prompt
from cli.flag_values import standard_input as standard_input
from cli.flag_values import use_threads as use_threads

DEFAULT_MODEL: Final = "smollm2"
DEFAULT_NETWORK: Final = "diffuse"

ENDS_HELP: Final = (
    "Where the ends of the model run. local: embedding, first and last layers, norm and head stay on the "
    "gateway, and no node sees a token. remote: the gateway holds no weights; the first node reads the token "
    "ids of the prompt and the last node reads the answer."
)

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        rich_help_panel=panels.MODELS,
        help="Hub id, folder, .gguf file, a diffusers pipeline, or a short name that needs no hub: `smollm2`, "
        "`all-minilm-l6-v2` (embeddings), `whisper-tiny.en` (transcriptions).",
    ),
]
EndsOption = Annotated[Ends, typer.Option("--ends", rich_help_panel=panels.MODELS, help=ENDS_HELP)]
LocalLayersOption = Annotated[
    str,
    typer.Option(
        "--local-layers",
        rich_help_panel=panels.MODELS,
        metavar="K[:J]",
        help="First K and last J layers that stay on the gateway.",
    ),
]
WireOption = Annotated[
    Wire,
    typer.Option("--wire", rich_help_panel=panels.MODELS, help=patch_help.wire_help()),
]
PerBlockOption = Annotated[
    bool, typer.Option("--per-block", rich_help_panel=panels.MODELS, help=patch_help.per_block_help())
]
WeightsOption = Annotated[
    Weights,
    typer.Option(
        "--weights",
        rich_help_panel=panels.MODELS,
        help="Form of the weights. auto: the checkpoint's own, nothing is lost. int8: faster, at a small loss.",
    ),
]
RunnerOption = Annotated[
    Runner,
    typer.Option(
        "--runner",
        rich_help_panel=panels.MODELS,
        help="What runs the layers. auto: the fastest that gives each answer the bits it gets alone.",
    ),
]
DraftOption = Annotated[
    Draft | None,
    typer.Option(
        "--draft",
        rich_help_panel=panels.MODELS,
        help="Guess tokens from what stands in the prompt and the answer, several a trip; the text stays the same. "
        "auto: as far as it saves time. lookup: also before costs are measured.",
    ),
]
NodesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--node",
        rich_help_panel=panels.NETWORK,
        metavar="ID@HOST:PORT",
        help="A node, as `diffuse host` prints it. Repeat for each.",
    ),
]
NetworkOption = Annotated[
    str,
    typer.Option(
        "--network",
        metavar="NAME",
        rich_help_panel=panels.NETWORK,
        help="Name (or 64 hex digits) of the swarm; others are refused.",
    ),
]
PskFileOption = Annotated[
    Path | None,
    typer.Option(
        "--psk-file",
        metavar="FILE",
        rich_help_panel=panels.NETWORK,
        help="File with a secret that every member of a closed swarm shares.",
    ),
]
BootstrapOption = Annotated[
    list[str] | None,
    typer.Option(
        "--bootstrap",
        rich_help_panel=panels.NETWORK,
        metavar="ID@HOST:PORT",
        help="A member to join the swarm by, best a sentinel, as `diffuse sentinel` prints it. Repeatable.",
    ),
]
ScopeOption = Annotated[
    Scope,
    typer.Option(
        "--scope",
        rich_help_panel=panels.NETWORK,
        help="How far the swarm reaches: public tells no private addresses. auto: as far as the addresses given.",
    ),
]
AllowFileOption = Annotated[
    Path | None,
    typer.Option(
        "--allow-file",
        metavar="FILE",
        rich_help_panel=panels.NETWORK,
        help="File of node ids that may connect, one a line; read again when it changes. Left out: everybody.",
    ),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        rich_help_panel=panels.NETWORK,
        help="File with a guest token, as `diffuse keys guest` prints it.",
    ),
]
StateDirOption = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        metavar="FOLDER",
        rich_help_panel=panels.STORAGE,
        help="Where what must survive a restart is kept. Left out: a folder of this user's.",
    ),
]
KeyOption = Annotated[
    Path | None,
    typer.Option(
        "--key",
        metavar="FILE",
        rich_help_panel=panels.NETWORK,
        help="Identity key file, made if missing. Left out: a new identity each time.",
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        rich_help_panel=panels.MODELS,
        min=1,
        help="Compute threads. Left out: measured or chosen to fit.",
    ),
]
EventsOption = Annotated[
    Events,
    typer.Option(
        "--events",
        rich_help_panel=panels.LOGS,
        help="text for people; json: one object a line on standard output.",
    ),
]
UntilEofOption = Annotated[
    bool,
    typer.Option("--until-eof", help="Stop when standard input ends: for a supervisor that may be killed."),
]
ImagesOption = Annotated[
    list[Path] | None,
    typer.Option("--image", metavar="FILE", help="A picture that the question is about. Repeatable."),
]
AudiosOption = Annotated[
    list[Path] | None,
    typer.Option("--audio", metavar="FILE", help="A recording that the question is about. Repeatable."),
]
PadOption = Annotated[
    bool,
    typer.Option(
        "--pad", rich_help_panel=panels.NETWORK, help="Pad messages, so that their sizes tell less."
    ),
]
MetricsOption = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        rich_help_panel=panels.LOGS,
        metavar="HOST:PORT",
        help="Serve /metrics for Prometheus, and /health, over HTTP. Left out: nowhere.",
    ),
]
LogLevelOption = Annotated[
    LogLevel,
    typer.Option(
        "--log-level", rich_help_panel=panels.LOGS, help="The least that is logged to standard error."
    ),
]
LogFormatOption = Annotated[
    LogFormat,
    typer.Option(
        "--log-format", rich_help_panel=panels.LOGS, help="text for people; json: one object a line."
    ),
]
TracesOption = Annotated[
    str | None,
    typer.Option(
        "--traces",
        rich_help_panel=panels.LOGS,
        metavar="URL",
        help="Send OpenTelemetry traces to this OTLP endpoint, over HTTP. Left out: where "
        "OpenTelemetry's own variables say, else nowhere.",
    ),
]
MetricsOpenOption = Annotated[
    bool,
    typer.Option(
        "--metrics-open",
        rich_help_panel=panels.LOGS,
        help="Serve them on an address that others can reach: who gets there reads them.",
    ),
]
TlsCertOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert",
        rich_help_panel=panels.TLS,
        metavar="FILE",
        help="Certificate to show, with its chain, as PEM.",
    ),
]
TlsKeyOption = Annotated[
    Path | None,
    typer.Option("--tls-key", rich_help_panel=panels.TLS, metavar="FILE", help="The key of --tls-cert."),
]
TlsCaOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        rich_help_panel=panels.TLS,
        metavar="FILE",
        help="Who signs the certificates of other members: links are wss then, and plain ones are refused.",
    ),
]
AskTlsCaOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        rich_help_panel=panels.TLS,
        metavar="FILE",
        help="Who signs the certificates of an https:// gateway, and of nodes and sentinels: links are wss then.",
    ),
]
CacheDirOption = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        metavar="FOLDER",
        rich_help_panel=panels.STORAGE,
        help="Where converted models and measurements are kept.",
    ),
]
UrlOption = Annotated[
    str | None, typer.Option("--url", help="A gateway's base URL. Left out: http://127.0.0.1:8000/v1")
]
ApiKeyOption = Annotated[
    str | None, typer.Option("--api-key", envvar="DIFFUSE_API_KEY", help="The gateway's API key.")
]
AskModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="With --url: which of the gateway's models. With --node or --bootstrap: as for `diffuse host`.",
    ),
]
MaxTokensOption = Annotated[
    int | None, typer.Option("--max-tokens", min=1, help="Longest answer, in tokens.")
]
TemperatureOption = Annotated[
    float | None, typer.Option("--temperature", min=0.0, max=2.0, help="0 always takes the likeliest token.")
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        "--seed", help="Same seed, same model, same answer. Left out: drawn; 0 for a picture, video or sound."
    ),
]
StepsOption = Annotated[
    int | None, typer.Option("--steps", min=1, max=1000, help="Denoising steps. Left out: the model's own.")
]
SizeOption = Annotated[
    str | None, typer.Option("--size", metavar="WxH", help="Pixels, as 512x512. Left out: the model's own.")
]
GuidanceOption = Annotated[
    float | None,
    typer.Option(
        "--guidance", min=0.0, max=100.0, help="How closely to follow the prompt. Left out: the model's own."
    ),
]
NegativeOption = Annotated[str | None, typer.Option("--negative", help="What to stay away from.")]
PatchesOption = Annotated[
    int | None, typer.Option("--patches", min=1, max=64, help=patch_help.patches_help())
]
WarmupOption = Annotated[int | None, typer.Option("--warmup", min=0, max=1000, help=patch_help.warmup_help())]
ExtrapolateOption = Annotated[bool, typer.Option("--extrapolate", help=patch_help.extrapolate_help())]
TwoStreamsOption = Annotated[bool, typer.Option("--two-streams", help=patch_help.two_streams_help())]
FramesOption = Annotated[
    int | None, typer.Option("--frames", min=1, help="Frames of a video. Left out: the model's own.")
]
SecondsOption = Annotated[
    float | None, typer.Option("--seconds", min=0.01, max=3600, help="Length of a sound or video.")
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", help="File or folder for what was made. Left out: here, named from the prompt."),
]
SystemOption = Annotated[str | None, typer.Option("--system", help="A system message.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
