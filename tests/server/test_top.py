"""`quire top` against a running server."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from quire.cli.main import main
from tests.server.conftest import Live


def test_it_shows_rates_rows_and_what_requests_wait_for(
    serving: Callable[..., Live], capsys: pytest.CaptureFixture[str]
) -> None:
    live = serving(admin_key="boss", api_key=("user",))
    body = {"prompt": ["abc", "def"] * 500, "n": 1, "max_tokens": 200, "ignore_eos": True, "stream": True}
    user = {"authorization": "Bearer user"}
    with live.client.stream("POST", "/v1/completions", json=body, headers=user) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        next(lines)  # 16 rows run, 984 requests wait: for 61 times 200 steps
        for _ in range(10):  # all rows end at about the same time: then the next view shows others
            assert main(["top", "--url", live.url, "--api-key", "boss", "--once", "--interval", "0.1"]) == 0
            shown = capsys.readouterr().out
            if "16 running" in shown and "all 16 rows are in use" in shown:
                break
    assert "16 running" in shown and "all 16 rows are in use" in shown and "1 request is before it" in shown
    assert re.search(r"and \d{3} more", shown)  # of those that wait, 12 are listed
    rate = float(shown.split("tokens")[1].split(" out")[0])
    assert rate > 0


def test_without_an_admin_key_it_shows_totals_and_the_keys_own_requests(
    serving: Callable[..., Live], capsys: pytest.CaptureFixture[str]
) -> None:
    live = serving(admin_key="boss", api_key=("user", "other"))
    body = {"prompt": ["abc"] * 500, "max_tokens": 200, "ignore_eos": True, "stream": True}
    user = {"authorization": "Bearer user", "x-request-id": "mine"}
    with live.client.stream("POST", "/v1/completions", json=body, headers=user) as answer:
        lines = answer.iter_lines()
        next(lines)
        shown = {}
        for key in ("user", "other", "boss"):
            for _ in range(10):  # between two batches of rows nothing holds blocks
                assert main(["top", "--url", live.url, "--api-key", key, "--once", "--interval", "0.1"]) == 0
                shown[key] = capsys.readouterr().out
                if "16 running" in shown[key]:
                    break
    assert "mine-" in shown["user"] and "mine-" in shown["boss"]
    assert "mine-" not in shown["other"] and "totals and your own requests" in shown["other"]
    assert main(["top", "--url", live.url, "--once"]) == 2
    assert "needs a key" in capsys.readouterr().err


def test_a_server_without_keys_is_shown_without_one(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", live.url, "--once", "--interval", "0.1"]) == 0
    shown = capsys.readouterr().out
    assert "serving" in shown and "0 running in 16 rows" in shown and "of 256 blocks" in shown


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--api-key", "wrong"], "--admin-key"),
        (["--interval", "0"], "from 0.1 to 3600"),
        (["--url", "http://127.0.0.1:9"], "is the server running?"),
    ],
)
def test_errors_are_one_line(
    serving: Callable[..., Live], capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    url = [] if "--url" in flags else ["--url", serving(admin_key="boss").url]
    assert main(["top", *url, "--once", *flags]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
