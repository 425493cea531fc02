"""A bulky prompt of one session beside another's small steps, through one sentinel, over lines of 50 Mbit/s."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.model import write_model
from tests.lab.lab import Lab
from tests.lab.swarm import LabSwarm, Running
from tests.lab.tun_link import LinkShape

pytestmark = [pytest.mark.netns, pytest.mark.timeout(420)]
LINE = LinkShape(delay_s=0.0125, rate_bps=50e6 / 8)
HIDDEN_SIZE = 512  # of float32: 512 tokens, one step, are 1 MB
PROMPT_TOKENS = 512
TOKENS = 16
BULK_S = 60.0
ROUNDS = 6  # the best of them counts: what else this machine does only adds


def token_ms(swarm: LabSwarm, gateway: Running) -> float:
    """How long a token of a small session takes."""
    told = swarm.ask(gateway, *["hello"] * ROUNDS, num_tokens=TOKENS)
    assert told["failed"] == []
    return min(statistics.median(answer["gaps_s"]) for answer in told["answers"]) * 1000


def test_a_bulky_prompt_does_not_delay_anothers_tokens_more_than_twofold(
    lab: Lab, tmp_path: Path, figure: Callable[[str], None]
) -> None:
    model = write_model(tmp_path / "wide", hidden_size=HIDDEN_SIZE, num_layers=2, max_positions=1024)
    swarm = LabSwarm(lab, tmp_path)
    sentinel = swarm.sentinel(lab.public_host("s", "5.1.0.10", LINE))
    node = swarm.node(lab.behind(lab.nat("n1", "6.1.0.10", LINE), "h1", "192.168.1.10"), model, "1:2")
    home = lab.behind(lab.nat("n2", "7.1.0.10", LINE), "h2", "192.168.1.10")
    gateway = swarm.gateway(home, model)
    swarm.wait_ready(sentinel, node, gateway)
    bulky = "x" * PROMPT_TOKENS
    swarm.ask(gateway, "hello", bulky, num_tokens=2)
    idle_ms = token_ms(swarm, gateway)
    (bulk_alone,) = swarm.ask(gateway, bulky, num_tokens=1)["answers"]
    asking = swarm.asking(gateway, bulky, num_tokens=1, for_s=BULK_S)
    busy_ms = token_ms(swarm, gateway)
    assert asking.poll() is None, "the bulk was over before the tokens were"
    bulk = swarm.answers(asking)
    assert bulk["failed"] == []
    figure(f"1 MB prompt alone: {bulk_alone['total_s'] * 1000:.0f} ms")
    figure(f"token beside such, one after the other: {busy_ms:.0f} ms, alone {idle_ms:.0f} ms")
    assert busy_ms <= 2 * idle_ms
