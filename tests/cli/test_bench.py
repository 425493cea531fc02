"""`bench`: conditions, medians with quartiles, and nothing invented."""

from __future__ import annotations

import json

from cli.bench import Quartiles, prompt_of
from tests.cli.conftest import Diffuse, FakeGateway


def test_a_report_holds_conditions_and_quartiles(diffuse: Diffuse, gateway: FakeGateway) -> None:
    first = {"timings": {"prefill_s": 0.1, "tokens": 1, "compute_s": 0.05, "network_s": 0.002}}
    told = {"prefill_s": 0.1, "decode_s": 0.03, "tokens": 3, "compute_s": 0.09, "network_s": 0.006}
    gateway.says("a", "b", "c", first=first, timings=told)
    options = ["--repeats", "3", "--concurrency", "2", "--generate", "3", "--prompt-tokens", "8", "--json"]
    result = diffuse("bench", "--url", gateway.url, *options)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["conditions"]["generated_tokens"] == [3]
    assert report["conditions"]["concurrency"] == 2
    assert report["token_ms"] == {"q1": 15.0, "median": 15.0, "q3": 15.0}
    assert report["compute_ms"]["median"] == 20.0  # of the tokens behind the first
    assert report["first_token_s"]["q1"] <= report["first_token_s"]["median"] <= report["first_token_s"]["q3"]
    assert "crypto_ms" not in report  # the gateway did not tell
    assert len(gateway.requests) == 8  # one round to warm up, three measured, two answers each


def test_every_prompt_is_new_and_greedy(diffuse: Diffuse, gateway: FakeGateway) -> None:
    gateway.says("a", "b")
    diffuse("bench", "--url", gateway.url, "--repeats", "2", "--prompt-tokens", "8", "--generate", "2")
    prompts = [request["messages"][0]["content"] for request in gateway.requests]
    assert len(set(prompts)) == 3
    assert all(request["temperature"] == 0 and request["ignore_eos"] for request in gateway.requests)


def test_people_get_a_table(diffuse: Diffuse, gateway: FakeGateway) -> None:
    gateway.says("a", "b")
    result = diffuse("bench", "--url", gateway.url, "--repeats", "1")
    assert "total_tokens_per_s" in result.stdout
    assert gateway.url in result.stdout


def test_quartiles_of_one_value_are_that_value() -> None:
    assert Quartiles.of([2.0]) == Quartiles(2.0, 2.0, 2.0)
    assert Quartiles.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Quartiles(2.0, 3.0, 4.0)


def test_a_prompt_has_as_many_words_as_wanted() -> None:
    assert len(prompt_of(64, seed=1).split()) == 64
    assert prompt_of(64, seed=1) != prompt_of(64, seed=2)
