"""`diffuse keys`: identity keys of nodes, which are made, shown and changed here, and API keys of a gateway."""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli import options as opt
from cli import show as terminal
from cli.failures import CommandError

if TYPE_CHECKING:
    from app.keys_file import KeyEntry
    from routing.identity import Identity
    from routing.moved import Moved
    from routing.types import NodeId

app = typer.Typer(
    no_args_is_help=True,
    help="Make, show or change the identity key of a node, invite a guest, or make an API key of a gateway.",
)

KeyPath = Annotated[
    Path | None,
    typer.Argument(
        help="The key file. Left out: node.key in this user's Diffuse folder.", show_default=False
    ),
]


API_KEY_PREFIX = "sk-diffuse-"  # some clients look for the first three
API_KEY_BYTES = 32


class GuestMay(StrEnum):
    """What a guest token permits."""

    USE = "use"
    SERVE = "serve"


def default_keys_file() -> Path:
    """Where hashes of API keys go unless somebody says otherwise."""
    return Path(typer.get_app_dir("diffuse", force_posix=False)) / "api-keys.toml"


def default_key_path() -> Path:
    """Where a key lives unless its owner says otherwise."""
    return Path(typer.get_app_dir("diffuse", force_posix=False)) / "node.key"


@app.command()
def new(path: KeyPath = None) -> None:
    """Make a new key, readable by you alone (mode 0600). An existing file is never overwritten."""
    from routing.identity import Identity

    target = path or default_key_path()
    identity = Identity.generate()
    identity.save(target)
    _print(identity, target)


@app.command()
def show(path: KeyPath = None) -> None:
    """Print the node id of a key, its public key, and what it was before. The secret is never printed."""
    from cli.key_files import live_move
    from routing.moved import read_moved

    source = path or default_key_path()
    identity = _load(source)
    _print(identity, source)
    if statement := live_move(source, identity):
        _print_move(read_moved(statement))


@app.command()
def rotate(path: KeyPath = None) -> None:
    """Put a new key in the place of the old one. For 7 days both are known to be yours.

    The new one is shown with a statement that both have signed: whoever lists the old id lets the new one in
    until then. Restart what uses the key, and tell the new id to those who keep a list.
    """
    from cli.key_files import rotate as rotate_key

    source = path or default_key_path()
    _load(source)  # says how to make one, where there is none
    moved = rotate_key(source)
    _print(_load(source), source)
    _print_move(moved)


@app.command()
def guest(
    path: KeyPath = None,
    client: Annotated[
        str, typer.Option("--client", metavar="ID", help="The guest's node id. any: whoever holds the token.")
    ] = "any",
    may: Annotated[
        GuestMay, typer.Option("--scope", help="use: ask nodes for answers. serve: be a node as well.")
    ] = GuestMay.USE,
    expires: Annotated[
        str, typer.Option("--expires", metavar="TIME", help="How long it holds, 7d at most.")
    ] = "24h",
    quota: Annotated[
        int, typer.Option("--quota", min=1, help="Sessions at once that may begin at one node.")
    ] = 4,
    network: opt.NetworkOption = opt.DEFAULT_NETWORK,
) -> None:
    """Print a guest token, signed with this key. The guest passes it with --token-file.

    It counts where the allow list has a line `issuer` with this key's public key. A token for any client serves
    one client at a time.
    """
    from cli.membership import network_id
    from routing.guest_token import GuestScope, format_guest_token, sign_guest_token

    issuer = _load(path or default_key_path())
    token = sign_guest_token(
        issuer,
        network_id(network),
        client_id=_client_id(client),
        scope=GuestScope[may.name],
        now_s=time.time(),
        lifetime_s=opt.parse_duration(expires, "--expires"),
        quota=quota,
    )
    typer.echo(format_guest_token(token))
    terminal.note(f"allow lists that honour it hold the line: issuer {issuer.public_key.hex()}")


@app.command()
def api(
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="Whose key it is: letters, digits and . _ @ -")
    ],
    keys_file: Annotated[
        Path | None,
        typer.Option(
            "--keys-file",
            metavar="FILE",
            help="The gateway's. Left out: api-keys.toml in this user's Diffuse folder.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", metavar="MODEL", help="A model that it may use. Repeatable. Left out: every model."
        ),
    ] = None,
    requests_per_minute: Annotated[
        int | None,
        typer.Option(
            "--requests-per-minute", metavar="N", min=1, help="Left out: what the gateway says for every key."
        ),
    ] = None,
    max_concurrent: Annotated[
        int | None,
        typer.Option(
            "--max-concurrent",
            metavar="N",
            min=1,
            help="Answers at once. Left out: what the gateway says for every key.",
        ),
    ] = None,
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="TIME", help="As in 30d. Left out: it does not.")
    ] = None,
) -> None:
    """Make an API key and print it, this once. The file gets its hash; a running gateway reads it within a second.

    To revoke a key, remove its entry from the file.
    """
    from app.keys_file import append_entry

    key = API_KEY_PREFIX + secrets.token_urlsafe(API_KEY_BYTES)
    target = keys_file or default_keys_file()
    lifetime_s = None if expires is None else opt.parse_duration(expires, "--expires")
    append_entry(target, _api_entry(name, key, model, requests_per_minute, max_concurrent, lifetime_s))
    typer.echo(key)
    terminal.note(f"its hash is in {target}, as {name}: start the gateway with --keys-file {target}")


def _api_entry(
    name: str,
    key: str,
    models: list[str] | None,
    requests_per_minute: int | None,
    max_concurrent: int | None,
    lifetime_s: float | None,
) -> KeyEntry:
    """Raises `BadParameter` for a name or a model that cannot be written down."""
    from pydantic import ValidationError

    from app.keys import digest_of
    from app.keys_file import KeyEntry

    until = None if lifetime_s is None else datetime.fromtimestamp(time.time() + lifetime_s, UTC)
    try:
        return KeyEntry(
            name=name,
            sha256=digest_of(key).hex(),
            models=tuple(models) if models else None,
            requests_per_minute=requests_per_minute,
            max_concurrent=max_concurrent,
            expires=until,
        )
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        hint = f"'--{first['loc'][0]}'".replace("models", "model")
        raise typer.BadParameter(first["msg"].removeprefix("Value error, "), param_hint=hint) from None


def _load(source: Path) -> Identity:
    from routing.identity import Identity

    if not source.exists():
        raise CommandError(f"there is no key file {source}: `diffuse keys new` makes one")
    return Identity.load(source)


def _client_id(text: str) -> NodeId | None:
    from routing.types import NodeId

    if text == "any":
        return None
    try:
        node_id = bytes.fromhex(text)
    except ValueError:
        node_id = b""
    if len(node_id) != 32:
        raise typer.BadParameter(
            f"{text!r}: give the 64 hex digits that `diffuse keys show` prints first, or any",
            param_hint="'--client'",
        )
    return NodeId(node_id)


def _print(identity: Identity, source: Path) -> None:
    typer.echo(f"{identity.node_id.hex()}  {source}")
    typer.echo(f"public key {identity.public_key.hex()}")


def _print_move(moved: Moved) -> None:
    since, until = (
        time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) for at in (moved.issued_s, moved.expires_s)
    )
    typer.echo(
        f"moved from {moved.old_id.hex()} on {since}; lists with that id let this one in until {until}"
    )
