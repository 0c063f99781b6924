"""The page in a real browser, with a real server and engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import write_tiny_model
from tests.media.files import encoded, noise
from tests.server.conftest import Host, Live
from tests.server.page.browser import Browser
from tests.server.page.proxy import proxied
from tests.server.scripted import Script, call
from tests.server.served import served

AXE = (Path(__file__).parent / "vendor" / "axe.min.js").read_text()
ENDLESS = {"maxTokens": 100_000, "extra": '{"ignore_eos": true}'}
HOSTILE = (
    """<script>window.hacked = 1</script>
<img src=x onerror="window.hacked = 2"><svg onload="window.hacked = 3"><iframe srcdoc="<script>1</script>"></iframe>

[a](javascript:window.hacked=4) [b](JAVASCRIPT:alert(1)) [c](data:text/html,<script>1</script>) [d](https://example.org/x)
![i](https://example.org/tracker.png) <a href="javascript:alert(1)">e</a> <style>body{display:none}</style>

```html
<script>window.hacked = 5</script>
```

| a | b |
|---|---|
| <b onclick="window.hacked = 6">x</b> | y |

"""
    + "w" * 30_000
    + "\x00\x1b[31m\u202egnp.exe\x07 "
    + "**" * 3000
)


def open_page(browser: Browser, live: Live, view: str = "chat", **parameters: Any) -> None:
    browser.go(f"{live.url}/#{view}")
    if parameters:
        browser.run("localStorage.setItem('quire.parameters', arguments[0])", json.dumps(parameters))
        browser.reload()
    browser.wait(lambda: browser.exists("main"))


def say(browser: Browser, text: str) -> None:
    browser.type("#draft", text)
    browser.click("#send")


def await_replies(browser: Browser, count: int) -> None:
    script = "return document.querySelectorAll('.bubble.assistant .stats').length"
    browser.wait(lambda: not browser.exists("#stop") and browser.run(script) >= count, f"there are not {count} replies")


@pytest.fixture
def long_live(long_host: Host) -> Any:
    live, stop = long_host.start()
    yield live
    live.assert_idle()
    stop()


def faults(browser: Browser) -> list[str]:
    """What axe finds wrong, if it is serious."""
    # Through the debugger, as a page's own policy would not allow it.
    browser.devtools("Runtime.evaluate", {"expression": AXE})
    script = """
        const done = arguments[0], told = one => one.nodes.slice(0, 3).map(node => node.target + node.failureSummary);
        axe.run(document, {resultTypes: ['violations']}).then(found => done(found.violations
            .filter(one => ['serious', 'critical'].includes(one.impact)).map(one => one.id + ': ' + told(one))));
    """
    found: list[str] = browser.run_async(script)
    return found


def test_what_make_serve_prints_leads_to_a_first_answer(browser: Browser) -> None:
    """`make serve` runs `quire serve` without flags: the default model, no key, no set-up."""
    with served("--port", "0", "--max-num-seqs", "2") as server:
        browser.go(server.wait_for(r"page\s+(http://\S+/)\s", 300).group(1))
        browser.click_text("List three uses of a lighthouse.")
        browser.wait(lambda: len(browser.text(".bubble.assistant .markdown").strip()) > 3, "there is no answer", 120)
        browser.run("document.querySelector('#stop')?.click()")  # unless it has ended
        browser.wait(lambda: not browser.exists("#stop"))
        assert "first after" in browser.text(".stats") and not browser.exists(".bubble .error")
        browser.click("#tab-engine")
        browser.wait_for_text(".legend", "cached")
        assert not browser.exists("#keys")
        browser.go("about:blank")


def test_a_stranger_chats_regenerates_edits_and_reloads(live: Live, browser: Browser) -> None:
    open_page(browser, live)
    browser.wait_for_text(".hello", "Say something")
    assert faults(browser) == []
    say(browser, "Hello")
    await_replies(browser, 1)
    assert "tokens" in browser.text(".stats") and "first after" in browser.text(".stats")
    browser.click_text("Regenerate")
    browser.wait_for_text(".branches", "2 of 2")
    await_replies(browser, 1)
    browser.click("button[aria-label='Previous branch']")
    browser.wait_for_text(".branches", "1 of 2")
    shown = browser.text(".bubble.assistant .markdown")
    browser.reload()
    browser.wait_for_text(".list .current", "Hello")
    assert browser.text(".bubble.assistant .markdown") == shown and "1 of 2" in browser.text(".branches")
    browser.click_text("Edit")
    browser.type("textarea[aria-label='Edit message']", ", again")
    browser.click_text("Send as a branch")
    browser.wait_for_text(".bubble.user", "Hello, again")
    await_replies(browser, 1)
    assert "2 of 2" in browser.text(".bubble.user .branches")
    assert faults(browser) == []
    browser.click_text("Timeline")
    browser.wait_for_text("#events", "finished")
    assert "admitted" in browser.text("#events") and "drawn" in browser.text("#events")
    assert faults(browser) == []


def test_a_reply_is_stopped(long_live: Live, browser: Browser) -> None:
    open_page(browser, long_live, **ENDLESS)
    say(browser, "Go on")
    browser.wait(lambda: "tokens/s" in browser.text(".stats"))
    assert long_live.engine_metrics()["quire:num_requests_running"] == 1
    browser.click("#stop")
    browser.wait_for_text(".bubble.assistant", "Stopped.")
    long_live.assert_idle()
    assert browser.text(".bubble.assistant .markdown")
    assert browser.exists("#send")


def test_a_reply_goes_on_while_another_view_is_shown(long_live: Live, browser: Browser) -> None:
    open_page(browser, long_live, **ENDLESS)
    say(browser, "Go on")
    browser.wait(lambda: "tokens/s" in browser.text(".stats"))
    browser.click("#tab-engine")
    browser.wait_for_text("#running", "1")
    assert not browser.run("return document.querySelector('#draft').checkVisibility()")
    browser.click("#tab-chat")
    before = len(browser.text(".bubble.assistant .markdown"))
    browser.wait(lambda: len(browser.text(".bubble.assistant .markdown")) > before)
    browser.reload()  # leaves it: what was said is kept
    browser.wait_for_text(".bubble.user", "Go on")
    browser.wait_for_text(".bubble.assistant", "Stopped.")
    long_live.assert_idle()


def test_branches_are_forks_of_sessions(long_live: Live, browser: Browser) -> None:
    open_page(browser, long_live, usesSessions=True, maxTokens=20, extra='{"ignore_eos": true}')
    say(browser, "x" * 60)
    await_replies(browser, 1)
    say(browser, "second")
    await_replies(browser, 2)
    browser.run(
        "[...document.querySelectorAll('.bubble.user button')].filter(e => e.textContent === 'Edit').at(-1).click()"
    )
    browser.type("textarea[aria-label='Edit message']", " thought")
    browser.click_text("Send as a branch")
    browser.wait_for_text(".bubble.user", "second thought")
    await_replies(browser, 2)
    browser.wait_for_text("#shared", "shared between branches")
    sessions = {one["id"]: one for one in long_live.client.get("/v1/sessions").json()["data"]}
    forks = [one for one in sessions.values() if one["parent"]]
    assert len(sessions) == 2 and len(forks) == 1 and forks[0]["forked_at"] < sessions[forks[0]["parent"]]["num_tokens"]
    for name in sessions:
        long_live.client.delete(f"/v1/sessions/{name}")


def test_blocks_appear_and_go_and_waiting_requests_say_why(live: Live, browser: Browser) -> None:
    open_page(browser, live, "engine")
    browser.wait_for_text(".live", "Live")
    held = """
        const found = [...document.querySelectorAll('.legend li')].find(e => e.textContent.startsWith('held'));
        return found ? Number(found.querySelector('b').textContent) : -1;
    """
    assert browser.run(held) == 0
    body = {"prompt": ["abcdefgh" * 4] * 400, "max_tokens": 200, "ignore_eos": True}
    stopped = threading.Event()

    def go() -> None:
        with (
            httpx.Client(timeout=60) as client,
            client.stream("POST", f"{live.url}/v1/completions", json={**body, "stream": True}) as answer,
        ):
            for _ in answer.iter_lines():
                if stopped.is_set():
                    return

    thread = threading.Thread(target=go)
    thread.start()
    try:
        browser.wait(lambda: browser.run(held) > 0, "no block is held")
        browser.wait_for_text("#queue .badge.rows", "rows")
        assert "all 16 rows are in use" in browser.text("#queue") and "1 request is before it" in browser.text("#queue")
        assert browser.text("#running") == "16"
        browser.run("document.querySelector('#blocks').focus()")
        browser.type("#blocks", "\ue014")  # the right arrow
        browser.wait_for_text("#tip", "Block 1:")
        assert faults(browser) == []
    finally:
        stopped.set()
        thread.join(60)
    browser.wait(lambda: browser.run(held) == 0, "blocks stay held")
    browser.wait(lambda: not browser.exists("#queue"), "requests stay in the queue")


def test_what_a_model_writes_is_harmless(scripted: Live, script: Script, browser: Browser) -> None:
    script.answer = lambda prompt: HOSTILE
    open_page(browser, scripted)
    say(browser, "<img src=x onerror='window.hacked = 7'> hello")
    await_replies(browser, 1)
    assert browser.run("return window.hacked ?? null") is None
    assert browser.run("return document.querySelectorAll('.messages :is(script, iframe, img, svg, style)').length") == 0
    links = browser.run(
        "return [...document.querySelectorAll('.messages a')].map(a => [a.getAttribute('href'), a.rel, a.target])"
    )
    assert links and {tuple(link) for link in links} <= {
        ("https://example.org/x", "noopener noreferrer nofollow", "_blank"),
        ("https://example.org/tracker.png", "noopener noreferrer nofollow", "_blank"),
    }  # fmt: skip
    shown = browser.text(".bubble.assistant .markdown")
    assert "<script>window.hacked = 1</script>" in shown and "(javascript:window.hacked=4)" in shown
    assert "\u2400" in shown and "\u202e" not in shown and "\x1b" not in shown
    wide = browser.run("return [document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1]
    assert "<img src=x" in browser.text(".bubble.user")


def thumbs(browser: Browser) -> list[tuple[int, int]]:
    """Width and length of the images that will be sent."""
    script = "return [...document.querySelectorAll('.thumbs img')].map(e => [e.naturalWidth, e.src.length])"
    return [tuple(one) for one in browser.run(script)]


def test_images_are_chosen_pasted_dropped_and_seen(seeing: Live, browser: Browser, tmp_path: Path) -> None:
    png, bmp, large = encoded(noise(40, 24, 1)), encoded(noise(30, 30, 2), "BMP"), encoded(noise(2600, 1400, 3), "JPEG")
    (tmp_path / "a.png").write_bytes(png)
    (tmp_path / "broken.png").write_bytes(b"no image at all")
    open_page(browser, seeing, maxTokens=5, extra='{"ignore_eos": true}')
    browser.wait(lambda: browser.exists("#image"))
    browser.choose_files("#image", tmp_path / "a.png", tmp_path / "broken.png")
    browser.wait_for_text("#image-problem", "broken.png is not an image")
    assert not browser.give_file("#draft", "paste", "b.bmp", bmp, "image/bmp")
    browser.wait(lambda: len(thumbs(browser)) == 2 and not browser.exists("#image-problem"))
    assert not browser.give_file(".messages", "dragover", "c.jpg", large, "image/jpeg")
    assert not browser.give_file(".messages", "drop", "c.jpg", large, "image/jpeg")
    browser.wait(lambda: len(thumbs(browser)) == 3)
    assert [width for width, _ in thumbs(browser)] == [40, 30, 2048]
    assert faults(browser) == []
    browser.click("button[aria-label='Remove image 2']")
    browser.wait(lambda: len(thumbs(browser)) == 2)
    say(browser, "what?")
    await_replies(browser, 1)
    assert "5 tokens" in browser.text(".stats") and not browser.exists(".bubble .error")
    cached = "return [...document.querySelectorAll('.bubble.user img')].map(e => e.naturalWidth)"
    assert browser.run(cached) == [40, 2048]
    # An image without text, and more of them than the server takes.
    browser.choose_files("#image", tmp_path / "a.png")
    browser.wait(lambda: thumbs(browser) and browser.run("return !document.querySelector('#send').disabled"))
    browser.click("#send")
    await_replies(browser, 2)
    browser.choose_files("#image", tmp_path / "a.png")
    browser.wait(lambda: thumbs(browser))
    browser.click("#send")
    browser.wait_for_text(".bubble.assistant .error", "at most 3")
    browser.reload()
    browser.wait(lambda: browser.run(cached)[:2] == [40, 2048])
    assert any("400" in problem for problem in browser.problems())


def test_a_model_that_reads_text_refuses_images(live: Live, browser: Browser) -> None:
    open_page(browser, live)
    browser.wait(lambda: browser.exists("option"))
    assert not browser.exists("#image")
    assert not browser.give_file("#draft", "paste", "a.png", encoded(noise(20, 20, 1)), "image/png")
    browser.wait_for_text("#image-problem", "tiny reads text only: it cannot see images")
    assert thumbs(browser) == [] and faults(browser) == []
    say(browser, "Hello")
    await_replies(browser, 1)
    assert not browser.exists("#image-problem")


def test_everything_is_reached_with_the_keyboard(long_live: Live, browser: Browser) -> None:
    """From the address bar: a chat, its timeline, and the map of blocks, with Tab, Enter and the arrow keys."""
    tab, enter, right, escape = "\ue004", "\ue007", "\ue014", "\ue00c"

    def go_to(name: str) -> None:
        for _ in range(60):
            if browser.focused() == name:
                return
            browser.press(tab)
        raise AssertionError(f"Tab does not reach {name}")

    open_page(browser, long_live, **ENDLESS)
    browser.wait(lambda: browser.exists("option"))
    go_to("draft")
    browser.press(*"Hello", enter)
    browser.wait(lambda: "tokens/s" in browser.text(".stats"))
    assert browser.focused() == "draft"
    browser.press(escape)
    browser.wait_for_text(".bubble.assistant", "Stopped.")
    long_live.assert_idle()
    go_to("Timeline")
    browser.press(enter)
    browser.wait(lambda: browser.exists("#timeline"))
    go_to("timeline")
    browser.press(right, right)
    browser.wait_for_text("#step", "The whole step computed 1 decode")
    go_to("tab-engine")
    browser.press(enter)
    browser.wait(lambda: browser.exists("#blocks"))
    go_to("blocks")
    browser.press(right, right)
    browser.wait_for_text("#tip", "Block 2:")
    browser.press(escape)
    browser.wait_for_text("#tip", "use the arrow keys")


def test_thinking_and_tool_calls_are_folded(long_host: Host, script: Script, browser: Browser) -> None:
    live, stop = long_host.start(reasoning_parser="qwen3", tool_call_parser="hermes")
    try:
        script.answer = lambda prompt: (
            f"<think>\nHm <b>one</b> moment\n</think>\n\nI look.{call('weather', city='<i>Bern')}"
        )
        tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
        open_page(browser, live, extra=json.dumps({"tools": [tool]}))
        say(browser, "Is it raining?")
        await_replies(browser, 1)
        folds = "return [...document.querySelectorAll('.bubble.assistant .fold')].map(e => [e.open, e.textContent])"
        (is_open, thinking), (_, called) = browser.run(folds)
        assert not is_open and "Hm <b>one</b> moment" in thinking and "Tool call: weather" in called
        assert '"<i>Bern"' in called and "I look." in browser.text(".bubble.assistant > .markdown")
        assert "think>" not in browser.text(".bubble.assistant > .markdown")
        assert faults(browser) == []
    finally:
        stop()


def test_keys_are_asked_for(serving: Callable[..., Live], browser: Browser) -> None:
    live = serving(api_key=("user",), admin_key="boss")
    open_page(browser, live)
    browser.wait_for_text(".dialog", "API key")
    assert faults(browser) == []
    browser.type("#key-user", "wrong")
    browser.click("#key-save")
    browser.wait_for_text(".dialog .error", "not valid")
    browser.run("document.querySelector('#key-user').select()")
    browser.type("#key-user", "user")
    browser.click("#key-save")
    browser.wait(lambda: not browser.exists(".dialog") and browser.exists("option"))
    browser.click("#tab-engine")
    browser.wait_for_text(".engine .bar", "Your own requests")
    browser.click_text("Use an admin key")
    browser.type("#key-admin", "boss")
    browser.click("#key-save")
    browser.wait_for_text(".engine .bar", "Everything is shown")
    assert browser.run("return document.cookie") == ""
    assert (
        browser.run("return Object.keys(localStorage).filter(name => localStorage[name].includes('boss')).length") == 0
    )
    assert any("401" in problem for problem in browser.problems())  # the wrong key; the fixture wants no other


def test_it_cannot_be_framed_or_read_by_another_origin(
    live: Live, serving: Callable[..., Live], browser: Browser
) -> None:
    other = serving()  # another port is another origin
    open_page(browser, other)
    framed = browser.run_async(
        """
        const done = arguments[1], frame = document.createElement('iframe');
        frame.src = arguments[0] + '/';
        document.body.append(frame);
        const look = () => { try { return frame.contentDocument?.title ?? 'blocked' } catch { return 'blocked' } };
        setTimeout(() => { const seen = look(); frame.remove(); done(seen) }, 700);
        """,
        live.url,
    )
    assert framed in ("blocked", "")
    browser.go("about:blank")
    fetched = """
        const done = arguments[2], body = arguments[1];
        const how = body ? {method: 'POST', headers: {'Content-Type': 'application/json'}, body} : {};
        fetch(arguments[0], how).then(one => done('read ' + one.status), () => done('refused'));
    """
    assert browser.run_async(fetched, f"{live.url}/v1/engine/feed?frames=1", None) == "refused"
    assert browser.run_async(fetched, f"{live.url}/v1/chat/completions", '{"messages": []}') == "refused"
    assert browser.problems()  # the browser says that it blocked them


def test_it_works_behind_a_proxy_below_a_path(live: Live, browser: Browser) -> None:
    """The proxy strips the path, and the server does not know it."""
    with proxied(live.url, "/team/llm") as url:
        browser.go(f"{url}/#chat")
        browser.wait(lambda: browser.exists("option"))
        say(browser, "Hello")
        await_replies(browser, 1)
        browser.click("#tab-engine")
        browser.wait_for_text(".live", "Live")
        browser.run("document.querySelector('#blocks').focus()")
        browser.press("\ue014")
        browser.wait_for_text("#tip", "Block 1:")
        browser.click("#tab-chat")
        browser.click_text("Timeline", ".bubble button")
        browser.wait_for_text("#events", "finished")
        browser.click("#tab-learn")
        browser.click("#try")
        browser.wait_for_text("#lesson-end", "It has ended")
        browser.go("about:blank")


def test_the_tour_runs_on_this_engine(live: Live, browser: Browser) -> None:
    open_page(browser, live, "learn")
    for _ in range(2):
        browser.click("#next")
    browser.wait_for_text(".lesson h2", "Shared beginnings")
    browser.click("#try")
    browser.wait_for_text("#lesson-end", "computed once")
    assert live.engine_metrics()["quire:prefix_cache_hits"] > 0
    assert faults(browser) == []


def test_phones_and_dark_colours(live: Live, browser: Browser) -> None:
    browser.resize(360, 740)
    browser.set_dark(True)
    for view in ("chat", "engine", "timeline", "learn"):
        open_page(browser, live, view)
        if view in ("engine", "learn"):
            browser.wait(lambda: browser.exists("#blocks"))
        wide = browser.run("return [document.documentElement.scrollWidth, innerWidth]")
        assert wide[0] <= wide[1], view
        assert faults(browser) == [], view
    browser.click("#theme")
    browser.wait(lambda: browser.run("return document.documentElement.dataset.theme") == "light")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_100_000_blocks_and_1_000_rows_are_drawn_20_times_a_second(tmp_path: Path, browser: Browser) -> None:
    """While all rows decode, in less than 300 MB. Prints its figures."""
    folder = write_tiny_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 14}))
    host = Host(folder, num_gpu_blocks_override=100_000, max_num_seqs=1000, max_num_batched_tokens=4096)
    live, stop = host.start(max_queued_requests=4096)
    stopped = threading.Event()

    def go() -> None:
        body = {"prompt": ["abc"] * 1000, "max_tokens": 16_000, "ignore_eos": True, "stream": True}
        with (
            httpx.Client(timeout=600) as client,
            client.stream("POST", f"{live.url}/v1/completions", json=body) as answer,
        ):
            for _ in answer.iter_lines():
                if stopped.is_set():
                    return

    thread = threading.Thread(target=go)
    thread.start()
    try:
        open_page(browser, live, "engine")
        browser.wait(lambda: browser.text("#running") == "1000", "the rows are not in use", 120)
        count = (
            "const done = arguments[0]; let n = 0; const from = performance.now(); const tick = () => { n += 1;"
            " const s = (performance.now() - from) / 1000; s < 8 ? requestAnimationFrame(tick) : done(n / s) };"
            " requestAnimationFrame(tick)"
        )
        rate = browser.run_async(count)
        used = browser.memory() / 2**20
        cells = browser.run("return document.querySelector('#blocks').getAttribute('aria-label')")
        print(f"\n{rate:.1f} frames a second, {used:.0f} MiB of the page's process, {cells}")
        assert "100000 blocks" in cells
        assert rate >= 20 and 0 < used < 300
    finally:
        stopped.set()
        thread.join(120)
        browser.go("about:blank")
        live.assert_idle(120)
        stop()
        host.close()
