"""`diffuse doctor`: look at everything that can be wrong, and name the exact layer range, port or key."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cli import failures, show
from cli import options as opt

if TYPE_CHECKING:
    from cli.diagnosis import Finding, HomeParts, OwnModel
    from cli.membership import Membership
    from routing.tls_files import TlsFiles
    from routing.types import NodeAddress

MAX_CLOCK_SKEW_S: Final = 300.0  # what the certificates of the handshake bear
FREE_MEMORY_WANTED: Final = 1 << 30  # the default model's ends, and its nodes, fit in that
_PACKAGES: Final = ("diffuse", "torch", "transformers", "cryptography", "websockets")
_MARKS: Final = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "problem": ("problem", "red")}


def doctor(
    bootstrap: opt.BootstrapOption = None,
    node: opt.NodesOption = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="The model a gateway would load here, compared with what nodes hold."),
    ] = None,
    url: opt.UrlOption = None,
    api_key: opt.ApiKeyOption = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="The port a gateway would use here.")
    ] = 8000,
    key: Annotated[
        Path | None,
        typer.Option("--key", help="A key file to check, and to join with; else the usual one is checked."),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            metavar="HOST:PORT",
            help="With --bootstrap: what a node here would bind. Left out: any port.",
        ),
    ] = None,
    token_file: opt.TokenFileOption = None,
    psk_file: opt.PskFileOption = None,
    tls_cert: opt.TlsCertOption = None,
    tls_key: opt.TlsKeyOption = None,
    tls_ca: opt.AskTlsCaOption = None,
    network: opt.NetworkOption = opt.DEFAULT_NETWORK,
    ends: opt.EndsOption = opt.Ends.LOCAL,
    local_layers: opt.LocalLayersOption = "1:0",
    json: opt.JsonOption = False,
) -> None:
    """Check this machine, a swarm (--bootstrap), a gateway (--url) and nodes (--node); exit with 1 if one is bad.

    With --bootstrap it listens as a node would and asks every sentinel named: is the clock right, how are we seen
    from outside, can we be dialled, and does an echo come back through the relay?
    """
    from cli.diagnosis import HomeParts
    from routing.tls_files import TlsFiles

    first, last = opt.parse_local_layers(local_layers)
    entrances = opt.parse_addresses(bootstrap, "--bootstrap")
    place = opt.parse_host_port(listen, "--listen") if listen else None
    files = TlsFiles(tls_cert, tls_key, tls_ca)
    findings = [*_versions(), *_memory(), *_key_files(key, psk_file)]
    if url:
        findings.append(_gateway(url, api_key, tls_ca))
    elif not entrances:  # a machine that joins a swarm need not be a gateway
        findings.append(_port(port))
    membership = None
    if not any(f.subject in ("--psk-file", "--key") and f.level == "problem" for f in findings):
        found, membership = _tls(network, psk_file, files)
        findings += found
    if entrances and membership:
        findings += _swarm(entrances, key, membership, place, token_file)
    if node and membership:
        findings += _nodes(node, model, membership, HomeParts(first, last, ends is opt.Ends.REMOTE))
    elif model:
        findings.append(_model(model)[0])
    _print(findings, as_json=json)
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(failures.EXIT_FAILURE)


def _print(findings: list[Finding], *, as_json: bool) -> None:
    if as_json:
        rows: list[dict[str, Any]] = [
            {"level": finding.level, "subject": finding.subject, "text": finding.text} for finding in findings
        ]
        show.print_json({"findings": rows, "healthy": all(row["level"] != "problem" for row in rows)})
        return
    for finding in findings:
        mark, color = _MARKS[finding.level]
        typer.echo(f"{typer.style(f'{mark:8}', fg=color)} {finding.subject}: {finding.text}")


def _versions() -> Iterator[Finding]:
    from cli.diagnosis import Finding

    found = [f"{name} {_version(name)}" for name in _PACKAGES]
    yield Finding("ok", "versions", ", ".join(found))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _memory() -> Iterator[Finding]:
    import psutil

    from cli.diagnosis import Finding

    free = psutil.virtual_memory().available
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    text = f"{cores} cores, {show.size(free)} of memory free"
    if free < FREE_MEMORY_WANTED:
        yield Finding(
            "warning", "machine", f"{text}: the default swarm wants {show.size(FREE_MEMORY_WANTED)}"
        )
    else:
        yield Finding("ok", "machine", text)


def _key_files(key: Path | None, psk_file: Path | None) -> Iterator[Finding]:
    from cli.keys import default_key_path
    from cli.membership import read_psks
    from routing.identity import Identity

    if key is None and default_key_path().exists():
        key = default_key_path()
    if key is not None:
        yield _readable("--key", lambda: f"{key} is node {Identity.load(key).node_id.hex()}")
    if psk_file is not None:
        yield _readable(
            "--psk-file", lambda: f"{psk_file} holds {_secrets(len(read_psks(psk_file)))}, private"
        )


def _tls(network: str, psk_file: Path | None, files: TlsFiles) -> tuple[list[Finding], Membership | None]:
    """What the files of TLS are worth, and how to take part with them; None where one will not do."""
    from cli.diagnosis import Finding
    from cli.membership import read_membership
    from routing.errors import SettingsError

    try:
        membership = read_membership(network, psk_file, files, listens=files.cert is not None)
    except SettingsError as error:
        return [Finding("problem", "TLS", str(error))], None
    if membership.tls is None:
        return [], membership
    text = "links are dialled by wss and verified"
    if (lifetime := membership.tls.contexts.lifetime) is not None:
        days = (lifetime[1] - time.time()) / 86400
        text += f"; our certificate is good for {days:.0f} more days"
    return [Finding("ok", "TLS", text)], membership


def _secrets(number: int) -> str:
    return "one secret" if number == 1 else f"{number} secrets, the first for dialling"


def _readable(subject: str, read: Callable[[], str]) -> Finding:
    from cli.diagnosis import Finding
    from routing.errors import SettingsError

    try:
        return Finding("ok", subject, read())
    except SettingsError as error:
        return Finding("problem", subject, str(error))


def _port(port: int) -> Finding:
    """Whether a gateway could listen here; one that does already is no problem."""
    from cli.diagnosis import Finding
    from cli.ports import bind_loopback

    subject = f"port {port}"
    try:
        with bind_loopback(port):
            return Finding("ok", subject, "free")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return Finding(
                "problem", subject, f"cannot be bound: {error.strerror}; choose another with --port"
            )
    gateway = _gateway(f"http://127.0.0.1:{port}/v1", None)
    if "HTTPS" in gateway.text:  # its own words: another program says something else
        return Finding(
            "ok", subject, "a gateway serves HTTPS there: look at it with --url https://... and --tls-ca"
        )
    if gateway.level == "problem":
        return Finding(
            "problem", subject, "another program listens there: stop it, or choose another with --port"
        )
    return gateway


def _gateway(url: str, api_key: str | None, tls_ca: Path | None = None) -> Finding:
    from cli.diagnosis import Finding
    from cli.gateway import GatewayError, base_url, open_gateway

    async def look() -> tuple[list[dict[str, Any]], str | None]:
        async with open_gateway(url, api_key=api_key, tls_ca=tls_ca, model="") as gateway:
            return await gateway.list_models(), gateway.date

    subject = f"gateway {base_url(url)}"
    try:
        listed, date = asyncio.run(look())
    except GatewayError as error:
        return Finding("problem", subject, str(error))
    if (skew := _clock_skew_s(date)) is not None and abs(skew) > MAX_CLOCK_SKEW_S:
        return Finding(
            "problem", subject, f"its clock differs from ours by {abs(skew):.0f} s: set both clocks"
        )
    broken = [entry for entry in listed if entry.get("status", "ready") != "ready"]
    if broken or not listed:
        from cli.models import status_of

        told = (
            "; ".join(f"{entry.get('id')}: {status_of(entry)}" for entry in broken)
            or "lists no model yet: is it still loading?"
        )
        return Finding("problem", subject, told)
    return Finding("ok", subject, "serves " + ", ".join(str(entry.get("id")) for entry in listed))


def _clock_skew_s(date: str | None) -> float | None:
    """Seconds that the other clock is ahead of ours."""
    try:
        told: datetime | None = parsedate_to_datetime(date) if date else None
    except ValueError:
        return None
    return told.timestamp() - time.time() if told else None


def _swarm(
    bootstraps: tuple[NodeAddress, ...],
    key: Path | None,
    membership: Membership,
    listen: tuple[str, int] | None,
    token_file: Path | None,
) -> list[Finding]:
    """Ask the sentinels. Not with the key of a node that runs here: its reservations would seem to be ours."""
    from cli.checkup import check_up
    from cli.membership import read_token
    from cli.runtime import run_asking
    from cli.state import default_state_dir, running_services
    from routing.identity import Identity

    identity = Identity.load(key) if key else Identity.generate()
    running = {service.node_id for service in running_services(default_state_dir())}
    if identity.node_id.hex() in running:
        identity = Identity.generate()
    token = read_token(token_file)
    return run_asking(check_up(identity, membership, bootstraps, listen=listen, token=token))


def _model(model: str) -> tuple[Finding, OwnModel | None]:
    """Open the model's headers as a gateway would; this takes the long imports."""
    from cli.diagnosis import Finding, OwnModel
    from cli.runtime import heavy_imports, start_logging

    start_logging(logging.ERROR)
    with heavy_imports():
        from slicing.any_model import num_layers_of, open_model
        from slicing.errors import ModelError
    try:
        opened = open_model(model)
        own = OwnModel(model, opened.digest)
    except ModelError as error:
        return Finding("problem", "--model", str(error)), None
    layers = num_layers_of(opened)
    return Finding("ok", "--model", f"{model} is here: {layers} layers, digest {own.digest.hex()[:12]}"), own


def _nodes(node: list[str], model: str | None, membership: Membership, home: HomeParts) -> list[Finding]:
    from cli.diagnosis import examine
    from cli.survey import survey
    from routing.addresses import parse_address

    addresses = [parse_address(text) for text in node]
    reports = asyncio.run(survey(addresses, membership))
    if model is None:
        return examine(reports, home)
    opened, own = _model(model)
    return [opened, *examine(reports, home, own)]
