"""Distributes tests over workers, with `-n 2 --dist loadfile`: each file runs in one worker, so its fixtures are set up
once; so does a group of files with a shared slow fixture. Long files go first, so that both workers end together."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

import pytest

GROUPS = {
    "default model": ("tests/engine/test_real_text.py", "tests/engine/test_grammar_text.py",
                          "tests/server/test_default_model.py", "tests/server/test_tool_prompts.py",
                          "tests/api/test_stream.py"),
    "abuse of a server": ("tests/server/test_abuse_*.py",),
    "abuse": ("tests/abuse/test_*.py",),
    "page": ("tests/server/page/test_*.py",),
    "images": ("tests/media/test_server*.py", "tests/media/test_offline.py"),
}  # fmt: skip
LONG = ("tests/executor/", "tests/server/", "tests/api/", "tests/engine/", "tests/scheduler/")


def unit_of(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    return next((name for name, files in GROUPS.items() if any(fnmatch(file, pattern) for pattern in files)), file)


def _sort_key(nodeid: str) -> int:
    """Sort key of a test; tests with the same key keep their order."""
    unit = unit_of(nodeid)
    if unit in GROUPS:
        return 0
    return next((place for place, folder in enumerate(LONG, 1) if unit.startswith(folder)), len(LONG) + 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _sort_key(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class ByUnit(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    config.option.loadscopereorder = False  # it orders by the number of tests, not by their duration
    return ByUnit(config, log)
