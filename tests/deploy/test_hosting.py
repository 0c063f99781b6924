"""The Kubernetes manifest, the systemd unit, the image and the audit: consistent with the server they start."""

from __future__ import annotations

import configparser
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.cli.parser import Parser
from quire.cli.serve import configure
from quire.messages.metric_table import SPECS
from quire.server.config import ServerConfig
from quire.server.routes import system

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PUBLIC = {route.path for route in system.ROUTES if route.is_public}


def serve_arguments(arguments: list[str]) -> Any:
    parser = Parser(prog="quire serve")
    configure(parser)
    return parser.parse(arguments)


# Kubernetes


@pytest.fixture(scope="module")
def objects() -> dict[str, dict[str, Any]]:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    by_kind = {document["kind"]: document for document in documents}
    assert len(by_kind) == len(documents)
    return by_kind


@pytest.fixture(scope="module")
def pod(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = objects["Deployment"]["spec"]["template"]["spec"]
    return spec


def test_probes_ask_a_route_that_needs_no_key(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    (port,) = container["ports"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        get = container[name]["httpGet"]
        assert get["path"] in PUBLIC and get["port"] == port["name"]
        assert container[name]["timeoutSeconds"] > 2  # a probe of a stopped engine answers after two seconds
    liveness = container["livenessProbe"]
    # The server itself restarts an engine that hangs: the pod must live longer than that takes.
    assert liveness["periodSeconds"] * liveness["failureThreshold"] > 2 * ServerConfig().engine_hang_timeout


def test_pods_stop_after_their_requests(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    parsed = serve_arguments(container["args"])
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pause + parsed.shutdown_timeout < pod["terminationGracePeriodSeconds"]


def test_every_selector_finds_the_pods_and_one_always_serves(objects: dict[str, dict[str, Any]]) -> None:
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert objects["Service"]["spec"]["selector"] == labels
    for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor"):
        assert objects[kind]["spec"]["selector"]["matchLabels"] == labels
    assert objects["PodDisruptionBudget"]["spec"]["minAvailable"] >= 1
    assert objects["HorizontalPodAutoscaler"]["spec"]["minReplicas"] >= 2
    assert objects["Deployment"]["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_it_scales_by_a_metric_that_exists(objects: dict[str, dict[str, Any]]) -> None:
    (metric,) = objects["HorizontalPodAutoscaler"]["spec"]["metrics"]
    (rule,) = yaml.safe_load(objects["ConfigMap"]["data"]["rules.yaml"])
    assert rule["name"]["as"] == metric["pods"]["metric"]["name"]
    series = rule["seriesQuery"].partition("{")[0]
    assert series.startswith("quire:") and SPECS[series.removeprefix("quire:")].kind == "gauge"


def test_pods_have_no_more_rights_than_they_need(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    rights = container["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
    assert rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"]
    assert rights["capabilities"]["drop"] == ["ALL"]
    assert re.search(rf"--uid {pod['securityContext']['runAsUser']} quire", (DEPLOY / "Dockerfile").read_text())
    # With a read-only root, what the image writes to must be mounted.
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/models", "/tmp"} <= mounts
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    secrets = [each["valueFrom"]["secretKeyRef"] for each in container["env"]]
    assert secrets == [{"name": "quire", "key": "api-key"}]


# systemd


def unit() -> configparser.RawConfigParser:
    """The unit; a name that appears twice has its values joined by line breaks."""

    class Joined(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            if isinstance(value, list) and key in self:
                value = self[key] + value
            super().__setitem__(key, value)

    parsed = configparser.RawConfigParser(dict_type=Joined, strict=False, comment_prefixes=("#",))
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read(DEPLOY / "quire.service")
    return parsed


def test_the_unit_starts_a_server_and_waits_for_its_requests() -> None:
    service = unit()["Service"]
    command = shlex.split(service["ExecStart"])
    assert (
        command[0].endswith("/quire") and command[1:3] == ["serve", "${QUIRE_MODEL}"] and command[-1] == "$QUIRE_FLAGS"
    )
    parsed = serve_arguments(["smollm2-135m", *command[3:-1]])
    assert parsed.host == "127.0.0.1"
    assert int(service["TimeoutStopSec"]) > parsed.shutdown_timeout + 10
    assert (
        parsed.kv_disk.startswith(f"/var/lib/{service['StateDirectory']}/") and service["StateDirectoryMode"] == "0700"
    )
    assert service["Restart"] == "always" and service["OOMPolicy"] == "continue" and service["KillMode"] == "mixed"
    assert int(service["LimitNOFILE"]) >= 65536
    assert service["NoNewPrivileges"] == "yes" and service["ProtectSystem"] == "strict"


def test_systemd_accepts_the_unit() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here")
    ran = subprocess.run(["systemd-analyze", "verify", "--recursive-errors=no", DEPLOY / "quire.service"],
                         capture_output=True, text=True, check=False)  # fmt: skip
    said = [line for line in (ran.stdout + ran.stderr).splitlines() if "quire.service" in line]
    assert [line for line in said if "is not executable" not in line] == []


# The image


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_image_builds_where_there_is_a_builder() -> None:
    builder = next((name for name in ("docker", "podman", "buildah") if shutil.which(name)), None)
    if builder is None:
        pytest.skip("no builder of images is installed (docker, podman or buildah)")
    if subprocess.run([builder, "info"], capture_output=True, check=False).returncode:
        pytest.skip(f"{builder} is installed, but cannot build here: `{builder} info` fails")
    command = [builder, "build", "-f", str(DEPLOY / "Dockerfile"), "-t", "quire:test", str(ROOT)]
    subprocess.run(command, check=True)


# Dependencies


def test_the_audit_lists_every_dependency_with_a_fitting_licence() -> None:
    ran = subprocess.run([sys.executable, DEPLOY / "audit.py", "--json"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = {each["name"]: each for each in json.loads(ran.stdout)}
    declared = re.findall(
        r'^  "([a-zA-Z_0-9-]+)[>;]', (ROOT / "pyproject.toml").read_text().split("[project.opt")[0], re.M
    )
    assert len(declared) > 15
    assert {name.replace("_", "-").lower() for name in declared} <= set(found)
    assert all(each["version"] and each["licence"] != "not named" for each in found.values())
    assert "markupsafe" in found and found["markupsafe"]["needed_by"] == "jinja2"


@pytest.mark.parametrize(
    "licence, fits",
    [("MIT", True), ("Apache-2.0 AND MIT", True), ("MIT OR GPL-3.0", True), ("GPL-3.0-only", False),
     ("Apache-2.0 AND GPL-3.0", False), ("GNU Affero General Public License v3", False), ("not named", False)],
)  # fmt: skip
def test_a_licence_that_asks_for_more_is_found(licence: str, fits: bool) -> None:
    spec = importlib.util.spec_from_file_location("audit", DEPLOY / "audit.py")
    assert spec is not None and spec.loader is not None
    audit = importlib.util.module_from_spec(spec)
    sys.modules["audit"] = audit  # dataclasses look their module up
    spec.loader.exec_module(audit)
    assert audit.Dependency("a", "1", licence, "quire").fits is fits


@pytest.mark.parametrize("minor", range(10, 14))
def test_the_code_compiles_with_every_supported_python_at_hand(minor: int, tmp_path: Path) -> None:
    """Syntax only: the dependencies are installed for one Python."""
    managed = (Path.home() / ".pyenv" / "versions").glob(f"3.{minor}.*/bin/python")
    candidates = filter(None, [shutil.which(f"python3.{minor}"), *map(str, managed)])
    asks = [(each, subprocess.run([each, "--version"], capture_output=True, check=False)) for each in candidates]
    python = next((each for each, ran in asks if not ran.returncode), None)
    if python is None:
        pytest.skip(f"there is no Python 3.{minor} here")
    code = (
        "import pathlib, sys\n"
        "for path in pathlib.Path(sys.argv[1]).rglob('*.py'):\n"
        "    compile(path.read_bytes(), str(path), 'exec')\n"
    )
    subprocess.run([python, "-c", code, str(ROOT / "quire")], check=True, cwd=tmp_path)
