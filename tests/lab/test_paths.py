"""Paths that jitter, lose packets or are slow: nothing is given up for it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.model import WholeAnswers
from tests.lab.lab import Lab
from tests.lab.swarm import LabSwarm
from tests.lab.tun_link import LinkShape

pytestmark = pytest.mark.netns
PROMPT = "quick the fox"
TOKENS = 8
FLAPPING_S = float(os.environ.get("FLAPPING_S", "300"))
FETCH = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).read().decode())"
# The link to each machine, so two of them are on every path between two.
FLAPPING = LinkShape(delay_s=0.01, jitter_s=0.15, loss=0.005)


@pytest.mark.timeout(720)
def test_five_minutes_of_jitter_and_loss_withdraw_no_node_and_lose_no_request(
    lab: Lab,
    tmp_path: Path,
    model: Path,
    whole: WholeAnswers,
    figure: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    swarm = LabSwarm(lab, tmp_path)
    sentinel = swarm.sentinel(lab.public_host("s1", "5.1.0.10", FLAPPING))
    nodes = [
        swarm.node(lab.public_host("a", "6.1.0.10", FLAPPING), model, "1:4"),
        swarm.node(lab.public_host("b", "7.1.0.10", FLAPPING), model, "4:7"),
    ]
    home = lab.public_host("g", "8.1.0.10", FLAPPING)
    gateway = swarm.gateway(home, model)
    swarm.wait_ready(sentinel, *nodes, gateway)
    swarm.ask(gateway, PROMPT, num_tokens=TOKENS)  # from here on there is a whole route
    asking = swarm.asking(gateway, PROMPT, num_tokens=TOKENS, for_s=FLAPPING_S)
    began, missing = time.monotonic(), []
    while time.monotonic() - began < FLAPPING_S:
        time.sleep(5)
        listed = json.loads(
            lab.run(home, sys.executable, "-c", FETCH, f"{gateway.process.ready['url']}/models")
        )
        missing += listed["data"][0]["missing_layers"]
        with capsys.disabled():
            print(f"\r  {time.monotonic() - began:.0f} of {FLAPPING_S:g} s ", end="", flush=True)
    told = swarm.answers(asking)
    assert told["failed"] == []
    assert {answer["text"] for answer in told["answers"]} == {whole.greedy(PROMPT, TOKENS)}
    assert missing == [], "a node was withdrawn"
    assert len(told["answers"]) > FLAPPING_S / 30
    longest = max(answer["longest_s"] for answer in told["answers"])
    figure(
        f"{FLAPPING_S:g} s of jitter and loss: {len(told['answers'])} answers, longest silence {longest:.2f} s"
    )
