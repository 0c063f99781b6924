"""`deploy/`: its files and flags exist, and the dashboard uses existing metrics."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.cli.parser import Parser
from quire.cli.serve import configure
from quire.engine.stats import Metric
from quire.messages.metric_table import ENERGY_METRICS
from quire.server.observability.metrics import ServerMetrics
from tests.server.scrape import Scrape
from tests.server.test_metrics import FakeEngine

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "quire.json"

WORDS = {
    "sum", "min", "max", "by", "rate", "histogram_quantile", "changes", "label_values", "le", "model_name", "instance",
    "finished_reason", "handler", "status", "reason", "kind",
}  # fmt: skip
"""Words of our PromQL that are not metrics."""
LABELS_OF_PROMETHEUS = {"instance", "job"}


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return loaded


def expressions() -> list[str]:
    shown = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]
    variables = [
        variable["query"]["query"] for variable in dashboard()["templating"]["list"] if variable["type"] == "query"
    ]
    return shown + variables + [each["expr"] for each in dashboard()["annotations"]["list"]]


def metrics_in(expression: str) -> set[str]:
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\"[^\"]*\"", " ", expression)
    return set(re.findall(r"[a-zA-Z_][a-zA-Z0-9_:]*", bare)) - WORDS


@pytest.fixture(scope="module")
def scrape() -> Scrape:
    """The first scrape of a server after one request."""
    from quire.server.observability.observer import HttpRecord

    metered = [
        Metric(f"quire:{spec.name}", spec.kind, 1.0, series=((("prompt",), 1.0),) if spec.labels else ())
        for spec in ENERGY_METRICS
    ]
    metrics = ServerMetrics(FakeEngine(metered), "m", admission=type("Admission", (), {"rejected": {"requests": 0}})())
    metrics.on_http(HttpRecord("id", "POST", "/v1/completions", "/v1/completions", status=200))
    return Scrape(asyncio.run(metrics.page()).decode())


def test_every_metric_of_the_dashboard_exists(scrape: Scrape) -> None:
    named = set().union(*map(metrics_in, expressions()))
    assert len(named) > 25
    assert named <= scrape.names, named - scrape.names


def test_every_label_of_the_dashboard_exists(scrape: Scrape) -> None:
    for expression in expressions():
        for name, selectors in re.findall(r"([a-zA-Z0-9_:]+)\{([^}]*)\}", expression):
            wanted = set(re.findall(r"(\w+)=", selectors)) - LABELS_OF_PROMETHEUS
            labels = [{label for label, _ in has} for each, has in scrape.values if each == name]
            assert labels and all(wanted <= each for each in labels), (name, wanted)


def test_the_dashboard_has_the_expected_panels() -> None:
    titles = " ".join(panel["title"] for panel in dashboard()["panels"]).lower()
    for word in (
        "running", "kv cache", "first token", "between tokens", "end to end", "tokens a second", "prefix cache",
        "preemptions", "by reason", "http errors", "restarts", "power by use", "joules a generated token",
    ):  # fmt: skip
        assert word in titles, word
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)
    places = [panel["gridPos"] for panel in dashboard()["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    cells = [(x, y) for place in places for x in range(place["x"], place["x"] + place["w"])
             for y in range(place["y"], place["y"] + place["h"])]  # fmt: skip
    assert len(set(cells)) == len(cells), "two panels overlap"


def test_compose_files_parse_and_name_files_that_exist() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert set(compose["services"]) == {"quire", "prometheus", "grafana"}
    build = compose["services"]["quire"]["build"]
    context = (DEPLOY / build["context"]).resolve()
    assert context == ROOT
    assert (context / build["dockerfile"]).is_file()
    named = set()
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists(), source
            else:
                named.add(source)
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), "published to the world"
    assert named == set(compose["volumes"])
    gpu = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())
    assert gpu["services"]["quire"]["build"]["args"]["DEVICE"] == "cuda"


def test_prometheus_scrapes_the_server_and_grafana_queries_prometheus() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    host, port = job["static_configs"][0]["targets"][0].split(":")
    assert host in compose["services"]
    assert compose["services"][host]["ports"][0].endswith(f":{port}")
    assert job["metrics_path"] == "/metrics"
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["uid"] == dashboard()["templating"]["list"][0]["current"]["value"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "quire.yaml").read_text())["providers"]
    mounts = [volume.split(":") for volume in compose["services"]["grafana"]["volumes"]]
    (folder,) = [mount[0] for mount in mounts if mount[1] == provider["options"]["path"]]
    assert (DEPLOY / folder / DASHBOARD.name).is_file()


def dockerfile(instruction: str) -> list[str]:
    joined = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    return [line.split(maxsplit=1)[1] for line in joined.splitlines() if line.startswith(instruction + " ")]


def test_the_image_copies_existing_files_and_starts_a_server_with_existing_flags() -> None:
    for copied in dockerfile("COPY"):
        for source in copied.split()[:-1]:
            assert (ROOT / source).exists(), source
    assert dockerfile("USER") == ["quire"]
    (entry,), (command,), (check,) = (dockerfile(name) for name in ("ENTRYPOINT", "CMD", "HEALTHCHECK"))
    arguments = json.loads(entry) + json.loads(command)
    assert arguments[:2] == ["quire", "serve"]
    parser = Parser(prog="quire serve")
    configure(parser)
    parsed = parser.parse(arguments[2:])
    assert (parsed.host, parsed.port, parsed.log_format) == ("0.0.0.0", 8000, "json")
    assert "/health" in check and "8000" in check
    assert {f"base-{device}" for device in ("cpu", "cuda")} == {
        each.split(" AS ")[1] for each in dockerfile("FROM")[:2]
    }
