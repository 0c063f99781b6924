"""Calls from many threads at once: each gets the tokens it would have got alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire import LLM, SamplingParams
from quire.api.output_queues import CallLock

GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=30)
PROMPTS = ["hello", "the world " * 6, "in an", "x" * 40]
THREADS, ROUNDS, PATIENCE = 6, 6, 120


def test_calls_of_every_kind_run_concurrently(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(num_gpu_blocks_override=60, swap_space=0.01)
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]

    def session(prompt: str, name: str) -> list[int]:
        s = llm.sessions.create(name, prompt)
        tokens = s.generate(GREEDY).outputs[0].token_ids
        s.suspend()
        assert name in [info.name for info in llm.sessions]
        s.delete()
        return list(tokens)

    def work(thread: int) -> None:
        for round_ in range(ROUNDS):
            which = (thread + round_) % len(PROMPTS)
            prompt, tokens = PROMPTS[which], expected[which]
            assert llm.generate([prompt, "b"], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == tokens
            assert list(llm.stream(prompt, GREEDY))[-1].outputs[0].token_ids == tokens
            assert session(prompt, f"s{thread}-{round_}") == tokens
            next(iter(llm.stream([prompt, "a"], GREEDY)))  # and dropped
            llm.get_metrics()

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(work, thread) for thread in range(THREADS)]:
            done.result(PATIENCE)


def test_a_waiting_thread_is_next() -> None:
    lock, order = CallLock(), []
    waits = threading.Event()

    def other() -> None:
        waits.set()
        with lock:
            order.append("other")

    thread = threading.Thread(target=other)
    with lock, lock:  # its owner does not queue
        thread.start()
        waits.wait(PATIENCE)
        time.sleep(0.1)  # it is queued by now
    with lock:
        order.append("first again")
    thread.join(PATIENCE)
    assert order == ["other", "first again"]


def test_threads_share_engines_in_other_processes(tiny_model: Path) -> None:
    """A call that waits for a long answer does not block others."""
    settings = {"dtype": "float32", "num_gpu_blocks_override": 64, "device": "cpu", "data_parallel_size": 2}
    with LLM(tiny_model, **settings) as llm, ThreadPoolExecutor(THREADS) as pool:
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        calls = [pool.submit(llm.generate, prompt, GREEDY, use_tqdm=False) for prompt in PROMPTS * 5]
        assert [call.result(PATIENCE)[0].outputs[0].token_ids for call in calls] == expected * 5
