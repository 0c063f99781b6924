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
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.responses import JSONResponse

from quire.cli.main import main
from quire.errors import ConfigError
from quire.server.config import ServerConfig
from quire.server.serve import CertificateFiles
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


def make_certificate(folder: Path, name: str = "localhost") -> tuple[Path, Path]:
    """A key and a certificate for 127.0.0.1, signed by itself."""
    key, certificate = folder / "key.pem", folder / "cert.pem"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", f"/CN={name}", "-addext",
         "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("openssl is needed to make a certificate")
    return key, certificate


def test_tls(serving: Callable[..., Live], tmp_path: Path) -> None:
    key, certificate = make_certificate(tmp_path)
    ciphers = "ECDHE-RSA-AES256-GCM-SHA384"
    live = serving(ssl_certfile=str(certificate), ssl_keyfile=str(key), ssl_ciphers=ciphers)
    assert live.url.startswith("https://")
    trusting = ssl.create_default_context(cafile=str(certificate))
    with httpx.Client(verify=trusting) as client:
        assert client.get(live.url + "/health").status_code == 200
    trusting.maximum_version = ssl.TLSVersion.TLSv1_2
    trusting.set_ciphers("ECDHE-RSA-AES128-GCM-SHA256")  # which the server was not told to use
    with pytest.raises(httpx.ConnectError), httpx.Client(verify=trusting) as client:
        client.get(live.url + "/health")


@pytest.mark.parametrize(("required", "is_served"), [(None, False), (2, False), (1, True), (0, True)])
def test_whether_clients_must_present_a_certificate(
    serving: Callable[..., Live], tmp_path: Path, required: int | None, is_served: bool
) -> None:
    key, certificate = make_certificate(tmp_path)
    tls = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key), "ssl_ca_certs": str(certificate)}
    live = serving(**tls, ssl_cert_reqs=required)
    trusting = ssl.create_default_context(cafile=str(certificate))
    with httpx.Client(verify=trusting) as client:
        if is_served:
            assert client.get(live.url + "/health").status_code == 200
        else:
            with pytest.raises(httpx.TransportError):
                client.get(live.url + "/health")
    trusting.load_cert_chain(certificate, key)
    with httpx.Client(verify=trusting) as client:
        assert client.get(live.url + "/health").status_code == 200


def test_a_certificate_that_changes_is_read_again(tmp_path: Path) -> None:
    key, certificate = make_certificate(tmp_path, "before")
    config = uvicorn.Config("x:y", ssl_certfile=str(certificate), ssl_keyfile=str(key))
    files = CertificateFiles(config)
    loaded: list[str] = []
    config.ssl = SimpleNamespace(load_cert_chain=lambda *names: loaded.append(Path(names[0]).read_text()))  # type: ignore[assignment]
    files.refresh()
    assert loaded == []
    make_certificate(tmp_path, "after")
    os.utime(certificate, ns=(1, 1))  # whatever the resolution of the file system's times
    files.refresh()
    files.refresh()
    assert loaded == [certificate.read_text()]
    certificate.unlink()
    files.refresh()  # as while it is being replaced
    assert len(loaded) == 1


# Paths, browsers, middleware


def test_a_root_path_is_served_with_the_prefix_and_without_and_keys_hold_for_both(serving: Callable[..., Live]) -> None:
    live = serving(root_path="/llm/a", api_key=("secret",))
    key = {"authorization": "Bearer secret"}
    for prefix in ("", "/llm/a"):
        assert live.client.get(f"{prefix}/health").status_code == 200
        assert live.client.get(f"{prefix}/v1/models").status_code == 401
        assert live.client.get(f"{prefix}/v1/models", headers=key).status_code == 200
        assert live.client.get(f"{prefix}/metrics").status_code == 401
        answer = live.post(f"{prefix}/v1/completions", {"prompt": "abc", "max_tokens": 1}, headers=key)
        assert answer.status_code == 200
    for path in ("/llm/v1/models", "/llm/av1/models", "/llm/a/llm/a/v1/models", "/llm/a/nothing"):
        assert live.client.get(path).status_code == 401
        assert live.client.get(path, headers=key).status_code == 404
    assert live.client.get("/llm/a").headers["location"] == "a/"  # the page, which needs no key
    assert live.client.get("/llm/a/").text == live.client.get("/").text
    for path in ("/llm/a/health/../v1/models", "/llm/a//v1/models", "/health/v1/models", "//llm/a/v1/models"):
        assert live.client.get(live.url + path).status_code == 401
    assert live.client.get("/openapi.json", headers=key).json()["servers"] == [{"url": "/llm/a"}]


