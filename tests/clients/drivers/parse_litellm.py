"""What LiteLLM reads of recorded streams: one JSON line for each."""

from __future__ import annotations

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

SCENARIOS = json.loads(os.environ["SCENARIOS"])
litellm.telemetry = False
litellm.suppress_debug_info = True
# A model that its table does not know is asked whole, and the answer cut in pieces: no stream of ours would be read.
CARD = {"litellm_provider": "openai", "mode": "responses", "supports_native_streaming": True}
litellm.register_model({"openai/answers": CARD})


def main() -> None:
    for name, kind in SCENARIOS.items():
        url = f"{os.environ['REPLAY']}/{name.replace(' ', '-')}/v1"
        told = {"api_base": url, "api_key": "none", "max_retries": 0, "stream": True}
        found = {"text": [""], "error": False}
        try:
            {"chat": chat, "completions": completions, "responses": responses}[kind](told, found)
        except Exception as error:
            found["error"] = "layers 10:20" in str(error) or f"{type(error).__name__}: {error}"
        print(json.dumps({"scenario": name, "reading": found}), flush=True)


def chat(told: dict, found: dict) -> None:
    asked = [{"role": "user", "content": "x"}]
    chunks = []
    texts: dict[int, str] = {}
    thought = ""
    try:
        for chunk in litellm.completion(
            model="openai/fixture", messages=asked, stream_options={"include_usage": True}, **told
        ):
            chunks.append(chunk)
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
                thought += getattr(choice.delta, "reasoning_content", None) or ""
    finally:
        found["text"] = [text for _, text in sorted(texts.items())]
    found["reasoning"] = thought
    whole = litellm.stream_chunk_builder(chunks, messages=asked)
    calls = whole.choices[0].message.tool_calls or ()
    found["calls"] = [[call.function.name, json.loads(call.function.arguments)] for call in calls]
    found["finish"] = [choice.finish_reason for choice in whole.choices]
    if any(getattr(chunk, "usage", None) for chunk in chunks):
        found["usage"] = [whole.usage.prompt_tokens, whole.usage.completion_tokens]


def completions(told: dict, found: dict) -> None:
    for chunk in litellm.text_completion(model="text-completion-openai/fixture", prompt="x", **told):
        for choice in chunk.choices:
            found["text"][0] += choice.text or ""
            if choice.finish_reason:
                found["finish"] = [choice.finish_reason]


def responses(told: dict, found: dict) -> None:
    end = None
    for event in litellm.responses(model="openai/answers", input="x", **told):
        kind = str(getattr(event.type, "value", event.type))
        if kind == "response.output_text.delta":
            found["text"][0] += event.delta
        end = (kind, event)
    kind, event = end
    found["finish"] = [kind.removeprefix("response.")]
    found["error"] = kind == "response.failed" and "layers 10:20" in str(event.response.error)
    items = [item if isinstance(item, dict) else item.model_dump() for item in event.response.output]
    calls = [item for item in items if item["type"] == "function_call"]
    found["calls"] = [[call["name"], json.loads(call["arguments"])] for call in calls]
    usage = event.response.usage
    found["usage"] = usage and [usage.input_tokens, usage.output_tokens]


if __name__ == "__main__":
    sys.exit(main())
