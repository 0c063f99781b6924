"""Requests leave nothing behind: after twice as many rounds of everything, an engine holds as many objects."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.messages.structured import StructuredOutputsParams

WARM_UP, ROUNDS = 6, 6
MAY_GROW = 32 << 10
"""Bytes over ROUNDS rounds: free lists of small objects, and what the log remembers of deleted sessions until its
file is cleaned. The tokens of 120 requests are more."""
PLAIN = ("list", "dict", "set", "tuple", "Tensor", "ndarray", "function", "method", "cell", "generator", "finalize")


@pytest.fixture
def pressed(tiny_model: Path, tmp_path: Path) -> Iterator[LLM]:
    """An engine with few blocks, a small host tier and a disk tier that is full after a round."""
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 24, "max_num_seqs": 8}
    settings |= {"swap_space": 64 * 8192 / 2**30, "kv_disk": str(tmp_path / "kv"), "kv_disk_size": 2**-12}
    with LLM(str(tiny_model), session_idle_seconds=0, **settings) as llm:
        yield llm


def one_round(llm: LLM, number: int) -> None:
    """Preempted requests, several sequences, logprobs, a grammar, an abort, a refusal, and a session with two turns."""
    free = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=number)
    llm.generate([f"the world {number} {i} " * 4 for i in range(8)], free, use_tqdm=False)
    llm.generate(f"abc {number}", SamplingParams(n=3, logprobs=2, prompt_logprobs=1, max_tokens=5), use_tqdm=False)
    form = StructuredOutputsParams(regex=f"[a-c]{{1,{2 + number % 2}}}")
    llm.generate("x", SamplingParams(max_tokens=6, structured_outputs=form), use_tqdm=False)
    engine = llm.llm_engine
    for i in range(4):
        engine.add_request(f"a{number}-{i}", "the world " * 8, free)
    engine.step()
    for i in range(4):
        engine.abort_request(f"a{number}-{i}")
    while engine.has_unfinished_requests():
        engine.step()
    with pytest.raises(ValueError):
        llm.generate("a" * 300, free, use_tqdm=False)
    session = llm.sessions.create(f"s{number}", "the world and more", ttl=1000)
    session.generate(SamplingParams(max_tokens=4))
    session.suspend()
    fork = session.fork(f"t{number}")
    fork.append(" more")
    fork.generate(SamplingParams(max_tokens=4))
    fork.delete()
    session.delete()


def held() -> Counter[str]:
    """Live objects of quire's own types and containers, by type. Others come and go with caches of Python's classes."""
    gc.collect()
    kinds = (type(each) for each in gc.get_objects())
    return Counter(
        kind.__name__ for kind in kinds if str(kind.__module__).startswith("quire") or kind.__name__ in PLAIN
    )


def grown(work: Callable[[int], None]) -> tuple[dict[str, int], int]:
    """Objects by type, and bytes, that ROUNDS more rounds leave behind."""
    tracemalloc.start()
    try:
        for number in range(WARM_UP):
            work(number)
        before, size = held(), tracemalloc.get_traced_memory()[0]
        for number in range(WARM_UP, WARM_UP + ROUNDS):
            work(number)
        after, more = held(), tracemalloc.get_traced_memory()[0] - size
    finally:
        tracemalloc.stop()
    return {name: count - before[name] for name, count in after.items() if count > before[name]}, more


def test_rounds_of_everything_leave_nothing_behind(pressed: LLM) -> None:
    for rows in range(1, 9):  # passes are recorded once for each number of rows
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        pressed.generate([f"{rows} {i}" for i in range(rows)], params, use_tqdm=False)
    objects, size = grown(lambda number: one_round(pressed, number))
    metrics = {metric.name: metric.value for metric in pressed.llm_engine.core.metrics()}
    assert metrics["quire:num_preemptions"] > 0 and metrics["quire:blocks_saved"] > 0
    assert {name: count for name, count in objects.items() if count >= ROUNDS} == {}
    assert size < MAY_GROW
