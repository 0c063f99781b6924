"""GET /admin/memory over a real socket, and `quire inspect --url`, which draws it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.cli.inspect_memory import fetch
from quire.cli.main import main
from quire.messages.memory_map import MemoryMap
from tests.server.conftest import Live

ADMIN = {"authorization": "Bearer boss"}
BODY = {"prompt": "the world is on the word " * 4, "n": 4, "max_tokens": 120, "ignore_eos": True}


@contextmanager
def constant_traffic(live: Live, key: str) -> Iterator[None]:
    """A client that repeats the same request while the block runs."""
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            live.post("/v1/completions", BODY, headers={"authorization": f"Bearer {key}"})

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_running_server_reports_which_requests_share_blocks(
    serving: Callable[..., Live], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = serving(api_key=("user",), admin_key="boss")
    rest = MemoryMap.from_json(live.client.get("/admin/memory", headers=ADMIN).content, "it")
    assert (rest.device.used, rest.device.capacity, rest.owners.largest) == (0, 256, [])
    saved, command = tmp_path / "map.json", ["inspect", "--url", f"{live.url}/v1/", "--api-key", "boss"]
    with constant_traffic(live, "user"):
        for _ in range(100):  # between two requests the map is empty
            capsys.readouterr()
            assert main([*command, "--save", str(saved)]) == 0
            drawn, found = capsys.readouterr().out, MemoryMap.from_json(saved.read_bytes(), "it")
            if found.owners.running == 4:
                break
    device = found.device
    assert device.empty + device.cached + device.held + device.shared + device.moving == 256
    assert {owner.kind for owner in found.owners.largest} == {"running"}
    assert {owner.tenant[:4] for owner in found.owners.largest} == {"key-"}
    assert found.sharing.most == found.owners.running == len(found.owners.largest) == 4
    assert found.sharing.saved == 3 * device.shared > 0
    assert device.block_bytes == live.server.llm.info.block_bytes > 0
    assert live.url in drawn
    assert main(["inspect", "--snapshot", str(saved)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == drawn.splitlines()[1:]


def test_missing_permission_is_reported_with_what_is_missing(
    serving: Callable[..., Live], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    live, plain = serving(api_key=("user",), admin_key="boss"), serving()
    monkeypatch.delenv("QUIRE_ADMIN_KEY", raising=False)
    for arguments, said in [
        ([live.url], "needs the server's --admin-key"),
        ([live.url, "--api-key", "user"], "needs the server's --admin-key"),
        ([plain.url], "has no /admin/memory: start the server with --admin-key"),
    ]:
        assert main(["inspect", "--url", *arguments]) == 2
        complaint = capsys.readouterr().err
        assert said in complaint
        assert complaint.count("\n") == 1
    monkeypatch.setenv("QUIRE_ADMIN_KEY", "boss")
    assert main(["inspect", "--url", live.url]) == 0
    assert main(["inspect", "--url", live.url, "--save", "/nowhere/map.json"]) == 2
    assert "/nowhere/map.json cannot be written" in capsys.readouterr().err


def test_watching_continues_until_interrupted(
    serving: Callable[..., Live], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    live, pauses = serving(admin_key="boss"), iter((None, None, KeyboardInterrupt))

    def pause(seconds: float) -> None:
        assert seconds == 1.5
        if (what := next(pauses)) is not None:
            raise what

    monkeypatch.setattr("quire.cli.inspect_memory.time.sleep", pause)
    assert main(["inspect", "--url", live.url, "--api-key", "boss", "--watch", "1.5"]) == 0
    monkeypatch.undo()
    assert capsys.readouterr().out.count(f" of {live.url}") == 3


def test_reading_the_map_does_not_affect_requests(serving: Callable[..., Live]) -> None:
    live = serving(admin_key="boss")

    async def many() -> None:
        await asyncio.gather(*(live.server.llm.memory_map() for _ in range(20)))

    begin = time.perf_counter()
    live.run(many())
    assert time.perf_counter() - begin < 5
    assert fetch(live.url, "boss").device.used == 0
    described = live.client.get("/openapi.json").json()["paths"]["/admin/memory"]["get"]
    assert described["security"] == [{"admin": []}]
    assert described["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].endswith("/MemoryMap")
