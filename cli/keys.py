"""`diffuse keys`: make an identity key, or show whose it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.failures import CommandError

app = typer.Typer(no_args_is_help=True, help="Make or show the identity key of a node or gateway.")

KeyPath = Annotated[
    Path | None,
    typer.Argument(
        help="The key file. Left out: node.key in this user's Diffuse folder.", show_default=False
    ),
]


def default_key_path() -> Path:
    """Where a key lives unless its owner says otherwise."""
    return Path(typer.get_app_dir("diffuse", force_posix=False)) / "node.key"


@app.command()
def new(path: KeyPath = None) -> None:
    """Make a new key, readable by you alone (mode 0600). An existing file is never overwritten."""
    from routing.identity import Identity

    target = path or default_key_path()
    target.parent.mkdir(parents=True, exist_ok=True)
    identity = Identity.generate()
    identity.save(target)
    typer.echo(f"{identity.node_id.hex()}  {target}")


@app.command()
def show(path: KeyPath = None) -> None:
    """Print the node id that a key stands for. The secret itself is never printed."""
    from routing.identity import Identity

    source = path or default_key_path()
    if not source.exists():
        raise CommandError(f"there is no key file {source}: `diffuse keys new` makes one")
    typer.echo(f"{Identity.load(source).node_id.hex()}  {source}")
