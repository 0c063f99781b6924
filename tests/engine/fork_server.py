"""One fork server for the engines of a test module: loading a vocabulary takes seconds."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from quire import LLM
from quire.engine.grammar.fork_server import ForkServerClient
from quire.engine.grammar.grammars import Grammars
from tests.conftest import assert_idle

ROWS = 8
_engines = itertools.count(1)


def grammars_of(llm: LLM) -> Grammars:
    grammars = llm.llm_engine.core._grammars
    assert grammars is not None
    return grammars


class SharedForkServer:
    """Makes engines of one model whose matchers come from the same fork server."""

    def __init__(self, model: Path, places: int = 1) -> None:
        """`places`: masks in a slot, also for engines without drafts."""
        self._model = model
        self._places = places
        self._fork_server: ForkServerClient | None = None
        self._made: list[LLM] = []

    def engine(self, **settings: Any) -> LLM:
        usual = {"dtype": "float32", "num_gpu_blocks_override": 128, "device": "cpu", "max_num_seqs": ROWS}
        llm = LLM(str(self._model), **(usual | settings))
        grammars = grammars_of(llm)
        grammars._spec.end_ids = [1, 3]
        grammars._spec.places = self._places
        grammars._shape = (grammars._shape[0], self._places, grammars._shape[2])
        if self._fork_server is None:
            self._fork_server = ForkServerClient(grammars._spec)
        grammars._fork_server = self._fork_server
        grammars._numbers = next(_engines) << 20  # matcher numbers must be unique
        self._made.append(llm)
        return llm

    def close(self) -> None:
        for llm in self._made:
            assert_idle(llm)
            fork_server = grammars_of(llm)._fork_server
            if fork_server is not None and fork_server is not self._fork_server:
                fork_server.close()  # the one it had was killed
            grammars_of(llm)._fork_server = None
            llm.shutdown()
        if self._fork_server is not None:
            self._fork_server.close()
