"""People who ask a gateway all the time, one answer after the other, and what became of what they asked.

Knows prompts with the texts that are due; nothing of the swarm behind the gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from openai import APIError, AsyncOpenAI

from tests.support.processes import Process

TIMEOUT_S = 60.0
AFTER_FAILURE_S = 0.2


def client_for(gateway: Process) -> AsyncOpenAI:
    """The official client, for an event loop."""
    return AsyncOpenAI(base_url=gateway.ready["url"], api_key="none", max_retries=0, timeout=TIMEOUT_S)


async def streamed(
    client: AsyncOpenAI, model: str, prompt: str, num_tokens: int
) -> AsyncIterator[tuple[str, int]]:
    """A greedy answer in pieces, each with the replays that it tells of. Raises APIError."""
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=num_tokens,
        stream=True,
    )
    async for chunk in stream:
        replays = int((chunk.model_extra or {}).get("replays") or 0)
        text = (chunk.choices[0].delta.content or "") if chunk.choices else ""
        if text or replays:
            yield text, replays


@dataclass
class Crowd:
    """Asks for the texts in `due` again and again, `num_people` at once."""

    gateway: Process
    due: Mapping[str, str]
    num_tokens: int
    num_people: int = 3
    answered: int = 0
    replays: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def asking(self) -> AsyncIterator[Crowd]:
        """They ask while the block runs, and end what they have begun."""
        self._is_over = False
        async with client_for(self.gateway) as client:
            model = (await client.models.list()).data[0].id
            people = [
                asyncio.create_task(self._ask_on(client, model, first)) for first in range(self.num_people)
            ]
            try:
                yield self
            finally:
                self._is_over = True
                await asyncio.gather(*people)

    async def more_answers(self, count: int, timeout_s: float = 60.0) -> None:
        """Wait until so many more were answered."""
        wanted = self.answered + count
        async with asyncio.timeout(timeout_s):
            while self.answered < wanted:
                await asyncio.sleep(0.02)

    async def _ask_on(self, client: AsyncOpenAI, model: str, first: int) -> None:
        prompts = itertools.islice(itertools.cycle(self.due), first, None)
        while not self._is_over:
            prompt, text = next(prompts), ""
            try:
                async for piece, replays in streamed(client, model, prompt, self.num_tokens):
                    text += piece
                    self.replays += replays
                    self.tokens += bool(piece)
            except APIError as error:
                self.failed.append(f"{getattr(error, 'code', None)}: {error}")
                await asyncio.sleep(AFTER_FAILURE_S)
                continue
            self.answered += 1
            self.wrong += [text] if text != self.due[prompt] else []
