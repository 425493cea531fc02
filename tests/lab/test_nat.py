"""Nodes and a gateway behind NAT boxes with equal private networks; sentinels in the open."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.chaos.model import WholeAnswers
from tests.lab.lab import Host, Lab
from tests.lab.swarm import LabSwarm, Running

pytestmark = [pytest.mark.netns, pytest.mark.timeout(300)]
PROMPT = "hello the world"
TOKENS = 12


class Net:
    """Two sentinels in different networks, a node and a gateway behind a NAT each, a node in the open."""

    def __init__(self, lab: Lab, folder: Path, model: Path) -> None:
        self.lab = lab
        self.swarm = LabSwarm(lab, folder)
        self.sentinels = [
            self.swarm.sentinel(lab.public_host("s1", "5.1.0.10")),
            self.swarm.sentinel(lab.public_host("s2", "6.1.0.10")),
        ]
        self.node_box, self.home_box = lab.nat("n1", "7.1.0.10"), lab.nat("n2", "8.1.0.10")
        self.hidden = self.swarm.node(lab.behind(self.node_box, "h1", "192.168.1.10"), model, "1:4")
        self.open = self.swarm.node(lab.public_host("o", "9.1.0.10"), model, "4:7")
        self.home: Host = lab.behind(self.home_box, "h2", "192.168.1.10")
        self.gateway: Running = self.swarm.gateway(self.home, model)

    def check(self, whole: WholeAnswers, times: int = 1) -> None:
        told = self.swarm.ask(self.gateway, PROMPT, num_tokens=TOKENS, times=times)
        assert told["failed"] == []
        assert [answer["text"] for answer in told["answers"]] == [whole.greedy(PROMPT, TOKENS)] * times


@pytest.fixture
def net(lab: Lab, tmp_path: Path, model: Path) -> Net:
    return Net(lab, tmp_path, model)


def test_a_node_and_a_gateway_behind_equal_nats_answer_as_the_whole_model(
    net: Net, whole: WholeAnswers
) -> None:
    net.check(whole)
    told = net.swarm.status(net.home)
    paths = {node["path"] for node in told["nodes"] if "node" in node["roles"]}
    contacts = [contact for node in told["nodes"] for contact in node["contacts"]]
    assert paths == {"direct", "relayed"}
    assert not any("192.168." in contact or "0.0.0.0" in contact for contact in contacts)


def test_a_sentinel_that_dies_costs_no_answer_and_five_seconds_at_most(net: Net, whole: WholeAnswers) -> None:
    net.check(whole)
    asking = net.swarm.asking(net.gateway, PROMPT, num_tokens=TOKENS, for_s=25)
    time.sleep(4)
    net.sentinels[0].process.kill()
    time.sleep(10)
    net.swarm.again(net.sentinels[0])
    told = net.swarm.answers(asking)
    assert told["failed"] == []
    assert {answer["text"] for answer in told["answers"]} == {whole.greedy(PROMPT, TOKENS)}
    assert max(answer["longest_s"] for answer in told["answers"]) < 5


def test_a_nat_box_that_forgets_or_goes_silent_costs_no_answer(net: Net, whole: WholeAnswers) -> None:
    net.check(whole)
    asking = net.swarm.asking(net.gateway, PROMPT, num_tokens=TOKENS, for_s=40)
    time.sleep(3)
    net.lab.flush(net.node_box)
    time.sleep(6)
    net.lab.cut(net.home_box)
    time.sleep(3)
    net.lab.mend(net.home_box)
    time.sleep(8)
    net.lab.flush(net.home_box)
    told = net.swarm.answers(asking)
    assert told["failed"] == []
    assert {answer["text"] for answer in told["answers"]} == {whole.greedy(PROMPT, TOKENS)}


def test_a_node_that_is_killed_behind_its_nat_is_back_after_its_restart(
    net: Net, whole: WholeAnswers
) -> None:
    net.check(whole)
    net.hidden.process.send_signal(signal.SIGKILL)
    refused = net.swarm.ask(net.gateway, PROMPT, num_tokens=2)
    assert "1:4" in refused["failed"][0]
    net.swarm.again(net.hidden)
    limit = time.monotonic() + 15
    while net.swarm.ask(net.gateway, PROMPT, num_tokens=2)["failed"]:
        assert time.monotonic() < limit, "the restarted node is not found"
    net.check(whole)
