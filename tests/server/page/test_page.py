"""The page's routes without a browser: its files, who may see what, and the feed against other views of the engine."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.config import EngineConfig
from quire.engine.stats import Metric
from quire.server.page.feed import MOST_OF_A_TENANT, rank_figures, slow_figures
from quire.server.page.files import FOLDER, page_files
from quire.server.page.frames import RankFigures
from tests.server.conftest import Host, Live

ROOT = Path(__file__).parents[3]
BOSS, USER, OTHER = ({"authorization": f"Bearer {key}"} for key in ("boss", "user", "other"))
STATES = ".c1s>"
"""The memory map's characters for the first states of a cell."""


@pytest.fixture
def keyed(serving: Callable[..., Live]) -> Live:
    return serving(admin_key="boss", api_key=("user", "other"))


def frames(live: Live, path: str, headers: dict[str, str] = {}, count: int = 1, hz: int = 10) -> list[dict[str, Any]]:  # noqa: B006
    answer = live.client.get(f"{path}?frames={count}&hz={hz}", headers=headers)
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: ")]


def apply(cells: bytearray, frame: dict[str, Any]) -> bytearray:
    """The map after a frame, as docs/page.md describes it."""
    change = frame["cells"]
    if "full" in change:
        return bytearray(base64.b64decode(change["full"]))
    data, at = base64.b64decode(change.get("data", "")), 0
    runs = change.get("runs", [])
    for start, length in zip(runs[::2], runs[1::2], strict=True):
        cells[start : start + length] = data[at : at + length]
        at += length
    assert at == len(data)
    return cells


# Files


def test_the_files_are_those_of_the_sources() -> None:
    """Otherwise: `make page`. The hash is what page/build.mjs computes."""
    folder = ROOT / "page"
    if not folder.exists():
        pytest.skip("an installed package has no sources of the page")
    names = [str(path.relative_to(folder)) for path in (folder / "src").rglob("*") if path.is_file()]
    digest = hashlib.sha256()
    for name in sorted([*names, "build.mjs", "package-lock.json", "tsconfig.json"]):
        digest.update(name.encode() + b"\0" + (folder / name).read_bytes() + b"\0")
    build = json.loads((FOLDER / "build.json").read_text())
    assert build["sources"] == digest.hexdigest(), "page/ has changed since the page was built: run make page"
    assert {path.name for path in FOLDER.iterdir()} == {*build["files"], "build.json"}
    for name in build["files"]:
        if found := re.fullmatch(r"\w+-([0-9a-f]{10})\.\w+", name):
            assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest().startswith(found.group(1))


def test_the_page_needs_no_key_and_loads_nothing_from_outside(keyed: Live) -> None:
    answer = keyed.client.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'" and policy["style-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'" and policy["base-uri"] == "'none'"
    assert answer.headers["x-frame-options"] == "DENY" and answer.headers["x-content-type-options"] == "nosniff"
    assert "set-cookie" not in answer.headers
    links = re.findall(r'(?:src|href)="([^"]*)"', answer.text)
    assert len(links) == 3 and all(link.startswith("page/files/") for link in links)
    for link in links:
        found = keyed.client.get(f"/{link}")
        assert found.status_code == 200 and "immutable" in found.headers["cache-control"]
        assert found.headers["x-content-type-options"] == "nosniff"
    kinds = {link.rpartition(".")[2]: keyed.client.get(f"/{link}").headers["content-type"] for link in links}
    assert kinds["js"].startswith("text/javascript") and kinds["css"].startswith("text/css")
    code = "".join(
        one.data.decode("utf-8", "replace") for name, one in page_files().items() if name.endswith((".js", ".css"))
    )
    assert not re.findall(r"https?://(?!www\.w3\.org)[\w.-]+\.\w+", code)
    assert keyed.client.get("/page/settings").json() == {
        "version": keyed.server.version, "needs_key": True, "has_admin": True,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["../build.json", "..%2Ffeed.py", "build.json", "%2e%2e/frames.py", "x" * 500])
def test_no_other_file_can_be_read(live: Live, name: str) -> None:
    answer = live.client.get(f"/page/files/{name}")
    assert answer.status_code == 404 and len(answer.text) < 400


def test_it_can_be_turned_off(serving: Callable[..., Live]) -> None:
    live = serving(page=False, admin_key="boss")
    for path in ("/", "/page/settings", "/v1/engine/feed"):
        assert live.client.get(path).status_code == 404
    assert frames(live, "/admin/feed", BOSS)[0]["scope"] == "admin"


