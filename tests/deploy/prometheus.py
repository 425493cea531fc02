"""A real Prometheus on loopback, fed by a real swarm: what it is asked here it would answer Grafana."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.ports import listen_on
from tests.deploy.files import DEPLOY

STEP_S = 1  # of scraping and of rules: fifteen in `deploy/prometheus`
START_S = 30.0


def need(*tools: str) -> None:
    """Skip, with the reason, where a tool is not installed."""
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (`make deploy-check` says how)")


class Prometheus:
    """One that runs."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, text: str) -> list[dict[str, Any]]:
        """What an instant query returns now."""
        return list(self._get("query", query=text)["result"])

    def firing(self) -> set[str]:
        """Alerts that fire now."""
        return {
            alert["labels"]["alertname"]
            for alert in self._get("alerts")["alerts"]
            if alert["state"] == "firing"
        }

    def targets(self) -> dict[str, str]:
        """Health of every target, by its URL."""
        return {target["scrapeUrl"]: target["health"] for target in self._get("targets")["activeTargets"]}

    def until(self, is_true: Callable[[Prometheus], object], what: str, timeout_s: float = 60.0) -> None:
        """Wait for what scrapes and rules bring about."""
        limit = time.monotonic() + timeout_s
        while not is_true(self):
            assert time.monotonic() < limit, f"{what}; firing: {self.firing()}"
            time.sleep(0.5)

    def _get(self, path: str, **query: str) -> dict[str, Any]:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as response:
            told = json.load(response)
        assert told["status"] == "success", told
        return dict(told["data"])


@contextmanager
def scraping(folder: Path, targets: Mapping[str, list[str]]) -> Iterator[Prometheus]:
    """Run Prometheus over "host:port" places by job, with the rules of `deploy/prometheus` and no waiting in them."""
    _write_config(folder, targets)
    with listen_on("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            yield _started(f"http://127.0.0.1:{port}", process, folder / "log")
        finally:
            process.terminate()
            process.wait(20)


def _write_config(folder: Path, targets: Mapping[str, list[str]]) -> None:
    """The shipped files, with these targets in the place of names, and with seconds for their minutes."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] |= {
        "scrape_interval": f"{STEP_S}s",
        "scrape_timeout": f"{STEP_S}s",
        "evaluation_interval": f"{STEP_S}s",
    }
    for job in config["scrape_configs"]:
        if places := targets.get(job["job_name"]):
            del job["dns_sd_configs"]
            job["static_configs"] = [{"targets": places}]
            job.pop("authorization", None)
    config["scrape_configs"] = [job for job in config["scrape_configs"] if job["job_name"] in targets]
    folder.mkdir(parents=True)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    rules = (DEPLOY / "prometheus" / "alerts.yml").read_text()
    (folder / "alerts.yml").write_text(
        re.sub(r"^ +for: .*\n", "", rules, flags=re.M).replace("[30m:1m]", "[5m:1s]")
    )


def _started(url: str, process: subprocess.Popen[bytes], log: Path) -> Prometheus:
    limit = time.monotonic() + START_S
    while True:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=2):
                return Prometheus(url)
        except OSError:
            assert time.monotonic() < limit, log.read_text()[-2000:]
            time.sleep(0.2)
