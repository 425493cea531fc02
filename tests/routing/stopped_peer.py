"""A peer in a process of its own, for a test to freeze: listens, prints where, and runs until it is killed."""

from __future__ import annotations

import asyncio

from tests.routing.peers import open_rig


async def main() -> None:
    async with open_rig() as rig:
        peer = await rig.peer()
        print(peer.address, flush=True)  # noqa: T201
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
