"""The monitoring files against promtool, and a Prometheus that scrapes a swarm at work and under fire."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from openai import APIStatusError

from tests.chaos.model import write_model
from tests.deploy.files import DEPLOY, alerts, boards
from tests.deploy.prometheus import STEP_S, Prometheus, need, scraping
from tests.support.processes import Process, Processes, client_of, until

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
# What has no value until something goes wrong; the others must have one.
AFTER_A_FAULT = ("How long an answer stood still",)
# Told of what goes on for a moment now and then, whatever is wrong or not.
PASSING = {"DiffuseNodesSuspected"}


def promtool(*arguments: str | Path) -> None:
    need("promtool")
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_the_configuration(tmp_path: Path) -> None:
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    (tmp_path / "api_key").write_text("key")
    (tmp_path / "prometheus.yml").write_text(text.replace("/tmp/api_key", str(tmp_path / "api_key")))
    (tmp_path / "alerts.yml").write_text((DEPLOY / "prometheus" / "alerts.yml").read_text())
    promtool("check", "config", tmp_path / "prometheus.yml")
    promtool("check", "rules", tmp_path / "alerts.yml")


def test_every_alert_fires_at_its_fault_and_is_silent_before(tmp_path: Path) -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            del rule["annotations"]  # else each expectation would repeat them
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(rules))
    (tmp_path / "alerts_test.yml").write_text((HERE / "alerts_test.yml").read_text())
    promtool("test", "rules", tmp_path / "alerts_test.yml")


@dataclass
class Swarm:
    """A sentinel, three nodes and a gateway, and the Prometheus that scrapes them."""

    sentinel: Process
    nodes: list[Process]
    gateway: Process
    prometheus: Prometheus

    def work(self) -> None:
        """A little of everything that panels show."""
        client = client_of(self.gateway)
        for number in range(3):
            question: Any = [{"role": "user", "content": f"hello quick brown fox {number}"}]
            list(client.chat.completions.create(model="tiny", messages=question, max_tokens=24, stream=True))
        client.images.generate(
            model="tiny-pictures", prompt="a red circle", extra_body={"seed": 7, "steps": 4}
        )
        with contextlib.suppress(APIStatusError):
            client.chat.completions.create(model="none", messages=question)
        stream = client.chat.completions.create(model="tiny", messages=question, max_tokens=200, stream=True)
        next(iter(stream))
        stream.close()  # the client leaves


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    need("prometheus")
    folder = tmp_path_factory.mktemp("monitored")
    model = write_model(folder / "tiny")
    metrics = ("--metrics", "127.0.0.1:0")
    with Processes() as processes:
        sentinel = processes.sentinel(*metrics)
        nodes = processes.hosts(str(model), "1:4", "4:7", flags=metrics, bootstraps=[sentinel])
        nodes.append(processes.start_host("tiny-pictures", "", *metrics, bootstraps=[sentinel]))
        gateway = processes.serve(
            "", [], "--model", str(model), "--model", "tiny-pictures", bootstraps=[sentinel]
        )
        targets = {
            "diffuse-gateway": [urlsplit(gateway.ready["url"]).netloc],
            "diffuse-node": [_place(node) for node in nodes],
            "diffuse-sentinel": [_place(sentinel)],
        }
        until(lambda: _is_ready(gateway))
        with scraping(folder / "prometheus", targets) as prometheus:
            swarm = Swarm(sentinel, nodes, gateway, prometheus)
            prometheus.until(lambda it: list(it.targets().values()) == ["up"] * 5, "all targets are up")
            swarm.work()
            stranger = processes.run("status", "--bootstrap", sentinel.address, "--network", "another")
            assert stranger.returncode, "another network's member is let in"
            time.sleep(3 * STEP_S)  # a rate sees an increase only from what was scraped before
            swarm.work()
            yield swarm


def test_every_panel_has_data_and_no_alert_fires_in_a_swarm_that_works(swarm: Swarm) -> None:
    asked = [
        (f"{name}: {panel['title']}", target["expr"])
        for name, board in boards().items()
        for panel in board["panels"]
        for target in panel.get("targets", ())
    ]
    assert len(asked) > 60
    lacking = dict.fromkeys(where + ": " + query for where, query in asked)

    def all_have_some(prometheus: Prometheus) -> bool:
        for where, query in asked:
            if _has_a_value(prometheus, query, may_be_none=where.endswith(AFTER_A_FAULT)):
                lacking.pop(f"{where}: {query}", None)
        return not lacking

    try:
        swarm.prometheus.until(all_have_some, "panels lack data", 20)
    except AssertionError as error:
        raise AssertionError("\n".join(lacking)) from error
    for board in boards().values():
        for choice in board["templating"]["list"]:
            if choice["type"] == "query":
                label = choice["definition"].removeprefix("label_values(").removesuffix(")").rpartition(",")
                assert swarm.prometheus.query(f"count by ({label[2].strip()}) ({label[0]})"), choice[
                    "definition"
                ]
    failed = "sum(diffuse_sentinel_handshakes_failed_total) > 0"
    swarm.prometheus.until(lambda it: it.query(failed), "the stranger is counted")
    assert swarm.prometheus.firing() <= PASSING


def test_every_page_is_as_promtool_wants_it(swarm: Swarm) -> None:
    need("promtool")
    for process in (swarm.sentinel, *swarm.nodes):
        page = _get(process.wait_event("metrics")["url"])
        done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()


def test_what_is_scraped_tells_no_text_and_no_other_id(swarm: Swarm) -> None:
    ids = {process.address.partition("@")[0][:8] for process in (swarm.sentinel, *swarm.nodes)}
    for process in (swarm.sentinel, *swarm.nodes):
        page = _get(process.wait_event("metrics")["url"]).decode()
        others = ids - {process.address.partition("@")[0][:8]}
        assert not [other for other in others if other in page]
        assert "quick" not in page


def test_a_death_fires_its_alerts(swarm: Swarm) -> None:
    """Last of this file: a node dies, then the sentinel, then the gateway."""
    prometheus = swarm.prometheus
    swarm.nodes[0].kill()
    lost = {"DiffuseTargetDown", "DiffuseNodeLost", "DiffuseModelNotReady", "DiffuseLayersMissing"}
    prometheus.until(lambda it: lost <= it.firing(), f"a node's death fires {lost}", 120)
    with contextlib.suppress(APIStatusError):
        question: Any = [{"role": "user", "content": "hello"}]
        client_of(swarm.gateway).chat.completions.create(model="tiny", messages=question)
    swarm.sentinel.kill()
    prometheus.until(lambda it: "DiffuseNoSentinel" in it.firing(), "the sentinel's death fires")
    swarm.gateway.kill()
    prometheus.until(lambda it: "DiffuseNoGateway" in it.firing(), "the gateway's death fires")
    assert prometheus.firing() <= set(alerts())


def _has_a_value(prometheus: Prometheus, query: str, *, may_be_none: bool) -> bool:
    """Whether a panel would show something: a number, or where `may_be_none` at least a line without any."""
    for name, value in {"$instance": ".*", "$model": ".*", "$__rate_interval": "1m"}.items():
        query = query.replace(name, value)
    values = [float(one["value"][1]) for one in prometheus.query(query)]
    return bool(values) and (may_be_none or not all(map(math.isnan, values)))


def _place(process: Process) -> str:
    return urlsplit(process.wait_event("metrics")["url"]).netloc


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as response:
        body: bytes = response.read()
    return body


def _is_ready(gateway: Process) -> bool:
    url = gateway.ready["url"].removesuffix("/v1")
    try:
        return json.loads(_get(f"{url}/ready"))["status"] == "ready"
    except OSError:
        return False