def test_a_root_path_that_is_the_beginning_of_routes(serving: Callable[..., Live]) -> None:
    live = serving(root_path="/v1/")
    assert live.client.get("/v1/models").status_code == 200
    assert live.client.get("/v1/v1/models").status_code == 200


def test_which_browsers_may_call(serving: Callable[..., Live]) -> None:
    live = serving(allowed_origins=('["https://a.example"]',), allowed_methods=("GET",), allow_credentials=True)
    asked = {"origin": "https://a.example", "access-control-request-method": "GET"}
    allowed = live.client.options("/v1/models", headers=asked)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    assert allowed.headers["access-control-allow-credentials"] == "true"
    for more in ({"origin": "https://b.example"}, {"access-control-request-method": "POST"}):
        assert live.client.options("/v1/models", headers={**asked, **more}).status_code == 400


class Stamp:
    """Middleware: adds a header, the outer ones after the inner ones."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def stamped(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-stamp", b"class")]
            await send(message)

        await self.app(scope, receive, stamped)


async def only_with_a_badge(request: Any, call_next: Any) -> Any:
    """Middleware: refuses requests without a header, also those of public routes."""
    if "x-badge" not in request.headers:
        return JSONResponse({"error": "no badge"}, status_code=403)
    answer = await call_next(request)
    answer.headers["x-stamp"] = answer.headers["x-stamp"] + ", function"
    return answer


NOT_MIDDLEWARE = 5


def test_middleware_decides_who_gets_in(serving: Callable[..., Live]) -> None:
    here = "tests.server.test_serve"
    live = serving(middleware=(f"{here}.Stamp", f"{here}:only_with_a_badge"))
    assert live.client.get("/health").status_code == 403
    answer = live.client.get("/health", headers={"x-badge": "7"})
    assert (answer.status_code, answer.headers["x-stamp"]) == (200, "class, function")
    body = {"prompt": "abc", "max_tokens": 3, "stream": True}
    with live.client.stream("POST", "/v1/completions", json=body, headers={"x-badge": "7"}) as stream:
        assert [line for line in stream.iter_lines() if line][-1] == "data: [DONE]"


@pytest.mark.parametrize("path", ["nowhere.Thing", "tests.server.test_serve.NOT_MIDDLEWARE", "Thing"])
def test_wrong_middleware_is_refused_before_a_model_is_loaded(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "no/such-model", "--port", "0", "--middleware", path]) == 2
    assert "middleware" in capsys.readouterr().err


def test_any_model_name_will_do_if_the_server_says_so(serving: Callable[..., Live]) -> None:
    body = {"model": "gpt-4o", "prompt": "abc", "max_tokens": 1}
    assert serving().post("/v1/completions", body).status_code == 404
    assert serving(accept_any_model_name=True).post("/v1/completions", body).status_code == 200


def test_the_description_of_the_api_can_be_turned_off(serving: Callable[..., Live]) -> None:
    live = serving(disable_fastapi_docs=True)
    assert live.client.get("/openapi.json").status_code == 404
    assert live.client.get("/v1/models").status_code == 200


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("portt: 1", "did you mean --port"),
        ("kv-transfer-config: {a: 1}", "--kv-transfer-config: kv_transfer_config={'a': 1} is not supported"),
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
        {"root_path": "api"}, {"max_queued_requests": True}, {"ssl_cert_reqs": 2}, {"ssl_ciphers": "HIGH"},
        {"ssl_certfile": "c", "ssl_cert_reqs": 3}, {"ssl_certfile": "c", "ssl_cert_reqs": 1},
        {"enable_ssl_refresh": True}, {"allowed_headers": ("[",)},
    ],
)  # fmt: skip
def test_an_invalid_setting_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerConfig(**settings)


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "one, two")
    assert ServerConfig().api_key == ("one", "two")
    assert ServerConfig(api_key=("three",)).api_key == ("three",)