def test_it_works_under_a_path(serving: Callable[..., Live]) -> None:
    live = serving(root_path="/models/a")
    moved = live.client.get("/models/a")
    assert moved.status_code == 308 and moved.headers["location"] == "a/"  # relative to /models/a
    page = live.client.get("/models/a/")
    link = re.findall(r'src="([^"]*)"', page.text)[0]
    assert live.client.get(f"/models/a/{link}").status_code == 200
    assert frames(live, "/models/a/v1/engine/feed")[0]["frame"] == 1


# Who sees what


def test_keys_are_needed_and_other_origins_refused(keyed: Live) -> None:
    for path in ("/admin/feed", "/admin/blocks/1", "/admin/requests/x/timeline"):
        assert keyed.client.get(path).status_code == 401
        assert keyed.client.get(path, headers=USER).status_code == 401
    for path in ("/v1/engine/feed", "/v1/engine/blocks/1", "/v1/engine/requests/x/timeline"):
        assert keyed.client.get(path).status_code == 401
    host = keyed.url.partition("://")[2]
    for path in ("/admin/feed?frames=1", "/admin/stats"):
        for foreign in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}, {"origin": "null"}):
            refused = keyed.client.get(path, headers={**BOSS, **foreign})
            assert refused.status_code == 403 and "access-control-allow-origin" not in refused.headers
        for own in ({"origin": f"http://{host}"}, {"sec-fetch-site": "same-origin", "origin": "https://proxy.example"}):
            assert keyed.client.get(path, headers={**BOSS, **own}).status_code == 200
    # A form of another site can send no JSON, and no key.
    form = {"content-type": "text/plain", "origin": "https://evil.example"}
    posted = keyed.client.post("/v1/chat/completions", content='{"messages": []}', headers=form)
    assert posted.status_code == 401
    assert keyed.client.options("/admin/feed", headers={"origin": "https://evil.example"}).status_code in (
        401,
        403,
        405,
    )


def test_a_tenant_sees_its_own_alone(keyed: Live) -> None:
    """The other tenant's request holds blocks and rows, and is a number at most."""

    def go(headers: dict[str, str], name: str) -> None:
        body = {"prompt": ["abcdefgh" * 6] * 12, "max_tokens": 190, "ignore_eos": True}
        keyed.post("/v1/completions", body, headers={**headers, "x-request-id": name})

    threads = [threading.Thread(target=go, args=each) for each in ((USER, "mine"), (OTHER, "theirs"))]
    for thread in threads:
        thread.start()
    seen: list[list[dict[str, Any]]] = []
    for _ in range(40):
        seen.append([frames(keyed, path, who)[0] for path, who in (("/v1/engine/feed", USER), ("/admin/feed", BOSS))])
        if seen[-1][0].get("hidden") and seen[-1][0].get("rows"):
            break
    for thread in threads:
        thread.join()
    mine, every = seen[-1]
    names = {row[3].partition("-")[0] for row in mine["rows"]}
    assert names == {"mine"} and mine["hidden"] and mine["counts"]["other"] and mine["scope"] == "tenant"
    assert "theirs" not in json.dumps([own for own, _ in seen]) and "tenants" not in mine
    assert {row[3].partition("-")[0] for row in every["rows"]} <= {"mine", "theirs"} and every["tenants"]
    path = "/requests/theirs/timeline"
    assert keyed.client.get(f"/v1/engine{path}", headers=USER).status_code == 404
    assert keyed.client.get(f"/v1/engine{path}", headers=OTHER).json()["finish_reason"] == "length"
    assert keyed.client.get(f"/admin{path}", headers=BOSS).json()["id"].startswith("theirs-")


def test_viewers_are_bounded_and_leave(keyed: Live) -> None:
    with httpx.Client(base_url=keyed.url, limits=httpx.Limits(max_connections=100), timeout=30) as client:
        streams = [client.stream("GET", "/v1/engine/feed", headers=USER) for _ in range(MOST_OF_A_TENANT)]
        lines = [stream.__enter__().iter_lines() for stream in streams]
        assert all(next(one).startswith("data: ") for one in lines)
        refused = client.get("/v1/engine/feed?frames=1", headers=USER)
        assert refused.status_code == 429 and "16" in refused.text
        assert client.get("/v1/engine/feed?frames=1", headers=OTHER).status_code == 200
        assert keyed.server.feed.num_viewers == MOST_OF_A_TENANT
        for stream in streams:
            stream.__exit__(None, None, None)
    deadline = time.monotonic() + 10
    while keyed.server.feed.num_viewers and time.monotonic() < deadline:
        time.sleep(0.05)
    assert keyed.server.feed.num_viewers == 0


def test_a_server_that_stops_does_not_wait_for_viewers(host: Host) -> None:
    live, stop = host.start(shutdown_timeout=60.0)
    client = httpx.Client(base_url=live.url, timeout=30)
    with client.stream("GET", "/v1/engine/feed") as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        begin = time.monotonic()
        stop()
        assert time.monotonic() - begin < 20
        for _ in lines:
            pass
    client.close()


