"""compose.yaml, run: its networks, volumes, commands and health checks, in namespaces instead of containers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import pytest

from slicing.cache import cache_root
from tests.chaos.model import write_model
from tests.deploy.containers import USER, Project, project, why_not
from tests.deploy.prometheus import need
from tests.support.processes import until

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]

KEY = "a-key-of-this-test"
MODEL = "/var/lib/model"
ENV = {
    "API_KEY": KEY,
    "MODEL": MODEL,
    "LAYERS_1": "1:3",
    "LAYERS_2": "3:5",
    "LAYERS_3": "5:7",
    "NODE_MEMORY": "1GB",
}
QUESTION = {"model": "model", "messages": [{"role": "user", "content": "hello fox"}], "max_tokens": 8}


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """The profile `swarm`, all of it well."""
    if reason := why_not():
        pytest.skip(reason)
    need("curl")
    folder = tmp_path_factory.mktemp("compose")
    model = write_model(folder / "tiny")
    for path in model.iterdir():
        path.chmod(0o644)
    with project(folder, dict(ENV), {MODEL: model}) as opened:
        _lend_kernels(opened)
        opened.up("sentinel")
        opened.up("node-1", "node-2", "node-3")
        opened.up("swarm-gateway")
        yield opened


def test_a_swarm_comes_up_and_answers_who_has_the_key(swarm: Project) -> None:
    url = f"http://{swarm.addresses['swarm-gateway']}:8000"
    assert swarm.ask(f"{url}/v1/models")[0] == 401
    status, text = swarm.ask(f"{url}/v1/chat/completions", key=KEY, body=QUESTION)
    assert status == 200, text
    assert json.loads(text)["usage"]["completion_tokens"] > 0
    assert swarm.ask(f"{url}/ready")[0] == 200


def test_prometheus_may_ask_every_one_of_them(swarm: Project) -> None:
    assert swarm.ask(f"http://{swarm.addresses['swarm-gateway']}:8000/metrics")[0] == 401
    assert (
        "diffuse_model_ready"
        in swarm.ask(f"http://{swarm.addresses['swarm-gateway']}:8000/metrics", key=KEY)[1]
    )
    for name in ("sentinel", "node-1", "node-2", "node-3"):
        assert "_ready 1.0" in swarm.ask(f"http://{swarm.addresses[name]}:9464/metrics")[1], name


def test_nobody_is_root_or_writes_outside_the_volumes(swarm: Project) -> None:
    for container in swarm.running.values():
        assert container.run("id", "-u").stdout.strip() == str(USER)
        for path in ("/etc/x", "/usr/local/x", "/x", "/var/lib/x"):
            assert container.run("touch", path).returncode != 0, (container.name, path)
        assert container.run("touch", "/tmp/x").returncode == 0
    assert swarm.running["node-1"].run("touch", "/var/lib/swarm/x").returncode != 0


def test_a_node_that_is_stopped_ends_in_time_and_comes_back_as_itself(swarm: Project) -> None:
    node = swarm.running["node-2"]
    before = node.run("diffuse", "keys", "show", "/var/lib/diffuse/node.key").stdout
    assert before
    assert node.stop(45) == 0
    (node,) = swarm.up("node-2")
    assert node.run("diffuse", "keys", "show", "/var/lib/diffuse/node.key").stdout == before
    url = f"http://{swarm.addresses['swarm-gateway']}:8000/v1/chat/completions"
    assert swarm.ask(url, key=KEY, body=QUESTION)[0] == 200


def test_a_check_fails_while_nothing_serves(swarm: Project) -> None:
    node = swarm.running["node-1"]
    assert node.run("env", "HEALTH_URL=http://127.0.0.1:1/health", "healthy").returncode == 1
    assert (
        node.run("env", "-u", "HEALTH_URL", "healthy").returncode == 0
    )  # as the image has it: whichever listens


def test_a_node_and_a_gateway_join_by_an_address_in_the_env_file(swarm: Project) -> None:
    sentinel = swarm.running["sentinel"]
    swarm.env["BOOTSTRAP"] = sentinel.run("cat", "/var/lib/swarm/bootstrap").stdout.strip()
    swarm.up("node", "gateway")
    url = f"http://{swarm.addresses['gateway']}:8000"
    status, text = swarm.ask(f"{url}/v1/models", key=KEY)
    assert status == 200, text


def test_a_node_without_an_address_says_what_it_lacks(swarm: Project) -> None:
    done = swarm.running["node-1"].run("env", "-u", "BOOTSTRAP_FILE", "join", "host")
    assert done.returncode == 2
    assert "BOOTSTRAP" in done.stderr


def test_prometheus_starts_with_the_key_in_its_own_tmp(swarm: Project) -> None:
    need("prometheus", "wget")
    (prometheus,) = swarm.up("prometheus")
    assert prometheus.run("cat", "/tmp/api_key").stdout == KEY
    assert prometheus.run("stat", "-c", "%a", "/tmp/api_key").stdout.strip() == "600"
    page = ("wget", "-q", "-O", "-", "http://127.0.0.1:9090/api/v1/rules")
    until(lambda: "DiffuseNoGateway" in prometheus.run(*page).stdout)


def _lend_kernels(opened: Project) -> None:
    """Kernels that this machine has compiled before: else every run would take minutes for them."""
    kernels = cache_root() / "kernels"
    if kernels.is_dir():
        cache = opened._volume("cache")
        shutil.copytree(kernels, cache / "kernels")
        for path in (cache / "kernels", *(cache / "kernels").rglob("*")):
            shutil.chown(path, USER, USER)
