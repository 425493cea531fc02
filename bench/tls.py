"""What TLS around a link costs: the same link with and without it, alternated, over loopback in one process.

Run as `python -m bench.tls`. Steps of 1,792 bytes go there and back one by one, a prefill of 4 MB one way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import trustme
import uvloop

from routing.endpoint import Endpoint
from routing.errors import RemoteError
from routing.identity import Identity
from routing.link import Link
from routing.tls import Tls, member_tls
from routing.tls_files import TlsFiles
from routing.types import Answer, AnswerKind, Capabilities, Message, NodeAddress, SessionId, Step

NETWORK_ID = b"t" * 32
SESSION_ID = SessionId(b"s" * 16)
TOKEN, PREFILL = bytes(1792), bytes(4 << 20)
ROUNDS, STEPS = 40, 50


class _Echo:
    """Answers each step with as many bytes as a token has."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[Message] = asyncio.Queue()
        self.echoes = False

    def on_message(self, link: Link, message: Message) -> None:
        if self.echoes and isinstance(message, Step):
            link.post(Answer(SESSION_ID, 1, message.step, AnswerKind.HIDDEN_STATES, 1, TOKEN))
        else:
            self.arrived.put_nowait(message)

    def on_link_up(self, link: Link) -> None: ...

    def on_link_closed(self, link: Link, error: RemoteError | None) -> None: ...


@dataclass
class _Pair:
    link: Link
    here: _Echo
    there: _Echo

    async def token_us(self) -> float:
        """Microseconds of one step and its answer."""
        self.there.echoes = True
        began = time.perf_counter()
        for number in range(1, STEPS + 1):
            self.link.post(Step(SESSION_ID, 1, number, 0, 1, TOKEN))
            await self.here.arrived.get()
        self.there.echoes = False
        return (time.perf_counter() - began) / STEPS * 1e6

    async def prefill_ms(self) -> float:
        began = time.perf_counter()
        await self.link.send(Step(SESSION_ID, 1, 1, 0, 1, PREFILL))
        await self.there.arrived.get()
        return (time.perf_counter() - began) * 1e3


async def _pair(stack: contextlib.AsyncExitStack, tls: Tls | None) -> _Pair:
    here, there = _Echo(), _Echo()
    ends = [
        Endpoint(Identity.generate(), NETWORK_ID, Capabilities, inbox, tls=tls) for inbox in (here, there)
    ]
    for end in ends:
        stack.push_async_callback(end.close)
    place = await ends[1].listen("127.0.0.1", 0)
    return _Pair(await ends[0].dial(NodeAddress(ends[1].node_id, *place)), here, there)


async def _measure(tls: Tls | None) -> dict[str, float]:
    async with contextlib.AsyncExitStack() as stack:
        plain, secured = await _pair(stack, None), await _pair(stack, tls)
        tokens: tuple[list[float], list[float]] = ([], [])
        prefills: tuple[list[float], list[float]] = ([], [])
        for number in range(ROUNDS):
            order = (plain, secured) if number % 2 else (secured, plain)
            for pair in order:
                tokens[pair is secured].append(await pair.token_us())
                prefills[pair is secured].append(await pair.prefill_ms())
    told = {
        "token_us_plain": statistics.median(tokens[0]),
        "token_us_tls": statistics.median(tokens[1]),
        "token_ratio": statistics.median(b / a for a, b in zip(*tokens, strict=True)),
        "prefill_ms_plain": statistics.median(prefills[0]),
        "prefill_ms_tls": statistics.median(prefills[1]),
        "prefill_ratio": statistics.median(b / a for a, b in zip(*prefills, strict=True)),
    }
    return {name: round(value, 3) for name, value in told.items()}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ca, files = trustme.CA(), TlsFiles(*(Path(folder, name) for name in ("cert", "key", "ca")))
        made = ca.issue_cert("member.example")
        assert files.cert is not None
        assert files.key is not None
        assert files.ca is not None
        made.cert_chain_pems[0].write_to_path(files.cert)
        files.key.touch(0o600)
        made.private_key_pem.write_to_path(files.key)
        ca.cert_pem.write_to_path(files.ca)
        tls = member_tls(files)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(_measure(tls))))


if __name__ == "__main__":
    main()
