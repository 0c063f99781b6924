"""`LLM` over several engines: each request's end reaches its caller, whatever happens to the others."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.api.replicated import ReplicatedEngine
from quire.errors import EngineDeadError, ReplicaDownError
from quire.messages.sampling import StructuredOutputsParams

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "num_gpu_blocks_override": 128, "device": "cpu", "max_num_seqs": 8, "data_parallel_size": 2,
}  # fmt: skip
WRONG = StructuredOutputsParams(grammar="root ::= nowhere")


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "ignore_eos": True, "max_tokens": 4, **more})


def engine_of(llm: LLM) -> ReplicatedEngine:
    assert isinstance(llm.llm_engine, ReplicatedEngine)
    return llm.llm_engine


def stopped_midway(llm: LLM) -> tuple[Iterator[RequestOutput], int]:
    """A started stream at the first engine, and that engine's process, which is stopped."""
    engine = engine_of(llm)
    while True:  # until one is still running
        stream = llm.stream("abc", greedy(max_tokens=200))
        opened = engine._unfinished[next(stream).request_id]
        assert opened.replica is not None
        pid = opened.replica.pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.1)  # outputs under way have arrived
        if opened.replica.number == 0 and not opened.is_ended:
            return stream, pid
        os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def shared(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, **SETTINGS) as both:
        yield both
    with pytest.raises(EngineDeadError, match="has been shut down"):
        both.get_metrics()


@pytest.fixture
def both(shared: LLM) -> Iterator[LLM]:
    yield shared
    shared.llm_engine.check_idle()


def test_bad_requests_give_the_errors_of_one_engine_and_leave_nothing(both: LLM, llm: LLM) -> None:
    params = [greedy(structured_outputs=WRONG), greedy(), greedy(structured_outputs=WRONG)]
    ours, theirs = (each.generate(["a", "b", "c"], params, use_tqdm=False) for each in (both, llm))
    assert [one.error for one in ours] == [one.error for one in theirs] and ours[0].error
    assert [one.outputs[0].finish_reason for one in ours] == ["error", "length", "error"]
    assert both.generate("abc", greedy(), use_tqdm=False)[0].error is None


def test_stepping_until_nothing_is_unfinished_ends(both: LLM) -> None:
    engine, interval = engine_of(both), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads switch at the worst of times
    try:
        for i in range(200):
            engine.add_request(f"loop-{i}", "abc", greedy(max_tokens=1))
            finished = 0
            while engine.has_unfinished_requests():
                finished += sum(output.finished for output in engine.step())
            assert finished == 1
    finally:
        sys.setswitchinterval(interval)


def test_aborted_requests_have_no_further_outputs(both: LLM) -> None:
    engine = engine_of(both)
    engine.add_request("again", "abc", greedy(max_tokens=100))
    engine.step()
    time.sleep(0.05)  # more has arrived meanwhile
    engine.abort_request("again")
    assert not engine.has_unfinished_requests() and engine.step() == []
    engine.add_request("again", "abc", greedy(max_tokens=1))
    lengths = [len(output.outputs[0].token_ids) for output in engine.step()]
    assert lengths == [1]


def test_an_interrupt_while_a_request_is_queued_leaves_nothing(both: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(both)
    wait = engine._wait

    def interrupted(work: Any) -> Any:
        wait(work)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        both.generate("abc", greedy(max_tokens=200), use_tqdm=False)
    assert not engine.has_unfinished_requests()


def test_an_interrupt_while_waiting_for_outputs_aborts(both: LLM) -> None:
    threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            both.generate(["abc"] * 20, greedy(max_tokens=100), use_tqdm=False)
    assert len(both.generate("abc", greedy(), use_tqdm=False)[0].outputs[0].token_ids) == 4


def test_a_stream_fails_for_its_reader_only_and_a_dropped_llm_ends_its_engines(tiny_model: Path) -> None:
    both = LLM(tiny_model, **SETTINGS, max_engine_restarts=0)
    lost, pid = stopped_midway(both)
    other = both.stream("abc", greedy(max_tokens=20))
    os.kill(pid, signal.SIGKILL)
    assert len(list(other)[-1].outputs[0].token_ids) == 20  # although its steps receive the error
    with pytest.raises(ReplicaDownError, match="replica 0 of 2 is down: .*SIGKILL"):
        list(lost)
    survivor = engine_of(both)._llm.replicas[1].pid
    del lost, other, both
    gc.collect()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{survivor}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
