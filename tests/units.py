"""Which worker runs which tests, with `-n 2 --dist loadfile`: a file is run by one worker, so its fixtures are set up
once; so is a group of files that share expensive fixtures. Long ones start first, so that no worker runs the last one
alone."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

import pytest

GROUPS = {
    "the default model": ("tests/engine/test_real_text.py", "tests/engine/test_grammar_text.py",
                          "tests/server/test_default_model.py", "tests/server/test_tool_prompts.py",
                          "tests/api/test_stream.py"),
    "an attacked server": ("tests/server/test_abuse_*.py",),
}  # fmt: skip
LONG = ("tests/executor/", "tests/server/", "tests/api/", "tests/engine/", "tests/scheduler/")


def unit_of(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    return next((name for name, files in GROUPS.items() if any(fnmatch(file, pattern) for pattern in files)), file)


def _place(nodeid: str) -> int:
    """A test's position in the queue; tests in one position keep their order."""
    unit = unit_of(nodeid)
    if unit in GROUPS:
        return 0
    return next((place for place, folder in enumerate(LONG, 1) if unit.startswith(folder)), len(LONG) + 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _place(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class ByUnit(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    config.option.loadscopereorder = False  # it would order by number of tests, not by duration
    return ByUnit(config, log)
