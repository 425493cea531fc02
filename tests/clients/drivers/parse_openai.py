"""What openai-python reads of recorded streams: one JSON line for each. `REPLAY` is where they are served."""

from __future__ import annotations

import json
import os
import sys

import openai

SCENARIOS = json.loads(os.environ["SCENARIOS"])  # name: kind


def main() -> None:
    for name, kind in SCENARIOS.items():
        url = f"{os.environ['REPLAY']}/{name.replace(' ', '-')}/v1"
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        read = {"chat": chat, "completions": completions, "responses": responses}[kind]
        found = {"text": [""], "error": False}
        try:
            read(client, found)
        except openai.APIError as error:
            found["error"] = "layers 10:20" in str(error)
        except Exception as error:  # told, and then unequal
            found["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps({"scenario": name, "reading": found}), flush=True)


def chat(client: openai.OpenAI, found: dict) -> None:
    """By the helper, and its text also by the loop that everybody writes."""
    asked = {"model": "fixture", "messages": [{"role": "user", "content": "x"}]}
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    thought = told = ""
    try:
        for chunk in client.chat.completions.create(stream=True, **asked):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
                thought += (choice.delta.model_extra or {}).get("reasoning_content") or ""
                for token in (choice.logprobs.content or ()) if choice.logprobs else ():
                    told += bytes(token.bytes).hex()
            if chunk.usage:
                found["usage"] = [chunk.usage.prompt_tokens, chunk.usage.completion_tokens]
    finally:
        found["text"] = [text for _, text in sorted(texts.items())]
    found["reasoning"], found["logprobs"] = thought, bytes.fromhex(told).decode()
    found["finish"] = [reason for _, reason in sorted(reasons.items())]
    if "length" in found["finish"]:
        return  # the helper takes a cut answer for an error, by its own design
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()
    same = [choice.message.content or "" for choice in final.choices]
    assert same == found["text"], f"the helper reads {same}"
    calls = [call for choice in final.choices for call in choice.message.tool_calls or ()]
    found["calls"] = [[call.function.name, json.loads(call.function.arguments)] for call in calls]
    assert [choice.finish_reason for choice in final.choices] == found["finish"]
    found["usage"] = final.usage and [final.usage.prompt_tokens, final.usage.completion_tokens]


def completions(client: openai.OpenAI, found: dict) -> None:
    for chunk in client.completions.create(model="fixture", prompt="x", stream=True):
        for choice in chunk.choices:
            found["text"][choice.index] += choice.text
            if choice.finish_reason:
                found["finish"] = [choice.finish_reason]
        if chunk.usage:
            found["usage"] = [chunk.usage.prompt_tokens, chunk.usage.completion_tokens]


def responses(client: openai.OpenAI, found: dict) -> None:
    end = None
    for event in client.responses.create(model="fixture", input="x", stream=True):
        if event.type == "response.output_text.delta":
            found["text"][0] += event.delta
        end = event
    found["finish"] = [end.type.removeprefix("response.")]
    found["error"] = end.type == "response.failed" and "layers 10:20" in end.response.error.message
    calls = [item for item in end.response.output if item.type == "function_call"]
    found["calls"] = [[call.name, json.loads(call.arguments)] for call in calls]
    usage = end.response.usage
    found["usage"] = usage and [usage.input_tokens, usage.output_tokens]
    if end.type == "response.completed":
        with client.responses.stream(model="fixture", input="x") as stream:
            assert stream.get_final_response().output_text == found["text"][0]


if __name__ == "__main__":
    sys.exit(main())
