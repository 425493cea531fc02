"""A member of a swarm that computes nothing: `python -m tests.support.gossip_process ...`, for tests of convergence.

Prints JSON lines: "ready" once, "view" whenever what it sees has changed. Reads commands on stdin: "view", "leave".
Ends with its stdin. Imports no torch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from routing.addresses import parse_address
from routing.identity import Identity
from routing.network import Network, NetworkSettings, Offering
from routing.types import Describe, Description, Message, NodeAddress, SliceOffer, SliceSpec, WireDtype

NETWORK_ID = b"g" * 32
NUM_LAYERS = 8


def offer(start: int = 0, end: int = NUM_LAYERS) -> SliceOffer:
    """A slice of a model that nobody has."""
    spec = SliceSpec(start, end)
    return SliceOffer("toy", b"d" * 32, NUM_LAYERS, 64, spec, WireDtype.FLOAT32, "plain/fp32", layer_ms=1.0)


class Describer:
    """Answers what a node answers to a directory."""

    def __init__(self, offers: Sequence[SliceOffer]) -> None:
        self._offers = offers

    def on_message(self, link: Any, message: Message) -> None:
        if isinstance(message, Describe):
            link.post(Description(tuple(self._offers), 0, 4, 0))

    def on_link_up(self, link: Any) -> None: ...

    def on_link_closed(self, link: Any, error: Any) -> None: ...


def build(arguments: argparse.Namespace) -> Network:
    """The network of one process."""
    offers = (offer(),)
    settings = NetworkSettings(
        NETWORK_ID,
        bootstraps=tuple(parse_address(text) for text in arguments.bootstrap),
        listen=("127.0.0.1", arguments.port),
        state_dir=arguments.state,
        is_sentinel=arguments.sentinel,
    )
    identity = Identity.load(arguments.key) if arguments.key else Identity.generate()
    network = Network(
        identity,
        settings,
        seal_key=b"s" * 32,
        offering=None if arguments.sentinel else lambda: Offering(offers, 0, 4, 0),
        clock=lambda: time.time() + arguments.clock_offset,
    )
    network.dispatcher.add(Describer(offers), (Describe,))
    return network


def view(network: Network) -> dict[str, Any]:
    """What this process would route to, and why not to others."""
    status = network.status()
    return {
        "event": "view",
        "at": time.time(),
        "alive": sorted(it.node_id.hex() for it in network.directory.announced()),
        "suspected": sorted(it.node_id.hex() for it in status.nodes if it.is_suspected),
        "contacts": [str(address) for address in status.contacts],
        "reachability": str(status.reachability),
        "num_links": status.num_links,
        "faults": status.faults,
        "rival": status.rival,
        "skew_ms": status.clock_skew_ms,
    }


def say(fields: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


async def main(arguments: argparse.Namespace) -> None:
    network = build(arguments)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with network.running():
        assert network.bound is not None
        say({"event": "ready", "address": str(NodeAddress(network.node_id, *network.bound))})
        telling = asyncio.create_task(_tell_changes(network))
        try:
            while command := (await reader.readline()).decode().strip():
                if command == "leave":
                    await network.leave()
                    break
                say(view(network))
        finally:
            telling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await telling


async def _tell_changes(network: Network) -> None:
    last: dict[str, Any] = {}
    while True:
        now = {key: it for key, it in view(network).items() if key in ("alive", "contacts", "rival")}
        if now != last:
            last = now
            say(view(network))
        await asyncio.sleep(0.05)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap", action="append", default=[])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--key", type=Path)
    parser.add_argument("--state", type=Path)
    parser.add_argument("--sentinel", action="store_true")
    parser.add_argument("--clock-offset", type=float, default=0.0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(name)s %(levelname)s %(message)s")
    asyncio.run(main(parse(sys.argv[1:])))
