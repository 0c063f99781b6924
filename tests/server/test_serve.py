"""`quire serve` as a process: start, listening addresses, shutdown."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.cli.main import main
from quire.errors import ConfigError
from quire.server.config import ServerConfig
from tests.server.conftest import Live
from tests.server.served import served

ENGINE = ["--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "128"]
LONG = {"prompt": "abc", "max_tokens": 240, "ignore_eos": True, "n": 8, "temperature": 1.0}


def test_it_starts_drains_and_leaves_nothing_behind(tiny_model: Path, tmp_path: Path) -> None:
    sock = tmp_path / "quire.sock"
    config = tmp_path / "server.yaml"
    config.write_text(
        f"model: {tiny_model}\nuds: {sock}\nserved_model_name: [small, alias]\nmax-model-len: 250\nport: 1\n"
        "device: cpu\ndtype: float32\nnum_gpu_blocks_override: 128\napi-key: secret\nlog-level: warning\n"
    )
    with served("--config", str(config), "--max-model-len", "256") as server:
        server.wait_for("curl .*")
        for fact in ("small", "256 tokens of context", "2,048 tokens", str(sock), "QUIRE_API_KEY"):
            assert fact in server.stderr
        assert sock.stat().st_mode & 0o777 == 0o600
        (engine,) = server.children
        for pid, needs_torch in ((server.process.pid, False), (engine, True)):  # duration of a start in seconds
            assert ("libtorch" in Path(f"/proc/{pid}/maps").read_text()) == needs_torch
        headers = {"authorization": "Bearer secret"}
        client = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(sock)), base_url="http://quire", headers=headers, timeout=60
        )
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["small", "alias"]
        late = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(sock)), base_url="http://quire", headers=headers, timeout=60
        )
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.killpg(server.process.pid, signal.SIGTERM)  # the engine's process gets it too, and continues
            refused = late.post("/v1/completions", json={"prompt": "a"})
            while refused.status_code == 200:
                refused = late.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert late.get("/ready").status_code == 503
            *_, last = (line for line in lines if line)
            assert last == "data: [DONE]"
        assert server.end() == 0
        assert not Path(f"/proc/{engine}").exists()
        assert not sock.exists()


def test_a_second_signal_stops_at_once(tiny_model: Path) -> None:
    with served(str(tiny_model), *ENGINE, "--port", "0", "--shutdown-timeout", "300") as server:
        url = server.wait_for(r"(http://127.0.0.1:\d+)/v1")[1]
        (engine,) = server.children
        body = {**LONG, "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGINT)
            server.wait_for("stopping")
            begin = time.monotonic()
            server.process.send_signal(signal.SIGINT)
            server.end()
            assert time.monotonic() - begin < 60  # and not after 300
        assert not Path(f"/proc/{engine}").exists()


def test_requests_past_the_drain_timeout_are_cut_off(serving: Callable[..., Live]) -> None:
    live = serving(shutdown_timeout=0.1)
    with live.client.stream("POST", "/v1/completions", json={**LONG, "n": 16, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        live.call(live.http.on_signal)
        *_, error, done = (line for line in lines if line)
    assert done == "data: [DONE]"
    assert json.loads(error[6:])["error"]["code"] == 503


def test_tls(serving: Callable[..., Live], tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("openssl is needed to make a certificate")
    live = serving(ssl_certfile=str(certificate), ssl_keyfile=str(key))
    assert live.url.startswith("https://")
    with httpx.Client(verify=ssl.create_default_context(cafile=str(certificate))) as client:
        assert client.get(live.url + "/health").status_code == 200


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("portt: 1", "did you mean --port"),
        ("compilation-config: {a: 1}", '--compilation-config {"a": 1} is not supported'),
        ("port: many", "invalid int value"),
        ("- port", "must map flag names"),
        ("port: [", "cannot be read"),
    ],
)
def test_a_config_file_with_an_error_is_refused(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    assert main(["serve", "--config", str(path)]) == 2
    assert words in capsys.readouterr().err


def test_a_port_in_use_is_reported_before_a_model_is_loaded(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    port = live.url.rpartition(":")[2]
    begin = time.monotonic()
    assert main(["serve", "no/such-model", "--port", port]) == 2
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    "settings",
    [
        {"port": 70000}, {"port": -1}, {"max_body_bytes": 0}, {"request_timeout": -1}, {"stall_timeout": float("nan")},
        {"admin_key": "a", "api_key": ("a",)}, {"api_key": ("",)}, {"admin_key": ""}, {"ssl_keyfile": "x"},
        {"root_path": "api"}, {"max_queued_requests": True},
    ],
)  # fmt: skip
def test_an_invalid_setting_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerConfig(**settings)


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "one, two")
    assert ServerConfig().api_key == ("one", "two")
    assert ServerConfig(api_key=("three",)).api_key == ("three",)
