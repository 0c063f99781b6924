"""Engines that share the experts, behind one `AsyncLLM`: the tokens of one engine; they die together."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.errors import ConfigError, EngineDeadError
from quire.messages.sampling import StructuredOutputsParams
from tests.api.test_replicas import SETTINGS as PAIR
from tests.api.test_replicas import NullLLM, assert_idle, final, greedy, run
from tests.executor.mixtures import CONFIGS, write_mixture
from tests.executor.test_multiprocess import is_running

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "block_size": 4, "num_gpu_blocks_override": 40, "max_num_batched_tokens": 16,
    "max_num_seqs": 6, "disable_log_stats": True,
}  # fmt: skip
TOGETHER: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
SHARED = "the world one two three "
PROMPTS = [*(SHARED + str(i) for i in range(6)), *("x the " * i for i in range(1, 14, 4)), "abc"]
FORM = StructuredOutputsParams(regex="[a-f]{4}x")


def expected(llm: LLM, prompts: list[str], params: SamplingParams) -> list[list[Any]]:
    return [[one.token_ids for one in output.outputs] for output in llm.generate(prompts, params, use_tqdm=False)]


async def asked(llm: AsyncLLM, prompts: list[str], params: SamplingParams) -> list[list[Any]]:
    outputs = await asyncio.gather(*(final(llm, prompt, params) for prompt in prompts))
    return [[one.token_ids for one in output.outputs] for output in outputs]


async def talk(llm: AsyncLLM, name: str) -> list[Any]:
    """A session of three turns; the tokens of each."""
    answers, text = [], ""
    for turn in ("the world", " is one", " and two"):
        text += turn
        output = await final(llm, text, greedy(max_tokens=8), session=name)
        answers.append(list(output.outputs[0].token_ids))
        text = str(output.prompt) + output.outputs[0].text
    return answers


def compare(name: str, folder: Path, make_llm: Callable[..., LLM], with_grammars: bool, **more: Any) -> None:
    write_mixture(folder, name)
    alone = make_llm(folder, **SETTINGS)
    kinds = [greedy(), greedy(n=3, temperature=1.0, seed=5)]
    if with_grammars:  # each engine starts a process for them
        kinds.append(greedy(max_tokens=8, structured_outputs=FORM))
    wanted = [expected(alone, PROMPTS, params) for params in kinds]

    async def live() -> None:
        single = AsyncLLM(folder, **SETTINGS)
        try:
            turns = await talk(single, "a")
        finally:
            single.shutdown()
        llm = AsyncLLM(folder, **SETTINGS, **TOGETHER, **more)
        try:
            for params, tokens in zip(kinds, wanted, strict=True):
                assert await asked(llm, PROMPTS, params) == tokens
            assert await asked(llm, PROMPTS[:1], kinds[0]) == wanted[0][:1], "only one has anything to do"
            talks = await asyncio.gather(*(talk(llm, f"s{i}") for i in range(3)), asked(llm, PROMPTS, kinds[0]))
            assert talks == [turns, turns, turns, wanted[0]]
            outcome = await llm.rebalance_experts()
            assert outcome.after <= outcome.before
            assert await asked(llm, PROMPTS, kinds[0]) == wanted[0]
            for i in range(3):
                await llm.sessions.delete(f"s{i}")
            await assert_idle(llm)
        finally:
            llm.shutdown()

    run(live())


def test_two_engines_with_half_the_experts_each_match_one(tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    compare("qwen2-moe", tmp_path / "model", make_llm, with_grammars=False, num_redundant_experts=2)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"swap_space": 0.001}, {"num_redundant_experts": 3}], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_families(name: str, more: dict[str, Any], tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    compare(name, tmp_path / "model", make_llm, with_grammars=True, **more)


@pytest.mark.parametrize("victims", [[1], pytest.param([0, 1, 0, 1], marks=pytest.mark.slow)], ids=len)
def test_when_one_dies_all_die_and_all_restart(
    victims: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    folder = write_mixture(tmp_path / "model", "mixtral")

    async def live() -> None:
        llm = AsyncLLM(folder, **SETTINGS, **TOGETHER)
        try:
            before = await asked(llm, PROMPTS[:4], greedy())
            whole = await asked(llm, PROMPTS[:4], greedy(max_tokens=60))
            for victim in victims:
                pids = [replica.pid for replica in llm.replicas]
                running = [asyncio.create_task(final(llm, prompt, greedy(max_tokens=60))) for prompt in PROMPTS[:4]]
                await asyncio.sleep(0.3)
                os.kill(pids[victim], signal.SIGKILL)
                assert "was killed by SIGKILL" in await asyncio.wait_for(llm.wait_until_dead(), 20)
                outputs = await asyncio.gather(*running)  # they go on at the next engines
                assert [[one.token_ids for one in output.outputs] for output in outputs] == whole
                await llm.restart(only_if_dead=True)
                assert not any(is_running(pid) for pid in pids)
                assert await asked(llm, PROMPTS[:4], greedy()) == before
        finally:
            llm.shutdown()

    run(live())
    assert not list((tmp_path / "tmp").glob("quire-lockstep-*"))


@pytest.mark.slow
def test_a_request_sent_before_the_last_engine_is_ready_is_served(tmp_path: Path) -> None:
    folder = write_mixture(tmp_path / "model", "mixtral")

    async def live() -> None:
        llm = AsyncLLM(folder, **SETTINGS, **TOGETHER, max_engine_restarts=0)
        try:
            before = await asked(llm, PROMPTS[:1], greedy())
            first, late = llm.replicas
            os.kill(first.pid, signal.SIGKILL)
            await asyncio.wait_for(llm.wait_until_dead(), 20)
            make, first_is_asked = late._make_engine, asyncio.Event()

            async def make_later() -> None:
                adopt, late.adopt = late.adopt, lambda: None
                await make()
                late.adopt = adopt
                await first_is_asked.wait()
                late.adopt()

            late._make_engine = make_later
            restart = asyncio.create_task(llm.restart(only_if_dead=True))
            while first.death:
                await asyncio.sleep(0.01)
            with pytest.raises(EngineDeadError, match="replica 1"):
                await llm.rebalance_experts()
            early = asyncio.create_task(asked(llm, PROMPTS[:1], greedy()))
            await asyncio.sleep(0.1)
            first_is_asked.set()
            await restart
            assert await asyncio.wait_for(early, 20) == before
        finally:
            llm.shutdown()

    run(live())


@pytest.mark.slow
def test_a_dense_model_is_refused_in_a_line(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="enable_expert_parallel needs a mixture of experts, and LlamaForCausalLM"):
        AsyncLLM(tiny_model, **SETTINGS, **TOGETHER)


def test_a_cancelled_restart_leaves_no_engine_that_starts_alone(tiny_model: Path) -> None:
    async def work() -> None:
        async with NullLLM(tiny_model, **PAIR) as pair:
            restart = asyncio.ensure_future(pair._group._restart_each(False))
            await asyncio.sleep(0.01)  # the old ones are being ended
            restart.cancel()
            with pytest.raises(asyncio.CancelledError):
                await restart
            assert asyncio.all_tasks() == {asyncio.current_task()} and pair.errored
            assert not any(replica.starting for replica in pair.replicas)

    asyncio.run(work())
