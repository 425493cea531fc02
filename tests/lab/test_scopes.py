"""Private addresses: what a LAN lives on, and what an open public swarm neither says nor takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.model import WholeAnswers
from tests.lab.lab import Lab
from tests.lab.swarm import NODE_PORT, LabSwarm

pytestmark = [pytest.mark.netns, pytest.mark.timeout(420)]
PROMPT = "quick the fox"
TOKENS = 8


def test_a_lan_answers_over_addresses_that_a_public_swarm_refuses(
    lab: Lab, tmp_path: Path, model: Path, whole: WholeAnswers
) -> None:
    swarm = LabSwarm(lab, tmp_path, scope="lan")
    public = replace(swarm, scope="public")  # shares the bootstraps
    sentinel = swarm.sentinel(lab.public_host("s", "10.0.0.10"))
    near, far, home = (
        lab.public_host(*place) for place in (("a", "172.16.0.10"), ("b", "192.168.7.10"), ("g", "10.9.0.10"))
    )
    nodes = [swarm.node(near, model, "1:4"), swarm.node(far, model, "4:7")]
    gateway = swarm.gateway(home, model)
    swarm.wait_ready(sentinel, *nodes, gateway)
    told = swarm.ask(gateway, PROMPT, num_tokens=TOKENS)
    assert told["failed"] == []
    assert told["answers"][0]["text"] == whole.greedy(PROMPT, TOKENS)
    contacts = [contact for node in swarm.status(home)["nodes"] for contact in node["contacts"]]
    assert {contact.rsplit("@")[-1] for contact in contacts} == {
        f"{near.ip}:{NODE_PORT}",
        f"{far.ip}:{NODE_PORT}",
        f"{sentinel.host.ip}:9000",
    }
    seen = public.status(home)
    assert seen["nodes"] == []
    assert seen["faults"]["bad_address"] > 0


def test_an_address_that_nobody_outside_could_dial_is_refused_at_the_start(
    lab: Lab, tmp_path: Path, model: Path
) -> None:
    swarm, liar = LabSwarm(lab, tmp_path), lab.public_host("x", "5.9.0.10")
    listen = ["--listen", f"0.0.0.0:{NODE_PORT}", "--public-addr"]
    for lie in ("0.0.0.0", "169.254.1.1", "127.0.0.1", "192.168.1.10", "10.0.0.1"):
        assert f"the public address {lie}" in swarm.refusal(liar, ["sentinel", *listen, f"{lie}:{NODE_PORT}"])
    anywhere, inside = f"0.0.0.0:{NODE_PORT}", f"192.168.1.10:{NODE_PORT}"
    node = ["host", "--model", str(model), "--layers", "1:2", "--threads", "1"]
    assert "is no address that others can dial" in swarm.refusal(liar, [*node, *listen, anywhere])
    assert "the public address 192.168.1.10" in swarm.refusal(liar, [*node, *listen, inside])
    lan = replace(swarm, scope="lan")
    assert "the public address 0.0.0.0" in lan.refusal(liar, ["sentinel", *listen, anywhere])
