"""Nodes and a gateway behind NAT boxes with equal private networks; sentinels in the open.

The tests share one swarm and leave it whole; the last one makes the hidden node reachable.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.model import WholeAnswers
from tests.lab.lab import Lab
from tests.lab.swarm import NODE_PORT, LabSwarm, Running

pytestmark = [pytest.mark.netns, pytest.mark.timeout(420)]
PROMPT = "hello the world"
TOKENS = 12
RTT_S = 0.05
LINK_DEAD_S = 10.0  # of silence, after which a link is given up
Figure = Callable[[str], None]


class Net:
    """Two sentinels in different networks, a node and a gateway behind a NAT each, a node in the open."""

    def __init__(self, lab: Lab, folder: Path, model: Path, whole: WholeAnswers) -> None:
        self.lab, self.model = lab, model
        self.text = whole.greedy(PROMPT, TOKENS)
        self.swarm = swarm = LabSwarm(lab, folder)
        self.towers = [lab.public_host("s1", "5.1.0.10"), lab.public_host("s2", "6.1.0.10")]
        self.sentinels = [swarm.sentinel(tower) for tower in self.towers]
        self.node_box, self.home_box = lab.nat("n1", "7.1.0.10"), lab.nat("n2", "8.1.0.10")
        self.inside = lab.behind(self.node_box, "h1", "192.168.1.10")
        self.home = lab.behind(self.home_box, "h2", "192.168.1.10")
        self.hidden = swarm.node(self.inside, model, "1:4")
        self.open = swarm.node(lab.public_host("o", "9.1.0.10"), model, "4:7")
        self.gateway = swarm.gateway(self.home, model)
        swarm.wait_ready(*self.sentinels, self.hidden, self.open, self.gateway)

    def check(self) -> list[dict[str, Any]]:
        """Everything answers, as the whole model does."""
        return self.judge(self.swarm.ask(self.gateway, PROMPT, num_tokens=TOKENS))

    def judge(self, told: dict[str, Any]) -> list[dict[str, Any]]:
        assert told["failed"] == []
        assert {answer["text"] for answer in told["answers"]} == {self.text}
        return list(told["answers"])

    def asking(self, for_s: float) -> Any:
        return self.swarm.asking(self.gateway, PROMPT, num_tokens=TOKENS, for_s=for_s)

    def hidden_node(self) -> dict[str, Any]:
        """What an onlooker at home is told of the hidden node."""
        nodes = self.swarm.status(self.home)["nodes"]
        (node,) = [node for node in nodes if any(it["layers"] == [1, 4] for it in node["slices"])]
        return dict(node)

    def recover(self) -> None:
        """Wait until both sentinels can be used again: what comes next hurts one, and not both."""
        limit = time.monotonic() + 90
        while len(self.hidden_node()["contacts"]) < 2:
            assert time.monotonic() < limit, "the hidden node has no place at one of the sentinels"
            time.sleep(1)
        time.sleep(LINK_DEAD_S)  # until then others may wait for links that fell silent


@pytest.fixture(scope="module")
def net(lab: Lab, tmp_path_factory: pytest.TempPathFactory, model: Path, whole: WholeAnswers) -> Net:
    return Net(lab, tmp_path_factory.mktemp("nat"), model, whole)


def longest(answers: list[dict[str, Any]]) -> float:
    """The longest silence of any answer, before its first token too."""
    return max(answer["longest_s"] for answer in answers)


def typical_gap(answers: list[dict[str, Any]]) -> float:
    return statistics.median(gap for answer in answers for gap in answer["gaps_s"])


def test_a_node_and_a_gateway_behind_equal_nats_answer_as_the_whole_model(net: Net) -> None:
    net.check()
    told = net.swarm.status(net.home)
    paths = {node["path"] for node in told["nodes"] if "node" in node["roles"]}
    contacts = [contact for node in told["nodes"] for contact in node["contacts"]]
    assert paths == {"direct", "relayed"}
    assert not any("192.168." in contact or "0.0.0.0" in contact for contact in contacts)


def test_a_sentinel_that_is_killed_costs_no_answer_and_five_seconds_at_most(net: Net, figure: Figure) -> None:
    for index, sentinel in enumerate(net.sentinels):
        net.check()
        asking = net.asking(for_s=6)
        time.sleep(2)
        sentinel.kill()
        told = net.swarm.answers(asking)
        net.sentinels[index] = net.swarm.again(sentinel)
        net.swarm.wait_ready(net.sentinels[index])
        net.recover()
        answers = net.judge(told)
        figure(f"sentinel {index + 1} of 2 killed: longest silence {longest(answers):.2f} s")
        assert longest(answers) < 5


def test_a_sentinel_that_falls_silent_costs_no_answer(net: Net, figure: Figure) -> None:
    for number, tower in enumerate(net.towers, 1):
        net.check()
        asking = net.asking(for_s=8)
        time.sleep(2)
        net.lab.silence(tower)
        told = net.swarm.answers(asking)
        net.lab.hear(tower)
        net.recover()
        answers = net.judge(told)
        figure(f"sentinel {number} of 2 silent: longest silence {longest(answers):.2f} s")
        assert longest(answers) < 5


def test_a_nat_box_that_forgets_or_goes_silent_costs_no_answer(net: Net, figure: Figure) -> None:
    net.check()
    asking = net.asking(for_s=25)
    time.sleep(2)
    net.lab.flush(net.node_box)
    time.sleep(6)
    net.lab.cut(net.home_box)
    time.sleep(3)
    net.lab.mend(net.home_box)
    time.sleep(6)
    net.lab.flush(net.home_box)
    answers = net.judge(net.swarm.answers(asking))
    figure(f"NAT boxes flushed, and one silent for 3 s: longest silence {longest(answers):.2f} s")


def test_a_node_that_is_killed_behind_its_nat_is_back_after_its_restart(net: Net) -> None:
    net.check()
    net.hidden.kill()
    refused = net.swarm.ask(net.gateway, PROMPT, num_tokens=2, wait_s=0)
    assert "1:4" in refused["failed"][0]
    net.hidden = net.swarm.again(net.hidden)
    net.swarm.wait_ready(net.hidden)
    net.check()


def told_of_two(net: Net, twin: Running) -> dict[str, bool]:
    """Who should say that a key is used twice, and whether it did."""
    return {
        "the older one": "are two nodes running with one key?" in net.hidden.said(),
        "sentinels": all("or two nodes use one key" in sentinel.said() for sentinel in net.sentinels),
        "one of the two": "another process announces itself with our key" in net.hidden.said() + twin.said(),
    }


def test_of_two_nodes_with_one_key_the_newer_is_used_and_the_older_again_when_it_leaves(net: Net) -> None:
    net.check()
    third = net.lab.behind(net.lab.nat("n3", "11.1.0.10"), "h3", "192.168.1.10")
    twin = net.swarm.node(third, net.model, "1:4", key=net.hidden.log.parent / "key")
    net.swarm.wait_ready(twin)
    limit = time.monotonic() + 60
    while untold := [what for what, has_said in told_of_two(net, twin).items() if not has_said]:
        assert time.monotonic() < limit, f"nobody says so: {untold}"
        time.sleep(1)
    net.check()
    twin.kill()
    net.check()


def test_a_hidden_node_that_becomes_reachable_is_reached_directly(net: Net, figure: Figure) -> None:
    relayed = min(typical_gap(net.check()) for _ in range(3))
    assert net.hidden_node()["path"] == "relayed"
    net.lab.forward(net.node_box, net.inside, NODE_PORT)
    limit = time.monotonic() + 60
    while (node := net.hidden_node())["path"] != "direct":
        assert time.monotonic() < limit, f"not announced: {node['contacts']}"
        time.sleep(1)
    took_s = 60 - (limit - time.monotonic())
    direct = relayed
    while direct > relayed - RTT_S / 4:
        assert time.monotonic() < limit + 40, "the gateway stays with the sentinel"
        direct = typical_gap(net.check())
    figure(f"a port is forwarded: announced after {took_s:.0f} s")
    figure(f"time per token: {relayed * 1000:.0f} ms through a sentinel, {direct * 1000:.0f} ms directly")
    assert relayed - direct < RTT_S + 0.001 + 0.01  # what a busy machine adds
