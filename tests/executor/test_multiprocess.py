"""A model over several processes: the same tokens as in one, and clear errors when a process is lost."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.config import EngineConfig
from quire.distributed.collectives import collectives_started
from quire.errors import ConfigError, EngineDeadError, ValidationError
from quire.executor import links, liveness
from quire.messages.sampling import StructuredOutputsParams
from tests.engine.test_tiers_engine import run_storm
from tests.executor.lone_group import group_of_one
from tests.models.harness import random_reference
from tests.models.zoo import ZOO, _gpt2, _neox

TIGHT = {
    "dtype": "float32", "device": "cpu", "block_size": 4, "num_gpu_blocks_override": 40, "max_num_batched_tokens": 16,
    "max_num_seqs": 6, "disable_log_stats": True, "max_engine_restarts": 0,
}  # fmt: skip
"""Few blocks and a small budget: prompts are chunked, and rows are preempted. An engine that is lost is reported."""
FAILS = "tests.executor.processors.FailsOnce"
BEGIN = [7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47]


@pytest.fixture(autouse=True)
def _no_files_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test does to its ranks, none of their files is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert not list(tmp_path.glob("quire-ranks-*"))


def tokens(llm: LLM, prompts: Sequence[list[int]], **params: Any) -> list[list[list[int]]]:
    """Every sequence's tokens."""
    params = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **params}
    outputs = llm.generate(list(prompts), SamplingParams(**params), use_tqdm=False)
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


def metric(llm: LLM, name: str) -> float:
    return next(each.value for each in llm.get_metrics() if each.name.endswith(name))  # type: ignore[union-attr]


def mixed_load(llm: LLM, with_grammars: bool = True) -> dict[str, Any]:
    """Requests that exercise all of a plan. `with_grammars`: grammars too, whose process takes long to start."""
    crowd = [[3 + i, *BEGIN, 5 + i] for i in range(6)]
    found: dict[str, Any] = {
        "long prompts in chunks": tokens(llm, [[(5 * i + j) % 90 + 4 for j in range(50)] for i in range(2)]),
        "more rows than blocks": tokens(llm, crowd, max_tokens=30),
        "a cached beginning": tokens(llm, [[*BEGIN, 60 + i] for i in range(3)] * 2),
        "several samples": tokens(llm, [BEGIN], n=3, temperature=0.9, seed=5),
        "penalties and filters": tokens(
            llm, crowd[:2], temperature=1.1, seed=2, top_k=9, top_p=0.8, repetition_penalty=1.3, presence_penalty=0.4
        ),
    }
    scored = llm.generate([BEGIN], SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1))[0]
    found["log-probabilities"] = [list(position) for position in scored.outputs[0].logprobs]
    found["of the prompt"] = [position and list(position) for position in scored.prompt_logprobs]
    if with_grammars:
        form = StructuredOutputsParams(regex="[a-f]{4}x")
        params = SamplingParams(temperature=0, max_tokens=8, structured_outputs=form)
        found["a form to keep"] = llm.generate("the ", params)[0].outputs[0].text
    return found


def test_two_ranks_match_one(make_llm: Callable[..., LLM]) -> None:
    alone = mixed_load(make_llm(**TIGHT))
    llm = make_llm(**TIGHT, tensor_parallel_size=2)
    together = mixed_load(llm)
    assert together == alone
    assert metric(llm, "num_preemptions") > 0
    assert metric(llm, "prefix_cache_hits") > 0
    info = llm.llm_engine.info
    assert info.device.startswith("2 × ")
    assert info.kv_bytes == 2 * info.memory.cache


