"""Pipeline stages with several plans in flight: the same tokens as in one process, and stages work concurrently."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from quire.config import EngineConfig
from quire.distributed.groups import Ranks, spread
from quire.errors import ConfigError, EngineDeadError
from quire.executor import multiprocess
from quire.executor.multiprocess import MultiprocessExecutor
from tests.engine.test_tiers_engine import run_storm
from tests.executor.test_multiprocess import BEGIN, FAILS, MODELS, TIGHT, is_running, metric, mixed_load, tokens
from tests.models.harness import random_reference
from tests.models.zoo import ZOO, _gpt2

SLOW = "tests.executor.processors.TakesLong"
SWAPS = {**TIGHT, "swap_space": 0.001}


@pytest.fixture(autouse=True)
def _no_files_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test does to its ranks, none of their files is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert not list(tmp_path.glob("quire-ranks-*"))


def full_load(llm: LLM, with_grammars: bool = True) -> dict[str, Any]:
    """`mixed_load`, and requests that need the host after each token or keep blocks between turns."""
    found = mixed_load(llm, with_grammars)
    beams = llm.beam_search([BEGIN, BEGIN[:5]], BeamSearchParams(beam_width=3, max_tokens=9, ignore_eos=True))
    found["beams"] = [[sequence.tokens for sequence in output.sequences] for output in beams]
    session = llm.sessions.create("talk", BEGIN)
    greedy = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
    found["a session"] = [list(session.generate(greedy).outputs[0].token_ids)]
    session.suspend()
    llm.reset_prefix_cache()
    later = session.generate(greedy)
    found["a session"] += [list(later.outputs[0].token_ids), later.num_cached_tokens]
    llm.sessions.delete("talk")
    return found


@pytest.fixture(scope="module")
def one_process(tiny_model: Path) -> dict[str, Any]:
    """The results of one process."""
    with LLM(str(tiny_model), **SWAPS) as llm:
        return full_load(llm)


def test_two_stages_match_one_process(one_process: dict[str, Any], make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(**SWAPS, pipeline_parallel_size=2)
    assert full_load(llm) == one_process
    assert one_process["a session"][2] > 0
    assert metric(llm, "num_preemptions") > 0
    assert metric(llm, "prefix_cache_hits") > 0
    info = llm.llm_engine.info
    assert info.device.startswith("2 × ")
    assert info.kv_bytes == 2 * info.memory.cache


def test_stages_of_two_ranks_each_match_one_process(one_process: dict[str, Any], make_llm: Callable[..., LLM]) -> None:
    results = full_load(make_llm(**SWAPS, pipeline_parallel_size=2, tensor_parallel_size=2), with_grammars=False)
    assert (
        results == {what: tokens for what, tokens in one_process.items() if what in results}
        and len(results) == len(one_process) - 1
    )


def test_stages_work_concurrently_and_recover_from_failures(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead: list[int] = []
    collect = MultiprocessExecutor.collect

    def watched(executor: MultiprocessExecutor, handle: int) -> Any:
        result = collect(executor, handle)
        # The first stage has reported the next step before the last stage has reported this one.
        ahead.append(0 in executor._answers.get(handle + 1, {}))
        return result

    monkeypatch.setattr(MultiprocessExecutor, "collect", watched)
    llm = make_llm(**TIGHT, pipeline_parallel_size=2, logits_processors=[SLOW, FAILS])
    prompts = [[3 + i, *BEGIN] for i in range(4)]
    expected = tokens(llm, prompts)
    ahead.clear()
    assert tokens(llm, prompts, extra_args={"seconds": 0.02}) == expected
    assert sum(ahead) > 3, "while the last stage samples, the first one is done with the next plan"
    # A step fails in the last stage with another in flight: all requests start again, and no results are mixed up.
    assert tokens(llm, prompts, extra_args={"fails": "everywhere"}) == expected
    pids = llm.llm_engine.core._executor.pids
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    for i in range(3):
        llm.llm_engine.add_request(str(i), prompts[i], params)
    for _ in range(5):
        llm.llm_engine.step()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=rf"rank 1 of 2 \(pid {pids[1]}\) was killed by SIGKILL"):
        while True:
            llm.llm_engine.step()
    assert not any(is_running(pid) for pid in pids)
    llm.llm_engine.abort_request(["0", "1", "2"])


@pytest.mark.slow
def test_a_step_that_fails_in_the_first_stage_blocks_no_other_stage(
    make_llm: Callable[..., LLM], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocess, "FAILURE_SECONDS", 0.0)  # no rank waits for the failed one
    llm = make_llm(**TIGHT, pipeline_parallel_size=2, attention_backend="tests.executor.backends.FailsInTheFirstStage")
    prompts = [[3 + i] * 20 for i in range(6)]
    with caplog.at_level("ERROR"):
        failing = tokens(llm, prompts)
    assert "rank 0 of 2: RuntimeError: a stage that fails" in caplog.text
    assert failing == tokens(llm, prompts)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 3])
def test_more_or_fewer_plans_than_stages(one_process: dict[str, Any], make_llm: Callable[..., LLM], depth: int) -> None:
    assert full_load(make_llm(**SWAPS, pipeline_parallel_size=2, pipeline_depth=depth)) == one_process


@pytest.mark.slow
def test_streams_through_stages(tiny_model: Path, make_llm: Callable[..., LLM]) -> None:
    """Prompts arrive while other requests stream: the pacer chunks them, in whichever plan they are."""
    prompts = [[(5 * i + j) % 90 + 4 for j in range(30 + 4 * i)] for i in range(12)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = tokens(make_llm(), prompts, max_tokens=20)

    async def one(llm: AsyncLLM, i: int) -> list[int]:
        await asyncio.sleep(0.02 * i)
        outputs = [output async for output in llm.generate(prompts[i], params, str(i))]
        return list(outputs[-1].outputs[0].token_ids)

    async def live() -> list[list[int]]:
        llm = AsyncLLM(str(tiny_model), **TIGHT, pipeline_parallel_size=2)
        try:
            return await asyncio.gather(*(one(llm, i) for i in range(len(prompts))))
        finally:
            llm.shutdown()

    assert [[answer] for answer in asyncio.run(live())] == expected


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"pipeline_parallel_size": 3}, "2 layers cannot fill 3 pipeline stages"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be an integer of at least 1"),
        ({"pipeline_parallel_size": 2, "pipeline_layers": "3,1"}, "sum up to the model's 2 layers; they sum up to 4"),
        ({"pipeline_parallel_size": 2, "pipeline_layers": "2"}, "each of the 2 stages .* as 8,8; got '2'"),
        ({"pipeline_parallel_size": 2, "pipeline_layers": [0, 2]}, "each of the 2 stages .* at least 1 layer"),
        ({"pipeline_parallel_size": 2, "pipeline_layers": "one,two"}, "got 'one,two'"),
        ({"pipeline_layers": "1,1"}, "each of the 1 stages"),
        ({"pipeline_parallel_size": 2, "distributed_executor_backend": "uni"}, "'uni' runs one rank, but pipeline_par"),
        ({"pipeline_parallel_size": 2, "enable_expert_parallel": True}, "needs a mixture of experts, and Llama"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(settings: dict[str, Any], message: str, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        LLM(str(tiny_model), **TIGHT, **settings)
    assert "\n" not in str(caught.value)


def test_layers_are_spread_evenly_or_as_configured() -> None:
    assert [spread(24, 3), spread(30, 4), spread(31, 4), spread(7, 2)] == [
        (8, 8, 8),
        (7, 8, 8, 7),
        (8, 8, 8, 7),
        (4, 3),
    ]
    for stages in range(1, 9):
        for layers in range(stages, 40):
            counts = spread(layers, stages)
            assert sum(counts) == layers and max(counts) - min(counts) <= 1 and counts[-1] == min(counts)
    configured = EngineConfig("m", pipeline_parallel_size=3, pipeline_layers=[2, 5, 1]).stage_layers
    ranges = [Ranks.at(rank, 2, 3, configured).layers(8) for rank in range(6)]
    assert ranges == [range(2)] * 2 + [range(2, 7)] * 2 + [range(7, 8)] * 2


STAGES = {
    **{name: (config, 2, "") for name, config in MODELS.items()},
    "gpt2 in three": (_gpt2(), 3, ""),
    "llama-tied": (ZOO["llama-tied"], 2, ""),
    "mixture in uneven stages": (ZOO["qwen3-moe-dense-layers"], 3, "1,3,1"),
    "windows above": (ZOO["qwen2-upper-windows"], 2, "1,2"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, ranks",
    # The three heads of one of them cannot be split over two ranks.
    [(name, ranks) for name in STAGES for ranks in (1, 2) if (name, ranks) != ("gpt2 in three", 2)],
)
def test_architectures_in_stages(name: str, ranks: int, tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    config, stages, layers = STAGES[name]
    random_reference(config).save_pretrained(tmp_path / "model")
    prompts = [[(7 * i + 3 * j) % 97 for j in range(20 + 5 * i)] for i in range(4)]
    settings = {**SWAPS, "skip_tokenizer_init": True}
    one = make_llm(tmp_path / "model", **settings)
    several = make_llm(
        tmp_path / "model", **settings, pipeline_parallel_size=stages, pipeline_layers=layers or None,
        tensor_parallel_size=ranks,
    )  # fmt: skip
    assert tokens(several, prompts) == tokens(one, prompts)
    assert experts(several) == experts(one)


def experts(llm: LLM) -> set[int]:
    """The layers that report expert counts."""
    return set(llm.llm_engine.core._executor.expert_counts())


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2], ids=["one rank each", "two ranks each"])
def test_sessions_and_tiers_in_stages(
    make_llm: Callable[..., LLM], shared_tiny: LLM, tmp_path: Path, depth: int, ranks: int
) -> None:
    make = functools.partial(make_llm, pipeline_parallel_size=2, tensor_parallel_size=ranks)
    seen = run_storm(make, shared_tiny, tmp_path, "host", seed=20 + depth, operations=100)
    assert seen["found"] > 0.3 * seen["tokens"], "most computed tokens are cache hits"


@pytest.mark.slow
def test_three_stages_of_the_default_model(make_llm: Callable[..., LLM]) -> None:
    """Thirty layers, eight in one stage and twelve in another; embedding and head are one tensor."""
    settings = {"max_num_batched_tokens": 128, "num_gpu_blocks_override": 64, "max_model_len": 512}
    prompts = ["The capital of France is", "Once upon a time", "def fibonacci(n):\n", "The capital of France " * 30]
    params = SamplingParams(temperature=0, max_tokens=48)
    texts = []
    for stages in ({}, {"pipeline_parallel_size": 3, "pipeline_layers": "10,12,8"}):
        llm = make_llm("smollm2-135m", **settings, **stages)
        texts.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_a_step_that_fails_on_one_rank_of_a_stage_ends_the_engine(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(**TIGHT, pipeline_parallel_size=2, tensor_parallel_size=2, logits_processors=[FAILS])
    assert tokens(llm, [BEGIN], extra_args={"fails": "everywhere"}) == tokens(llm, [BEGIN])
    llm.shutdown()
    llm = make_llm(**TIGHT, pipeline_parallel_size=2, tensor_parallel_size=2, logits_processors=[FAILS])
    pids = llm.llm_engine.core._executor.pids
    with pytest.raises(EngineDeadError, match="rank 3 of 4: RuntimeError: a processor that fails"):
        tokens(llm, [BEGIN], extra_args={"fails": 3})
    assert not any(is_running(pid) for pid in pids)
