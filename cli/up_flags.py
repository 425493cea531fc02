"""The flags that only `diffuse up` has."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from cli import panels

MAX_NODES: Final = 64

Nodes = Annotated[
    int,
    typer.Option(
        "--nodes",
        rich_help_panel=panels.NETWORK,
        metavar="N",
        min=1,
        max=MAX_NODES,
        help="Node processes to start.",
    ),
]
Port = Annotated[
    int,
    typer.Option(
        "--port",
        rich_help_panel=panels.NETWORK,
        metavar="N",
        min=0,
        max=65535,
        help="Where the gateway listens; 0 takes a free port.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        rich_help_panel=panels.MODELS,
        metavar="N",
        min=1,
        help="Compute threads of each process. Left out: its share of the cores.",
    ),
]
Pictures = Annotated[
    str,
    typer.Option(
        "--pictures",
        rich_help_panel=panels.MODELS,
        metavar="MODEL",
        help="Model for pictures, videos or sounds, on one more node; none leaves it out.",
    ),
]
