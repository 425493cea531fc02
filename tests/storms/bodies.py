"""Valid JSON bodies of every route, rich in fields."""

from __future__ import annotations

from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA}}
SAID = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
ROUTE = {"max_hops": 4, "avoid": []}

BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"model": "scripted", "messages": SAID, "max_tokens": 4}),
    (
        "/v1/chat/completions",
        {
            "model": "scripted",
            "messages": SAID,
            "stream": True,
            "n": 2,
            "max_completion_tokens": 5,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "stop": ["x", "yz"],
            "seed": 7,
            "logit_bias": {"7": 5, "9": -100},
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "timings_per_token": True,
            "user": "me",
            "metadata": {"a": "b"},
            "service_tier": "auto",
            "diffuse": ROUTE,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": "scripted",
            "max_tokens": 6,
            "logprobs": True,
            "top_logprobs": 3,
            "reasoning_effort": "low",
            "chat_template_kwargs": {"enable_thinking": False},
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
                {"role": "user", "content": "look"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "look", "arguments": '{"a": "b"}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "nothing"},
                {"role": "user", "content": "and?"},
            ],
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": "scripted",
            "messages": SAID,
            "max_tokens": 6,
            "tools": [TOOL],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "stream": True,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": "scripted",
            "messages": SAID,
            "max_tokens": 6,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
            },
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": "scripted",
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
                        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
                    ],
                }
            ],
        },
    ),
    ("/v1/chat/completions/input_tokens", {"model": "scripted", "messages": SAID, "tools": [TOOL]}),
    (
        "/v1/responses",
        {
            "model": "scripted",
            "input": "hello",
            "instructions": "Be brief.",
            "max_output_tokens": 16,
            "store": False,
            "temperature": 1,
            "top_p": 1,
            "metadata": {},
            "truncation": "disabled",
            "text": {"format": {"type": "text"}},
        },
    ),
    (
        "/v1/responses",
        {
            "model": "scripted",
            "stream": True,
            "max_output_tokens": 16,
            "tool_choice": "auto",
            "tools": [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}],
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "reasoning": {"effort": "low"},
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "look"}]},
                {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "nothing"},
                {"role": "user", "content": "and?"},
            ],
        },
    ),
    (
        "/v1/completions",
        {
            "model": "scripted",
            "prompt": ["hello", "world"],
            "max_tokens": 4,
            "n": 2,
            "best_of": 2,
            "echo": True,
            "logprobs": 2,
            "stop": None,
            "seed": 3,
        },
    ),
    (
        "/v1/completions",
        {
            "model": "scripted",
            "prompt": [[5, 6, 7], [8]],
            "max_tokens": 3,
            "stream": True,
            "stream_options": {"include_usage": True},
            "suffix": None,
        },
    ),
    (
        "/tokenize",
        {"model": "scripted", "prompt": "hello", "add_special_tokens": False, "return_token_strs": True},
    ),
    ("/tokenize", {"model": "scripted", "messages": SAID}),
    ("/detokenize", {"model": "scripted", "tokens": [5, 6, 7]}),
    (
        "/v1/embeddings",
        {"model": "librarian", "input": ["hello", "you"], "encoding_format": "base64", "dimensions": 5},
    ),
    (
        "/v1/embeddings",
        {"model": "librarian", "input": [[5, 6], [7]], "encoding_format": "float", "user": "me"},
    ),
    (
        "/v1/images/generations",
        {
            "model": "painter",
            "prompt": "a fox",
            "n": 2,
            "size": "64x48",
            "seed": 5,
            "steps": 2,
            "guidance_scale": 2.5,
            "negative_prompt": "a dog",
            "response_format": "b64_json",
            "output_format": "webp",
            "output_compression": 80,
            "quality": "low",
            "background": "auto",
            "patches": 1,
            "diffuse": ROUTE,
        },
    ),
    (
        "/v1/images/generations",
        {"model": "painter", "prompt": "a fox", "stream": True, "partial_images": 2, "steps": 3},
    ),
    ("/v1/images", {"prompt": "a fox", "size": "auto", "response_format": "url"}),
    ("/v1/images/edits", {"prompt": "a fox"}),
    (
        "/v1/audio/speech",
        {
            "model": "composer",
            "input": "rain",
            "voice": "any",
            "response_format": "wav",
            "speed": 1.0,
            "duration": 0.2,
            "seed": 4,
            "steps": 2,
        },
    ),
    (
        "/v1/audio/speech",
        {"model": "composer", "input": "rain", "stream_format": "sse", "seconds": 0.1, "temperature": 1},
    ),
    (
        "/v1/videos",
        {"model": "filmer", "prompt": "a fox", "seconds": "1", "size": "64x48", "steps": 2, "num_frames": 5},
    ),
    ("/v1/videos/video_1/remix", {"prompt": "a fox"}),
)
