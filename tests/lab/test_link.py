"""The lab's own instruments, before anything is concluded from them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.lab.lab import Host, Lab

pytestmark = pytest.mark.netns
BUSY_MS = 90  # 50 and what a busy machine adds; a second crossing would be 100
ECHO = (sys.executable, "-m", "tests.lab.echo")


def echo_on(lab: Lab, host: Host) -> None:
    process = lab.spawn(host, [*ECHO, "serve", "7000"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"


def rtt_ms(lab: Lab, host: Host, target: Host) -> float:
    return float(lab.run(host, *ECHO, "ask", target.ip, "7000", "20"))


def test_two_hosts_are_fifty_milliseconds_apart_through_nat_as_well(lab: Lab) -> None:
    server, client = lab.public_host("s", "5.1.0.10"), lab.public_host("c", "6.1.0.10")
    inside = lab.behind(lab.nat("n", "7.1.0.10"), "i", "192.168.1.10")
    echo_on(lab, server)
    assert 50 <= rtt_ms(lab, client, server) < BUSY_MS
    assert 50 <= rtt_ms(lab, inside, server) < BUSY_MS


def test_nothing_new_comes_in_through_nat_and_a_cut_is_silent(lab: Lab) -> None:
    server = lab.public_host("t", "15.1.0.10")
    box = lab.nat("m", "17.1.0.10")
    inside = lab.behind(box, "j", "192.168.1.10")
    echo_on(lab, server)
    echo_on(lab, inside)
    with pytest.raises(subprocess.CalledProcessError):
        lab.run(server, "timeout", "3", *ECHO, "ask", box.ip, "7000", "1")
    lab.cut(box)
    with pytest.raises(subprocess.CalledProcessError) as cut:
        lab.run(inside, "timeout", "3", *ECHO, "ask", server.ip, "7000", "1")
    assert cut.value.returncode == 124, "it should hang, not be refused"
    lab.mend(box)
    assert rtt_ms(lab, inside, server) < BUSY_MS
