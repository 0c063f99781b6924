"""A thin WebDriver client: the machine's own Chromium, driven over chromedriver. It downloads nothing."""

from __future__ import annotations

import base64
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps",
    "--disable-extensions", "--mute-audio", "--hide-scrollbars", "--enable-precise-memory-info",
    "--force-color-profile=srgb", "--disable-features=Translate,OptimizationHints,MediaRouter",
]  # fmt: skip
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
SECONDS = 30.0
"""Patience of `wait`, on a busy machine."""


def find_browser() -> tuple[str, str] | None:
    """The browser and its driver, if both are installed."""
    browser = next((path for name in NAMES if (path := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    return None if browser is None or driver is None else (browser, driver)


class Browser:
    """One window."""

    def __init__(self, client: httpx.Client, session: str, driver: int) -> None:
        self._client = client
        self._driver = driver
        self._path = f"/session/{session}"

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = self._client.request(method, self._path + path, json=body if method == "POST" else None)
        value = answer.json()["value"]
        if answer.status_code != 200:
            raise AssertionError(f"{method} {path}: {value.get('error')}: {value.get('message', '')[:500]}")
        return value

    def go(self, url: str) -> None:
        self.call("POST", "/url", {"url": url})

    def reload(self) -> None:
        self.call("POST", "/refresh", {})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a script's `return`, in the page."""
        return self.call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def run_async(self, script: str, *arguments: Any) -> Any:
        """The same of a script that calls its last argument."""
        return self.call("POST", "/execute/async", {"script": script, "args": list(arguments)})

    def _find(self, selector: str) -> str:
        found: str = self.call("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]
        return found

    def click(self, selector: str) -> None:
        self.wait(lambda: self.exists(selector), f"there is no {selector}")
        self.call("POST", f"/element/{self._find(selector)}/click", {})

    def click_text(self, text: str, selector: str = "button, a") -> None:
        """Click what has this text."""
        script = """
            const found = [...document.querySelectorAll(arguments[0])]
                .filter(e => e.textContent.trim() === arguments[1] && !e.disabled);
            if (found.length) found.at(-1).click();
            return found.length;
        """
        self.wait(lambda: self.run(script, selector, text), f"nothing has the text {text!r}")

    def type(self, selector: str, text: str) -> None:
        self.wait(lambda: self.exists(selector), f"there is no {selector}")
        self.call("POST", f"/element/{self._find(selector)}/value", {"text": text})

    def choose_files(self, selector: str, *paths: Path) -> None:
        """Choose files in a file field, which may be hidden."""
        text = "\n".join(str(path) for path in paths)
        self.call("POST", f"/element/{self._find(selector)}/value", {"text": text})

    def give_file(self, selector: str, event: str, name: str, data: bytes, kind: str) -> bool:
        """Paste a file, or drag and drop one: `event` is paste, dragover or drop. True: the page left it to the
        browser."""
        script = """
            const [selector, name, file, text, type] = arguments;
            const bytes = Uint8Array.from(atob(text), one => one.charCodeAt(0));
            const given = new DataTransfer();
            given.items.add(new File([bytes], file, {type}));
            const how = {bubbles: true, cancelable: true};
            const event = name === "paste" ? new ClipboardEvent(name, {...how, clipboardData: given})
                                           : new DragEvent(name, {...how, dataTransfer: given});
            return document.querySelector(selector).dispatchEvent(event);
        """
        return bool(self.run(script, selector, event, name, base64.b64encode(data).decode("ascii"), kind))

    def press(self, *keys: str) -> None:
        """Press keys, one after the other, wherever the focus is."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def focused(self) -> str:
        """The id, label or text of what has the focus."""
        script = """
            const at = document.activeElement;
            return at.id || at.getAttribute('aria-label') || at.textContent.trim().slice(0, 60) || at.tagName;
        """
        return str(self.run(script))

    def exists(self, selector: str) -> bool:
        return bool(self.run("return document.querySelector(arguments[0]) !== null", selector))

    def text(self, selector: str) -> str:
        found: str = self.run(
            "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent).join('\\n')", selector
        )
        return found

    def wait(self, condition: Callable[[], Any], message: str = "", seconds: float = SECONDS) -> Any:
        """Wait until the condition holds; returns its value."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"{message or 'it did not happen'} after {seconds:g} s; the page: {self.text('main')[:1500]}"
                )
            time.sleep(0.05)
        return value

    def wait_for_text(self, selector: str, text: str, seconds: float = SECONDS) -> None:
        self.wait(
            lambda: text in self.text(selector),
            f"{selector} has no {text!r}, but {self.text(selector)[:300]!r}",
            seconds,
        )

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", size)

    def devtools(self, command: str, parameters: dict[str, Any] | None = None) -> Any:
        return self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters or {}})

    def set_dark(self, is_dark: bool) -> None:
        features = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        self.devtools("Emulation.setEmulatedMedia", {"features": features})

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("GET", "/screenshot")))

    def problems(self) -> list[str]:
        """Warnings and errors in the console since the last call, also of the Content-Security-Policy."""
        entries = self.call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def memory(self) -> int:
        """Bytes of the page's process, the largest that holds pages; what it shares with others is counted in part."""
        return max(_shared_out(pid) for pid in _descendants(self._driver) if "--type=renderer" in _command(pid))

    def forget(self) -> None:
        """An empty profile: no conversations, settings or keys."""
        self.go("about:blank")
        self.devtools("Storage.clearDataForOrigin", {"origin": "*", "storageTypes": "all"})
        self.problems()


@contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    """A window of the installed browser, with a new profile."""
    found = find_browser()
    assert found is not None, "no Chromium and chromedriver are installed"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    driver = subprocess.Popen(
        [found[1], f"--port={port}", "--silent"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(profile)},
    )  # fmt: skip
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False)
    session = ""
    try:
        _wait_for_driver(client)
        options = {
            "binary": found[0],
            "args": [*FLAGS, f"--user-data-dir={profile / 'profile'}", "--window-size=1280,900"],
        }
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        answer = client.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
        assert "sessionId" in answer, answer
        session = answer["sessionId"]
        yield Browser(client, session, driver.pid)
    finally:
        if session:
            client.delete(f"/session/{session}")
        client.close()
        driver.terminate()
        driver.wait(10)


def _descendants(pid: int) -> list[int]:
    try:  # any thread may have started some
        children = [
            one for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()
        ]
    except OSError:
        return []
    return [one for child in children for one in (int(child), *_descendants(int(child)))]


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")


def _shared_out(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _wait_for_driver(client: httpx.Client) -> None:
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            if client.get("/status").json()["value"]["ready"]:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, "chromedriver does not start"
        time.sleep(0.05)
