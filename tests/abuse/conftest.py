"""The servers that are attacked: one in this process, to look into, and one as users run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server.attacked_server import AttackedServer, attacked_server
from tests.server.conftest import Live, host, serving  # noqa: F401 - pytest finds fixtures here


@pytest.fixture
def live(serving: Callable[..., Live]) -> Live:  # noqa: F811 - the fixture
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
