"""Asks a gateway from inside a namespace: `python -m tests.lab.ask URL '{"prompts": […], "num_tokens": 8, …}'`.

Prints one JSON object: the text of every answer in order, what failed, and the longest silence between two tokens.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from openai import APIError, AsyncOpenAI


async def _ask(client: AsyncOpenAI, model: str, prompt: str, num_tokens: int) -> dict[str, Any]:
    began = last = time.monotonic()
    first_s, longest_s, text = 0.0, 0.0, ""
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
                first_s = first_s or now - began
                longest_s = max(longest_s, now - last) if text else 0.0
                text, last = text + chunk.choices[0].delta.content, now
    except APIError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"text": text, "first_s": first_s, "longest_s": longest_s, "total_s": time.monotonic() - began}


async def _main(url: str, wanted: dict[str, Any]) -> None:
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=wanted.get("timeout_s", 60.0))
    limit = time.monotonic() + wanted.get("wait_s", 30.0)
    while not (models := (await client.models.list()).data):
        if time.monotonic() > limit:
            print(json.dumps({"answers": [], "failed": ["no model is listed"]}))
            return
        await asyncio.sleep(0.2)
    asks = [(prompt, wanted["num_tokens"]) for prompt in wanted["prompts"]] * wanted.get("times", 1)
    answers: list[dict[str, Any]] = []
    if until := wanted.get("for_s"):
        limit = time.monotonic() + until
        while time.monotonic() < limit:
            answers += await asyncio.gather(*(_ask(client, models[0].id, *ask) for ask in asks))
    elif wanted.get("together"):
        answers += await asyncio.gather(*(_ask(client, models[0].id, *ask) for ask in asks))
    else:
        for ask in asks:
            answers.append(await _ask(client, models[0].id, *ask))
    failed = [answer["error"] for answer in answers if "error" in answer]
    print(json.dumps({"answers": answers, "failed": failed}))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], json.loads(sys.argv[2])))
