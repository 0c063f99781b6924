"""A server that meters energy: `usage.energy`, /metrics, the log and `quire top`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Host, Live
from tests.server.scrape import Scrape

BODY = {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}


@pytest.fixture(scope="module")
def metered(tiny_model: Path) -> Iterator[Live]:
    host = Host(tiny_model, report_energy=True, energy_meter="tests.energy.fake_meter.FakeMeter")
    live, stop = host.start(admin_key="secret")
    yield live
    stop()
    host.close()


def check(energy: dict[str, Any], tokens: int) -> float:
    assert set(energy) == {"joules", "joules_per_token", "estimated", "source"}
    assert (energy["estimated"], energy["source"]) == (False, "fake")
    assert energy["joules"] > 0
    assert energy["joules_per_token"] == pytest.approx(energy["joules"] / tokens, rel=1e-3, abs=1e-6)
    return float(energy["joules"])


def test_usage_and_metrics_agree(metered: Live, caplog: pytest.LogCaptureFixture) -> None:
    told = 0.0
    with caplog.at_level(logging.INFO, "quire.access"):
        told += check(metered.post("/v1/completions", BODY).json()["usage"]["energy"], 12)
        stream = metered.post("/v1/completions", {**BODY, "stream": True, "stream_options": {"include_usage": True}})
    last = [line for line in stream.text.splitlines() if '"usage":{' in line][-1]
    told += check(json.loads(last.removeprefix("data: "))["usage"]["energy"], 12)
    lines = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert all(line["joules"] > 0 for line in lines if line["path"] == "/v1/completions")
    chat = metered.post("/v1/chat/completions", CHAT).json()
    told += check(chat["usage"]["energy"], chat["usage"]["completion_tokens"])
    vector = metered.post("/v1/embeddings", {"input": "hi"}).json()
    told += check(vector["usage"]["energy"], vector["usage"]["prompt_tokens"])
    response = metered.post("/v1/responses", {"input": "hi", "max_output_tokens": 6}).json()
    told += check(response["usage"]["energy"], response["usage"]["output_tokens"])
    message = metered.post("/v1/messages", {**CHAT, "model": "tiny"}).json()
    told += check(message["usage"]["energy"], message["usage"]["output_tokens"])
    page = Scrape(metered.client.get("/metrics").text)
    work = sum(page.sum("quire:energy_joules_total", kind=kind) for kind in ("prompt", "decode"))
    assert told == pytest.approx(work, rel=0.03)
    assert page.sum("quire:power_watts") > 0


def test_top_shows_power(metered: Live, capsys: pytest.CaptureFixture[str]) -> None:
    from quire.cli.main import main

    assert main(["top", "--url", metered.url, "--api-key", "secret", "--once", "--interval", "0.2"]) == 0
    assert " W" in next(line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("power"))