def test_without_viewers_the_engine_is_asked_nothing(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    replica = live.server.llm.replicas[0]
    view = replica.view

    async def count() -> Any:
        nonlocal asked
        asked += 1
        return await view()

    monkeypatch.setattr(replica, "view", count)
    with live.client.stream("GET", "/v1/engine/feed?hz=10&frames=4") as answer:
        for _ in answer.iter_lines():
            pass
    after = asked
    assert after >= 4
    time.sleep(0.5)
    assert asked == after  # a viewer that left is not served
    live.run(_three_viewers(live))
    assert asked - after <= 8  # three viewers share what one asks for


async def _three_viewers(live: Live) -> None:
    import asyncio

    from quire.server.page.frames import Scope

    async def watch() -> None:
        count = 0
        async for _ in live.server.feed.watch(Scope(""), 0, 10):
            count += 1
            if count == 5:
                return

    await asyncio.gather(*(watch() for _ in range(3)))


@pytest.mark.parametrize("query", ["hz=0", "hz=11", "hz=x", "replica=1", "replica=-1", "frames=-1"])
def test_wrong_parameters_are_refused(live: Live, query: str) -> None:
    answer = live.client.get(f"/v1/engine/feed?{query}")
    assert answer.status_code == 400 and query.partition("=")[0] in answer.json()["error"]["message"]


# What is shown


def test_slow_figures_are_those_of_the_metrics() -> None:
    """Of two engines: summed, and by what they are about."""
    mixture = [Metric("quire:expert_tokens", "counter", 12.0,
                      series=((("0", "0"), 6.0), (("0", "1"), 2.0), (("3", "0"), 0.0), (("3", "1"), 4.0)))]  # fmt: skip
    power = [
        Metric("quire:energy_joules", "counter", 9.0, series=((("prompt",), 4.0), (("decode",), 5.0))),
        Metric("quire:power_watts", "gauge", 5.0), Metric("quire:power_budget_watts", "gauge", 20.0),
        Metric("quire:num_requests_running", "gauge", 3.0), Metric("quire:adapter_loads", "counter", 2.0),
    ]  # fmt: skip
    told = slow_figures([[*mixture, *power], power], ["serving", "starting"], "serving", 1, RankFigures(2, 1, 2))
    assert told.expert_map is not None and told.expert_map.layers == ["0", "3"] and told.expert_map.experts == 2
    assert list(base64.b64decode(told.expert_map.loads)) == [48, 16, 0, 64]  # 32: the mean of the layer
    assert told.energy["joules"] == 18 and told.energy["prompt"] == 8 and told.energy["watts"] == 10
    assert told.adapters["loads"] == 4
    assert [(one.status, one.running) for one in told.replicas] == [("serving", 3), ("starting", 3)]
    assert slow_figures([[]], ["serving"], "serving", 0, None).expert_map is None
    assert rank_figures(EngineConfig("m", tensor_parallel_size=2)) == RankFigures(2, 1, 1)
    assert rank_figures(EngineConfig("m")) is None


@pytest.fixture
def sessions(keyed: Live) -> Iterator[Live]:
    """Sessions of one tenant, one of them a fork that shares blocks."""
    for name, text in (("s1", "x" * 70), ("s2", "y" * 40)):
        keyed.post("/v1/sessions", {"id": name}, headers=USER)
        body = {"input": text, "max_tokens": 20, "ignore_eos": True}
        assert keyed.post(f"/v1/sessions/{name}/generate", body, headers=USER).status_code == 200
    assert keyed.post("/v1/sessions/s1/fork", {"id": "s3"}, headers=USER).status_code == 200
    body = {"input": "z", "max_tokens": 5, "ignore_eos": True}
    assert keyed.post("/v1/sessions/s3/generate", body, headers=USER).status_code == 200
    yield keyed
    for name in ("s1", "s2", "s3"):
        keyed.client.delete(f"/v1/sessions/{name}", headers=USER)


def test_the_map_agrees_with_the_memory_map(sessions: Live) -> None:
    shown = frames(sessions, "/admin/feed", BOSS)[0]
    known = sessions.client.get("/admin/memory", headers=BOSS).json()
    cells = apply(bytearray(), shown)
    assert "".join(STATES[cell & 7] for cell in cells) == known["blocks"]
    device = known["device"]
    expected = {
        "empty": device["empty"],
        "cached": device["cached"],
        "held": device["held"],
        "shared": device["shared"],
    }
    assert shown["counts"] == {name: count for name, count in expected.items() if count}
    owners = {owner["name"]: (owner["blocks"], owner["shared"]) for owner in known["owners"]["largest"]}
    assert {row[3]: (row[10], row[11]) for row in shown["rows"]} == owners and owners["s3"][1] > 0
    of_tenant = frames(sessions, "/v1/engine/feed", OTHER)[0]
    assert not of_tenant.get("rows")
    assert of_tenant["counts"]["other"] == device["held"] + device["shared"]
    shared = next(place for place, cell in enumerate(cells) if cell & 7 == 3)
    block = sessions.client.get(f"/admin/blocks/{shared + 1}", headers=BOSS).json()
    assert {user["name"] for user in block["users"]} == {"s1", "s3"} and block["references"] == 2
    hidden = sessions.client.get(f"/v1/engine/blocks/{shared + 1}", headers=OTHER).json()
    assert hidden["users"] == [] and hidden["references"] == 0


def test_differences_add_up_and_figures_agree_with_metrics(keyed: Live) -> None:
    def go() -> None:
        body = {"prompt": ["abcdefgh" * 4, "ijklmnop" * 5] * 12, "max_tokens": 150, "ignore_eos": True}
        keyed.post("/v1/completions", body, headers=USER)

    thread = threading.Thread(target=go)
    cells, last, steps, whole = bytearray(), {}, [], 0
    with keyed.client.stream("GET", "/admin/feed?hz=10", headers=BOSS) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            frame = json.loads(line[6:])
            if not last:
                thread.start()
            assert not last or frame["frame"] == last["frame"] + 1
            cells, last = apply(cells, frame), frame
            whole += frame.get("is_whole", False)
            steps += frame.get("steps", [])
            if not thread.is_alive() and not frame["counters"]["running"]:
                break
    thread.join()
    assert whole == 1
    numbers = [step[0] for step in steps]
    assert numbers == sorted(set(numbers))
    metrics = keyed.engine_metrics()
    assert last["counters"]["generated_tokens"] == metrics["quire:generation_tokens"]
    assert last["counters"]["steps"] == metrics["quire:steps"]
    again = frames(keyed, "/admin/feed", BOSS)[0]
    assert apply(bytearray(), again) == cells
    assert len(cells) == metrics["quire:num_blocks_free"]


def test_the_queue_has_reasons(keyed: Live) -> None:
    def go() -> None:
        keyed.post("/v1/completions", {"prompt": ["abc"] * 60, "max_tokens": 150, "ignore_eos": True}, headers=USER)

    thread = threading.Thread(target=go)
    thread.start()
    found: dict[str, Any] = {}
    while thread.is_alive() and not found:
        frame = frames(keyed, "/v1/engine/feed", USER)[0]
        if frame.get("queue") and frame["counters"]["running"] == 16:
            found = frame
    thread.join()
    assert found["queue"][0]["reason"] == "rows" and "all 16 rows" in found["queue"][0]["detail"]
    assert found["queue"][1]["reason"] == "order"


def test_a_timeline_has_every_step_of_the_request(keyed: Live) -> None:
    """Its tokens add up to those of the response, and the trace has the same steps."""
    body = {"prompt": "abcdefgh" * 10, "max_tokens": 40, "ignore_eos": True, "n": 2}
    usage = keyed.post("/v1/completions", body, headers={**USER, "x-request-id": "told"}).json()["usage"]
    told = keyed.client.get("/admin/requests/cmpl-told/timeline", headers=BOSS).json()
    assert told["prompt_tokens"] == usage["prompt_tokens"] and told["finish_reason"] == "length" and told["is_whole"]
    kinds = [event["kind"] for event in told["events"] if event["sequence"] == 0]
    assert kinds == ["waiting", "admitted", "drawn", "finished"]
    cached = next(event["value"] for event in told["events"] if event["kind"] == "admitted")
    chunks = [step for step in told["steps"] if step["is_prompt"]]
    assert cached + sum(step["computed"] for step in chunks) == usage["prompt_tokens"]
    drawn = sum(step["drew"] for step in told["steps"]) + sum(event["kind"] == "drawn" for event in told["events"])
    assert drawn == usage["completion_tokens"] == 80
    for sequence in (0, 1):
        own = [step for step in told["steps"] if step["sequence"] == sequence]
        assert all(one["end"] <= two["start"] + 1e-9 for one, two in itertools.pairwise(own))
    trace = keyed.client.get("/admin/requests/told/timeline?format=perfetto", headers=BOSS).json()
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["tid"] % 2]
    assert [span["args"]["step"] for span in spans] == [step["step"] for step in told["steps"]]
    assert keyed.client.get("/admin/requests/told/timeline?format=x", headers=BOSS).status_code == 400
