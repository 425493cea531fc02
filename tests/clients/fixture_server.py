"""A gateway over scripted engines, for clients in other processes: `python -m tests.clients.fixture_server`.

It writes a line with its URL, and serves until it is ended. `fixture` chats, `thinker` thinks aloud, `librarian` makes
vectors, `painter` pictures, `composer` sounds, `filmer` videos and `scribe` writes down. Streams have comments and
empty chunks in every silence, so that each client meets them.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.engine.tokenizer import ChatTokenizer
from slicing.diffusion.kinds import Kind
from tests.clients.scripted_mind import TEMPLATE, THINKING_TEMPLATE, ScriptedMind
from tests.support.api_server import serve_engines
from tests.support.fake_embeddings import FakeEmbeddings
from tests.support.fake_pictures import VIDEOS, FakePictures, fake_sounds
from tests.support.fake_scribe import FakeScribe
from tests.support.tiny_tokenizer import write_tiny_tokenizer

KEY = "right-key"
WIDE = replace(VIDEOS, width=1280, height=720, num_frames=1)  # a size that OpenAI's clients know
SETTINGS: dict[str, Any] = {"keepalive_s": 0.03, "heartbeat_s": 0.07, "max_requests": 64}


async def serve(keys: str, aliases: dict[str, str]) -> None:
    """Serve until a signal comes."""
    ended = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, ended.set)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = ChatTokenizer.load(write_tiny_tokenizer(Path(folder, "plain"), template=TEMPLATE))
        thinking = write_tiny_tokenizer(Path(folder, "thinking"), template=THINKING_TEMPLATE)
        engines = (
            ScriptedMind(tokenizer),
            ScriptedMind(ChatTokenizer.load(thinking), "thinker"),
            FakeEmbeddings(tokenizer, max_positions=512, cuts=frozenset({1})),
            FakePictures(),
            fake_sounds(),
            FakePictures(Kind.VIDEO, "filmer", WIDE),
            FakeScribe(tokenizer),
        )
        async with serve_engines(*engines, api_keys=keys, model_aliases=aliases, **SETTINGS) as served:
            print(f"base_url {served.url}/v1", flush=True)
            await ended.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", default=KEY, help="separated by commas")
    parser.add_argument("--alias", action="append", default=[], metavar="ALIAS=MODEL")
    chosen = parser.parse_args()
    asyncio.run(serve(chosen.keys, dict(pair.split("=", 1) for pair in chosen.alias)))


if __name__ == "__main__":
    main()
