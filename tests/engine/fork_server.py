"""One nursery for the engines of a test module: loading a vocabulary takes its seconds."""

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


class SharedNursery:
    """Makes engines over one model that have their guides from the same process."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._nursery: ForkServerClient | None = None
        self._made: list[LLM] = []

    def engine(self, **settings: Any) -> LLM:
        usual = {"dtype": "float32", "num_gpu_blocks_override": 128, "device": "cpu", "max_num_seqs": ROWS}
        llm = LLM(str(self._model), **(usual | settings))
        grammars = grammars_of(llm)
        grammars._setup.end_ids = [1, 3]
        if self._nursery is None:
            self._nursery = ForkServerClient(grammars._setup)
        grammars._nursery = self._nursery
        grammars._numbers = next(_engines) << 20  # guides are told apart by number
        self._made.append(llm)
        return llm

    def close(self) -> None:
        for llm in self._made:
            assert_idle(llm)
            nursery = grammars_of(llm)._nursery
            if nursery is not None and nursery is not self._nursery:
                nursery.close()  # the one it had was killed
            grammars_of(llm)._nursery = None
            llm.shutdown()
        if self._nursery is not None:
            self._nursery.close()
