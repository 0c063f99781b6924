"""A real browser, where there is one. With CI=true there must be one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.media.seeing_model import write_seeing_model
from tests.server.conftest import Host, Live
from tests.server.page.browser import Browser, find_browser, open_browser

NO_BROWSER = (
    "no Chromium with its driver is installed (apt-get install chromium chromium-driver): the page is not tested"
)


@pytest.fixture(scope="session")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if find_browser() is None:
        if os.environ.get("CI") == "true":
            pytest.fail(NO_BROWSER)
        pytest.skip(NO_BROWSER)
    with open_browser(tmp_path_factory.mktemp("browser")) as made:
        yield made


@pytest.fixture
def browser(window: Browser) -> Iterator[Browser]:
    """A window without conversations and keys; checked to have no warning or error in its console."""
    window.forget()
    window.resize(1280, 900)
    window.set_dark(False)
    yield window
    problems = window.problems()
    window.go("about:blank")
    assert not problems, problems


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with a tiny model that takes images."""
    host = Host(
        write_seeing_model(tmp_path_factory.mktemp("seeing")), max_model_len=512, limit_mm_per_prompt={"image": 3}
    )
    live, stop = host.start()
    yield live
    stop()
    host.close()
