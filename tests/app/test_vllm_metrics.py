"""With --vllm-metrics a board made for vLLM shows this gateway."""

from __future__ import annotations

import pytest

from tests.app.conftest import Serve
from tests.support.api_server import Served

# What vLLM's own dashboard asks for.
NAMES = {
    "e2e_request_latency_seconds_bucket", "inter_token_latency_seconds_bucket",
    "prompt_tokens_total", "generation_tokens_total", "num_requests_running", "num_requests_waiting",
    "kv_cache_usage_perc", "time_to_first_token_seconds_bucket",
    "request_prompt_tokens_bucket", "request_generation_tokens_bucket", "request_success_total",
    "request_queue_time_seconds_sum", "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum",
}  # fmt: skip


def value(served: Served, name: str, **labels: str) -> float | None:
    return served.metrics.registry.get_sample_value(f"vllm:{name}", {"model_name": "scripted"} | labels)


async def test_without_the_setting_nothing_is_named_so(served: Served) -> None:
    await served.ask()
    assert "vllm:" not in (await served.http.get("/metrics")).text


async def test_every_name_is_there_before_the_first_request(serve: Serve) -> None:
    async with serve(vllm_metrics=True) as served:
        text = (await served.http.get("/metrics")).text
    there = {line.partition("{")[0].removeprefix("vllm:") for line in text.splitlines()}
    assert there >= NAMES


async def test_they_say_what_our_own_say(serve: Serve) -> None:
    async with serve(vllm_metrics=True) as served:
        await served.ask(max_tokens=3)
        await served.stream()
        await served.http.post(
            "/v1/completions", json={"model": "scripted", "prompt": "hello", "max_tokens": 3}
        )
        tokens = served.metric("diffuse_generated_tokens_total", model="scripted")
        assert value(served, "generation_tokens_total") == tokens > 6
        assert value(served, "request_success_total", finished_reason="length") == 2  # of two endpoints
        assert value(served, "request_success_total", finished_reason="stop") == 1
        assert value(served, "time_to_first_token_seconds_count") == 1
        assert value(served, "e2e_request_latency_seconds_count") == 3
        assert value(served, "request_generation_tokens_sum") == tokens
        assert value(served, "request_queue_time_seconds_count") == 3
        assert value(served, "num_requests_running") == 0


@pytest.mark.parametrize("most", ["+Inf", "640.0"])
async def test_buckets_are_summed_like_counts(serve: Serve, most: str) -> None:
    async with serve(vllm_metrics=True) as served:
        await served.ask()
        await served.http.post("/v1/completions", json={"model": "scripted", "prompt": "hello"})
        assert value(served, "e2e_request_latency_seconds_bucket", le=most) == 2
