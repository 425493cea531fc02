"""What flags may be chosen from, by the words that are written."""

from __future__ import annotations

from enum import StrEnum


class Ends(StrEnum):
    """Where the two ends of the model run."""

    LOCAL = "local"
    REMOTE = "remote"


class Events(StrEnum):
    """How a service tells what it is doing on standard output."""

    TEXT = "text"
    JSON = "json"


class Wire(StrEnum):
    """Element type of hidden states on the wire."""

    AUTO = "auto"
    BF16 = "bf16"
    INT8_DELTA = "int8-delta"


class Scope(StrEnum):
    """How far a swarm reaches, which says what addresses its members may tell."""

    AUTO = "auto"
    LOOPBACK = "loopback"
    LAN = "lan"
    PUBLIC = "public"


class Weights(StrEnum):
    """The form that weights are kept and read in."""

    AUTO = "auto"
    BF16 = "bf16"
    FP32 = "fp32"
    INT8 = "int8"


class Runner(StrEnum):
    """What runs the layers."""

    AUTO = "auto"
    FAST = "fast"
    INVARIANT = "invariant"
    PLAIN = "plain"


class Draft(StrEnum):
    """Whether tokens are guessed ahead."""

    OFF = "off"
    LOOKUP = "lookup"
    AUTO = "auto"


class Dtype(StrEnum):
    """Element type a node computes in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class LogLevel(StrEnum):
    """The least that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """How a line of the log is written."""

    TEXT = "text"
    JSON = "json"