def test_ranks_divide_the_memory_configured_for_the_machine(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CPU_KVCACHE_SPACE", "0.0004")
    llm = make_llm(**{**TIGHT, "num_gpu_blocks_override": None}, tensor_parallel_size=2)
    info, space = llm.llm_engine.info, 0.0004 * 2**30
    block = info.memory.cache / info.memory.num_blocks
    assert space / 2 - block < info.memory.cache <= space / 2
    assert len(tokens(llm, [BEGIN])[0][0]) == 24


def test_a_group_of_one_rank_runs_collectives(make_llm: Callable[..., LLM]) -> None:
    """Allows testing captured collectives with a single GPU."""
    alone = tokens(make_llm(**TIGHT), [BEGIN])
    with group_of_one("gloo"):
        before = collectives_started()
        assert tokens(make_llm(**TIGHT), [BEGIN]) == alone
        assert collectives_started() > before


def lose_a_rank(llm: LLM, said: str, seconds: float) -> None:
    """Kill the second rank during three requests: the next steps report it within `seconds`."""
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    for i in range(3):
        llm.llm_engine.add_request(str(i), [3 + i, *BEGIN], params)
    for _ in range(5):
        llm.llm_engine.step()
    os.kill(ranks_of(llm)[1], signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(EngineDeadError, match=said):
        while True:
            llm.llm_engine.step()
    assert time.monotonic() - begin < seconds


def test_a_step_that_fails_on_all_ranks_is_repeated_and_a_killed_rank_is_reported_within_seconds(
    make_llm: Callable[..., LLM],
) -> None:
    llm = make_llm(**TIGHT, tensor_parallel_size=2, logits_processors=[FAILS])
    failing = tokens(llm, [BEGIN], extra_args={"fails": "everywhere"})
    assert failing == tokens(llm, [BEGIN])
    pids = ranks_of(llm)
    lose_a_rank(llm, rf"rank 1 of 2 \(pid {pids[1]}\) was killed by SIGKILL", seconds=8)
    assert not any(is_running(pid) for pid in pids)
    with pytest.raises(EngineDeadError, match="rank 1 of 2"):
        llm.llm_engine.add_request("late", BEGIN, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    llm.llm_engine.abort_request(["0", "1", "2"])


def ranks_of(llm: LLM) -> list[int]:
    return llm.llm_engine.core._executor.pids


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_rank_that_cannot_start_says_why(tiny_model: Path) -> None:
    with pytest.raises(ValidationError, match="logits processor 'no_such_module.Thing' cannot be imported"):
        LLM(str(tiny_model), **TIGHT, tensor_parallel_size=2, logits_processors=["no_such_module.Thing"])


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"tensor_parallel_size": 3}, "4 attention heads cannot be split over 3 tensor-parallel ranks.*1, 2, 4"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer of at least 1"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "uni"}, "'uni' runs one rank"),
        (
            {"distributed_executor_backend": "slurm"},
            "unknown executor backend 'slurm'; known: mp, null, ray, uni; or give a dotted path",
        ),
        ({"distributed_executor_backend": "ray", "kv_disk": "somewhere"}, "kv_disk needs all ranks on the engine's m"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(settings: dict[str, Any], message: str, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        LLM(str(tiny_model), **TIGHT, **settings)
    assert "\n" not in str(caught.value)


def test_the_default_executor_depends_on_the_number_of_ranks() -> None:
    assert EngineConfig("m").executor_name == "uni"
    assert EngineConfig("m", distributed_executor_backend="mp").executor_name == "mp"
    assert EngineConfig("m", tensor_parallel_size=4).executor_name == "mp"


MODELS = {
    **{name: ZOO[name] for name in ("qwen2", "qwen3", "llama-mqa", "llama-biases", "mistral-window", "mixtral")},
    **{name: ZOO[name] for name in ("qwen2-moe", "qwen3-moe")},
    "gpt2": _gpt2(n_head=4),
    "gpt-neox": _neox(num_attention_heads=4),
}
IN_CI = ("qwen3",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow) for name in MODELS]
)
def test_architectures_over_two_ranks(
    name: str, tmp_path: Path, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "MIN_BYTES", 0)  # every plan goes through shared memory, also the short ones
    folder = tmp_path / name
    random_reference(MODELS[name]).save_pretrained(folder)
    prompts = [[(7 * i + 3 * j) % 97 for j in range(20 + 5 * i)] for i in range(4)]
    settings = {**TIGHT, "skip_tokenizer_init": True, "swap_space": 0.001}
    alone = tokens(make_llm(folder, **settings), prompts)
    assert tokens(make_llm(folder, **settings, tensor_parallel_size=2), prompts) == alone


def test_a_session_on_disk_has_the_parts_of_all_ranks(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Another engine resumes it without recomputing, unless the model is split differently."""
    prompt, more = [(5 * i) % 90 + 4 for i in range(60)], [9, 8, 7]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = tokens(make_llm(**TIGHT), [[*prompt, *more]], max_tokens=20)[0][0]
    settings = {**TIGHT, "kv_disk": str(tmp_path / "disk")}
    llm = make_llm(**settings, tensor_parallel_size=2)
    session = llm.sessions.create("s", prompt)
    session.generate(SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    session.suspend()
    llm.shutdown()
    for size, found in ((2, True), (1, False)):
        llm = make_llm(**settings, tensor_parallel_size=size)
        llm.sessions.get("s").fork(f"of-{size}", len(prompt))
        session = llm.sessions.resume(f"of-{size}")
        session.append(more)
        assert list(session.generate(params).outputs[0].token_ids) == expected
        assert (metric(llm, "prefix_cache_hits") >= 56) == found
        llm.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("tiers", ["none", "host", "disk"])
def test_sessions_and_tiers_over_two_ranks(
    make_llm: Callable[..., LLM], shared_tiny: LLM, tmp_path: Path, tiers: str, depth: int
) -> None:
    make = functools.partial(make_llm, tensor_parallel_size=2)
    seen = run_storm(make, shared_tiny, tmp_path, tiers, seed=10 + depth, operations=100)
    assert seen["found"] > 0.3 * seen["tokens"], "most computed tokens are cache hits"


@pytest.mark.slow
def test_three_ranks_of_the_default_model(make_llm: Callable[..., LLM]) -> None:
    """Nine heads, three KV heads."""
    settings = {"max_num_batched_tokens": 128, "num_gpu_blocks_override": 64, "max_model_len": 512}
    prompts = ["The capital of France is", "Once upon a time", "def fibonacci(n):\n", "The capital of France " * 30]
    params = SamplingParams(temperature=0, max_tokens=48)
    texts = []
    for size in (1, 3):
        llm = make_llm("smollm2-135m", **settings, tensor_parallel_size=size)
        texts.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_a_step_that_fails_on_one_rank_ends_the_engine(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(**TIGHT, tensor_parallel_size=2, logits_processors=[FAILS])
    pids = ranks_of(llm)
    with pytest.raises(EngineDeadError, match="rank 1 of 2: RuntimeError: a processor that fails"):
        tokens(llm, [BEGIN], extra_args={"fails": 1})
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_noticed(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "SILENT_SECONDS", 3.0)
    llm = make_llm(**TIGHT, tensor_parallel_size=2)
    pids = ranks_of(llm)
    os.kill(pids[0], signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match=rf"rank 0 of 2 \(pid {pids[0]}\) hangs"):
        tokens(llm, [BEGIN])
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.slow
def test_an_idle_engine_notices_a_killed_rank_and_can_be_restarted(tiny_model: Path) -> None:
    async def live() -> None:
        llm = AsyncLLM(str(tiny_model), **TIGHT, tensor_parallel_size=2)
        try:
            for _ in range(3):
                params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
                outputs = [output async for output in llm.generate(BEGIN, params, "a")]
                assert len(outputs[-1].outputs[0].token_ids) == 5
                ranks = rank_children()
                assert len(ranks) == 2
                os.kill(ranks[0], signal.SIGKILL)
                assert "was killed by SIGKILL" in await asyncio.wait_for(llm.wait_until_dead(), 5)
                assert not any(is_running(pid) for pid in ranks)
                await llm.restart(only_if_dead=True)
        finally:
            llm.shutdown()
        assert not rank_children()

    asyncio.run(live())


def rank_children() -> list[int]:
    """Ranks of this process's engine."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            grandparent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
            if b"quire.executor.rank" in words and grandparent == os.getpid():
                found.append(int(folder.name))
    return found
