"""Asks a gateway from inside a namespace: `python -m tests.lab.ask URL '{"prompts": […], "num_tokens": 8, …}'`.

Says "asking" on standard error when it begins. Prints one JSON object: of every answer the text and the silences
between its tokens, and what failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from typing import Any

from openai import APIConnectionError, APIError, AsyncOpenAI


async def _ask(client: AsyncOpenAI, model: str, prompt: str, num_tokens: int) -> dict[str, Any]:
    began = last = time.monotonic()
    text, silences = "", []
    try:
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            max_tokens=num_tokens,
            stream=True,
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                now = time.monotonic()
                silences.append(now - last)
                text, last = text + chunk.choices[0].delta.content, now
    except APIError as error:
        return {"error": f"after {time.monotonic() - began:.1f} s, {type(error).__name__}: {error}"}
    silences = silences or [0.0]
    return {
        "text": text,
        "first_s": silences[0],
        "gaps_s": silences[1:],
        "longest_s": max(silences),
        "total_s": time.monotonic() - began,
    }


async def _model_of(client: AsyncOpenAI, wait_s: float) -> str:
    """Wait for a model with a whole route; one without it will do in the end."""
    limit = time.monotonic() + wait_s
    while True:
        models: list[Any] = []
        with contextlib.suppress(APIConnectionError):
            models = (await client.models.list()).data
        ready = [model for model in models if not getattr(model, "missing_layers", [])]
        if ready or time.monotonic() > limit:
            return str((ready or models)[0].id)
        await asyncio.sleep(0.2)


async def _main(url: str, wanted: dict[str, Any]) -> None:
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=wanted.get("timeout_s", 60.0))
    model = await _model_of(client, wanted.get("wait_s", 30.0))
    print("asking", file=sys.stderr, flush=True)
    answers: list[dict[str, Any]] = []
    limit = time.monotonic() + wanted.get("for_s", 0.0)
    while not answers or time.monotonic() < limit:
        for prompt in wanted["prompts"]:
            answers.append(await _ask(client, model, prompt, wanted["num_tokens"]))
    failed = [answer["error"] for answer in answers if "error" in answer]
    print(json.dumps({"answers": answers, "failed": failed}))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], json.loads(sys.argv[2])))
