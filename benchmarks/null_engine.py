"""An engine that computes nothing: the real loop, scheduler and messages, with arbitrary words as tokens.

It replaces the engine process where something else is measured or tested: `AsyncLLM.engine_module =
"benchmarks.null_engine"`. NULL_ENGINE_PACE is the number of steps per second; unset, there is no pause between steps. A
request that arrives between two steps starts one, so that its first token does not wait. `max_num_seqs` is 1,024 unless
it is set.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time

import numpy as np

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.engine_info import EngineInfo
from quire.engine.process import main
from quire.executor.base import Executor
from quire.executor.null import NullExecutor
from quire.kvcache.block_tables import BlockTables
from quire.kvcache.prefix_cache import ContentKeys
from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig
from quire.messages.outputs import StepOutputs
from quire.messages.plan import StepPlan, StepResult
from quire.scheduler.policies.registry import make_policy
from quire.scheduler.scheduler import Scheduler

ROWS = 1024


class WordExecutor(NullExecutor):
    """Yields a word for every sampled token."""

    def __init__(self, words: list[int], rows: int) -> None:
        super().__init__(rows)
        self._words = np.array(words, np.int32)

    def submit(self, plan: StepPlan) -> StepResult:
        result = super().submit(plan)
        result.tokens = self._words[(np.arange(len(result.tokens)) * 31 + plan.step * 7919) % len(self._words)]
        return result


class PacedCore(EngineCore):
    """Makes a step when it is due, or when a request waits that can have a row."""

    def __init__(self, scheduler: Scheduler, executor: Executor, steps_per_second: float, front: int) -> None:
        super().__init__(scheduler, executor, log_stats=False)
        self._seconds = 1 / steps_per_second if steps_per_second else 0.0
        self._due = 0.0
        self._front = front

    def step(self) -> StepOutputs:
        left = self._due - time.monotonic()
        can_admit = self.scheduler.waiting and self.scheduler.rows.free
        if left > 0 and not can_admit and select.select([self._front], [], [], left)[0]:
            return StepOutputs()  # the loop reads the new message, and calls again
        self._due = max(self._due, time.monotonic() - self._seconds) + self._seconds
        return super().step()


def make_null_engine(config: EngineConfig, files: ModelFiles, model: ModelConfig) -> tuple[EngineCore, EngineInfo]:
    """An engine whose steps yield words."""
    begin, rows = time.monotonic(), config.max_num_seqs or ROWS
    keys = ContentKeys(config.block_size, b"null")
    tables = BlockTables(config.num_gpu_blocks_override or 100_000, config.block_size, config.enable_prefix_caching)
    scheduler = Scheduler(tables, make_policy(config.scheduling_policy), keys, rows, 8192)
    pace = float(os.environ.get("NULL_ENGINE_PACE", "0"))
    core = PacedCore(scheduler, WordExecutor(_words(files, model), rows), pace, int(sys.argv[1]))
    info = EngineInfo(
        files=files,
        model=model,
        device="null",
        dtype="none",
        max_model_len=config.max_model_len if isinstance(config.max_model_len, int) else model.max_position,
        max_num_seqs=rows,
        max_num_batched_tokens=8192,
        block_size=config.block_size,
        num_blocks=tables.pool.capacity,
        cache_tokens=tables.pool.capacity * config.block_size,
        weight_bytes=0,
        kv_bytes=0,
        start_seconds=time.monotonic() - begin,
        keys=keys,
    )
    return core, info


def _words(files: ModelFiles, model: ModelConfig) -> list[int]:
    """Tokens that are words or parts of words, each of which decodes to visible text."""
    if files.folder is None or not (path := files.folder / "tokenizer.json").exists():
        return list(range(model.vocab_size // 2, model.vocab_size))
    vocabulary = json.loads(path.read_text())["model"]["vocab"]
    ends = set(model.eos_token_ids)
    return [
        i for text, i in vocabulary.items() if text.removeprefix("Ġ").isalpha() and text.isascii() and i not in ends
    ] or [*vocabulary.values()]


if __name__ == "__main__":
    sys.exit(main(make_null_engine))
