"""What the deployment files name exists: commands and their flags, variables, metrics, folders. Runs nothing of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from cli.main import app
from cli.options import DEFAULT_MODEL
from cli.setting_names import OTHER_VARIABLES, variable_of
from cli.settings_command import SERVICES, setting_options
from node.settings import DEFAULT_DRAIN_S
from tests.deploy.files import (
    DEPLOY,
    KUBERNETES,
    ROOT,
    Command,
    alerts,
    boards,
    commands,
    compose,
    compose_variables,
    manifests,
    pods,
)
from tools.dashboards import BOARDS, rendered


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.where)
def test_every_command_line_is_one_that_diffuse_takes(command: Command) -> None:
    name, *flags = command.words
    known = get_command(app).commands[name]  # type: ignore[attr-defined]
    context = known.make_context(name, list(flags))  # raises for a flag that there is not
    assert not context.args


def test_every_variable_is_one_that_diffuse_reads() -> None:
    texts = [
        *_texts(),
        *(
            path.read_text()
            for path in DEPLOY.rglob("*")
            if path.suffix in ("", ".service") and path.is_file()
        ),
    ]
    named = set(
        re.findall(
            r"\bDIFFUSE_[A-Z_]+\b(?=[=:\s,}])", "\n".join([*texts, (ROOT / "compose.tls.yaml").read_text()])
        )
    )
    assert {"DIFFUSE_API_KEYS", "DIFFUSE_STATE", "DIFFUSE_BOOTSTRAP", "DIFFUSE_TLS_CERT"} <= named
    commands_of_ours: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    known = {variable_of(name) for one in SERVICES for name in setting_options(commands_of_ours[one])}
    assert named <= known | OTHER_VARIABLES


def test_gateways_of_a_cluster_share_their_state() -> None:
    pod = dict(pods())["diffuse-gateway"]
    variables = {entry["name"]: entry for entry in pod["containers"][0]["env"]}
    assert variables["DIFFUSE_STATE"]["valueFrom"]["secretKeyRef"] == {"name": "diffuse-state", "key": "url"}
    services = {manifest["metadata"]["name"] for manifest in manifests() if manifest["kind"] == "Service"}
    (host,) = re.findall(r"@([\w-]+)\.diffuse\.svc:6379", (KUBERNETES / "secrets").read_text())
    assert host in services


def test_what_kubernetes_says_of_services_is_kept_out_of_the_settings() -> None:
    for name, pod in pods():
        assert pod["enableServiceLinks"] is False, name


def test_a_change_for_tls_changes_what_is_there() -> None:
    whole = {(one["kind"], one["metadata"]["name"]): one for one in manifests()}
    for path in (KUBERNETES / "tls" / "gateway.yaml", KUBERNETES / "tls" / "service-monitor.yaml"):
        patch = yaml.safe_load(path.read_text())
        assert (patch["kind"], patch["metadata"]["name"]) in whole
    patch = yaml.safe_load((KUBERNETES / "tls" / "gateway.yaml").read_text())["spec"]["template"]["spec"]
    pod = dict(pods())["diffuse-gateway"]
    assert patch["containers"][0]["name"] == pod["containers"][0]["name"]
    services = yaml.safe_load((ROOT / "compose.tls.yaml").read_text())["services"]
    assert services.keys() < compose()["services"].keys()


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.where)
def test_a_model_that_is_named_is_the_one_in_the_image(command: Command) -> None:
    assert command.flag("--model") in (None, DEFAULT_MODEL)


def test_no_image_is_a_moving_one() -> None:
    named = re.findall(r"^(?:FROM|ARG PYTHON_IMAGE=|\s+image:)\s*(\S+)", "\n".join(_texts()), re.M)
    pulled = {image for image in named if "/" in image or image.startswith("python")}
    assert pulled
    for image in pulled:
        assert re.search(r":v?\d+\.\d+\.\d+", image), f"{image} names no exact version"
    assert not re.search(r":latest\b", "\n".join(_texts()))


def test_env_example_has_what_compose_asks_for_and_nothing_else() -> None:
    lines = (ROOT / ".env.example").read_text().splitlines()
    assert {line.partition("=")[0] for line in lines if re.match(r"\w+=", line)} == compose_variables()


def test_the_example_serves_the_layers_that_compose_serves_without_it() -> None:
    lines = (ROOT / ".env.example").read_text().splitlines()
    example = dict(line.split("=", 1) for line in lines if re.match(r"\w+=", line))
    assert compose(example) == compose()


def test_every_container_is_closed_has_a_health_check_and_time_to_end() -> None:
    for name, service in compose()["services"].items():
        assert "healthcheck" in service, name
        assert service["cap_drop"] == ["ALL"], name
        if service["image"].startswith("diffuse:"):
            assert service["read_only"] is True, name
            assert float(service["stop_grace_period"].rstrip("s")) > DEFAULT_DRAIN_S, name


def test_ports_outside_are_of_this_machine_only_but_for_a_node_that_joins_a_network() -> None:
    for name, service in compose()["services"].items():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:") or name == "node", (name, port)


def test_every_volume_is_declared_and_every_folder_is_there() -> None:
    told = compose()
    for service in told["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in told["volumes"] or (ROOT / source).is_dir(), source


def test_profiles_do_not_ask_for_services_outside_them() -> None:
    services = compose()["services"]
    for name, service in services.items():
        for needed in service.get("depends_on") or ():
            assert set(service["profiles"]) <= set(services[needed]["profiles"]), (name, needed)


def test_a_pod_is_given_longer_to_end_than_its_sessions() -> None:
    drains = {command.where: command.flag("--drain") for command in commands()}
    for name, pod in pods():
        if f"kubernetes {name}" not in drains:
            continue  # of another program
        drain = drains[f"kubernetes {name}"]
        limit = 0.0 if "sentinel" in name else DEFAULT_DRAIN_S if drain is None else float(drain)
        assert pod["terminationGracePeriodSeconds"] > limit, name


def test_every_pod_runs_without_root_on_a_root_that_cannot_be_written() -> None:
    for name, pod in pods():
        assert pod["securityContext"]["runAsNonRoot"], name
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            closed = container["securityContext"]
            assert closed["readOnlyRootFilesystem"], name
            assert not closed["allowPrivilegeEscalation"], name
            assert container["resources"]["limits"]["memory"], name


def test_what_selects_pods_finds_some() -> None:
    labels = [
        manifest["spec"]["template"]["metadata"]["labels"]
        for manifest in manifests()
        if manifest["kind"] in ("Deployment", "StatefulSet")
    ]
    for manifest in manifests():
        spec = manifest.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector") or {}
        wanted = selector.get("matchLabels", {} if "matchExpressions" in selector else selector)
        if manifest["kind"] != "ServiceMonitor" and wanted:
            assert any(wanted.items() <= pod.items() for pod in labels), manifest["metadata"]["name"]


def test_kustomize_names_every_manifest() -> None:
    named = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
    assert set(named) == {path.name for path in KUBERNETES.glob("*.yaml")} - {"kustomization.yaml"}


def test_what_the_dockerfile_copies_is_let_through_and_there() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = [Path(line[1:]) for line in ignored if line.startswith("!")]
    for line in re.findall(r"^COPY (?!--from)(.*)", (ROOT / "Dockerfile").read_text(), re.M):
        for source in map(Path, line.split()[:-1]):
            assert (ROOT / source).exists(), source
            assert any(source.is_relative_to(one) for one in allowed), source


def test_the_image_installs_every_package_of_the_project() -> None:
    text = (ROOT / "Dockerfile").read_text()
    packages = re.search(r"^packages = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.M)
    assert packages is not None
    for package in re.findall(r'"(\w+)"', packages[1]):
        assert text.count(f"COPY {package} /src/{package}\n") == 2, package


def test_every_alert_is_driven_to_fire_and_to_be_silent() -> None:
    cases = yaml.safe_load((ROOT / "tests" / "deploy" / "alerts_test.yml").read_text())["tests"]
    tests = [test for case in cases for test in case["alert_rule_test"]]
    assert {test["alertname"] for test in tests if test.get("exp_alerts")} == set(alerts())
    assert {test["alertname"] for test in tests if not test.get("exp_alerts")} == set(alerts())


def test_the_dashboards_are_those_of_the_program_that_writes_them() -> None:
    assert boards() == {name: rendered(board) for name, board in BOARDS.items()}, (
        "run python -m tools.dashboards"
    )


def _texts() -> list[str]:
    files = [ROOT / "Dockerfile", ROOT / "compose.yaml", *DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.yml")]
    return [path.read_text() for path in files]
