"""The servers that are attacked: one in this process, to look into, and one as users run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.attacked_server import AttackedServer, attacked_server
from tests.server.conftest import Host, Live


@pytest.fixture(scope="session")
def host(tiny_model: Path) -> Iterator[Host]:
    made = Host(tiny_model)
    yield made
    made.close()


@pytest.fixture
def serving(host: Host) -> Iterator[Callable[..., Live]]:
    """Starts servers with a test's own settings; they are checked and stopped after it."""
    started: list[tuple[Live, Callable[[], None]]] = []

    def start(**settings: Any) -> Live:
        started.append(host.start(**settings))
        return started[-1][0]

    yield start
    for live, stop in started:
        live.assert_idle()
        stop()


@pytest.fixture
def live(serving: Callable[..., Live]) -> Live:
    return serving()


@pytest.fixture(scope="session")
def attacked_process(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedServer]:
    with attacked_server(tiny_model, tmp_path_factory.mktemp("attacked"), "--trust-request-chat-template") as made:
        assert made.post("/v1/sessions", {"id": "a"}).status_code == 200  # makes the folder of sessions
        assert made.request("DELETE", "/v1/sessions/a").status_code == 200
        made.start = made.holdings()
        yield made


@pytest.fixture
def attacked(attacked_process: AttackedServer) -> Iterator[AttackedServer]:
    """A `quire serve` process; checked to be unchanged after the test."""
    yield attacked_process
    attacked_process.assert_unharmed()
