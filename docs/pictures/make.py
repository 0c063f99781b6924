"""Makes the pictures of the page in this folder: `make pictures`. Needs Chromium and its driver.

python docs/pictures/make.py            # the default model
python docs/pictures/make.py --model qwen3-0.6b --out /tmp/pictures
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.server.page.browser import Browser, open_browser
from tests.server.served import served

ADMIN = "picture"
STORY = "A quire is a gathering of pages, and every page has room for the same number of words. " * 6


def load(url: str, count: int, tokens: int, same: bool) -> list[threading.Thread]:
    """Requests that run in the background."""

    def go(number: int) -> None:
        prompt = (STORY if same else "") + f"Chapter {number}:"
        body = {"prompt": prompt, "max_tokens": tokens + 17 * (number % 7), "ignore_eos": True, "temperature": 0.8}
        httpx.post(f"{url}/v1/completions", json=body, timeout=600, headers={"X-Tenant": ("ada", "bob")[number % 2]})

    threads = [threading.Thread(target=go, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    return threads


def chat(browser: Browser, url: str, folder: Path, suffix: str) -> None:
    """A conversation with code in it."""
    browser.go(f"{url}/#chat")
    browser.type("#draft", "Write a Python function that adds two numbers, and say in one sentence what it does.")
    browser.click("#send")
    browser.wait(lambda: not browser.exists("#stop") and "tokens/s" in browser.text(".stats"), seconds=300)
    browser.screenshot(folder / f"chat{suffix}.png")


def sessions(url: str) -> None:
    """Two sessions that sleep in host memory."""
    with httpx.Client(base_url=url, timeout=300) as client:
        for name in ("atlas", "diary"):
            client.delete(f"/v1/sessions/{name}")
            client.post("/v1/sessions", json={"id": name}).raise_for_status()
            body = {"input": f"The {name} begins: {STORY}", "max_tokens": 24, "ignore_eos": True}
            client.post(f"/v1/sessions/{name}/generate", json=body).raise_for_status()
            client.post(f"/v1/sessions/{name}/suspend?wait=true").raise_for_status()


def engine(browser: Browser, url: str, folder: Path, suffix: str) -> None:
    """The engine with more requests than rows."""
    sessions(url)
    browser.go(f"{url}/#engine")
    waiting = [*load(url, 10, 160, same=True)]
    time.sleep(1.0)
    waiting += load(url, 12, 120, same=False)
    browser.wait(lambda: browser.exists("#queue tbody tr") and "shared" in browser.text(".legend"), seconds=120)
    time.sleep(6)
    browser.screenshot(folder / f"engine{suffix}.png")
    name = browser.run("return document.querySelector('.engine section[aria-label=Rows] td button')?.textContent ?? ''")
    for thread in waiting:
        thread.join(300)
    if name:
        browser.go(f"{url}/#timeline/{name}")
        browser.wait(lambda: browser.exists("#events tbody tr"))
        browser.resize(1280, 620)
        time.sleep(0.5)
        browser.screenshot(folder / f"timeline{suffix}.png")


def learn(browser: Browser, url: str, folder: Path, suffix: str) -> None:
    """The lesson about shared beginnings."""
    browser.go(f"{url}/#learn")
    browser.click("#next")
    browser.click("#next")
    browser.click("#try")
    browser.wait(lambda: "share" in browser.text("#said"), seconds=120)
    time.sleep(1.0)
    browser.screenshot(folder / f"learn{suffix}.png")
    browser.wait(lambda: browser.exists("#lesson-end"), seconds=300)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--only", default="", help="comma-separated: chat, engine, learn, dark, phone")
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else ["chat", "engine", "learn", "dark", "phone"]
    args.out.mkdir(parents=True, exist_ok=True)
    flags = [
        "--port",
        "0",
        "--admin-key",
        ADMIN,
        "--max-num-seqs",
        "12",
        "--num-gpu-blocks-override",
        "120",
        "--swap-space",
        "0.15",
    ]
    with served(*([args.model] if args.model else []), *flags) as server, tempfile.TemporaryDirectory() as profile:
        url = server.wait_for(r"page\s+(http://\S+?)/\s", 300).group(1)
        with open_browser(Path(profile)) as browser:
            browser.resize(1280, 860)
            browser.set_dark(False)
            browser.go(url)
            browser.run("sessionStorage.setItem('quire.admin', arguments[0])", ADMIN)
            if "chat" in wanted:
                chat(browser, url, args.out, "")
            if "engine" in wanted:
                browser.resize(1280, 1400)
                engine(browser, url, args.out, "")
                browser.resize(1280, 860)
            if "learn" in wanted:
                learn(browser, url, args.out, "")
            if "dark" in wanted:
                browser.set_dark(True)
                browser.resize(1280, 1400)
                engine(browser, url, args.out, "-dark")
            if "phone" in wanted:
                browser.resize(390, 844)
                browser.set_dark(False)
                chat(browser, url, args.out, "-phone")
            problems = browser.problems()
    for path in sorted(args.out.glob("*.png")):
        print(f"{path.name}: {path.stat().st_size // 1024} KiB")
    if problems:
        sys.exit("the console has: " + "; ".join(problems))


if __name__ == "__main__":
    main()
