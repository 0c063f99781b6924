"""First tokens are delivered before those of running streams, and each stream's tokens keep their order."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quire import AsyncLLM, RequestOutputKind, SamplingParams
from quire.api.output_stream import split_outputs
from quire.messages.outputs import Finished, Started, StepOutputs
from quire.messages.plan import PromptLogprobs, TokenLogprobs


class NullLLM(AsyncLLM):
    """Its engine computes nothing."""

    engine_module = "benchmarks.null_engine"


def test_every_output_of_a_step_is_in_one_of_the_parts() -> None:
    entry = TokenLogprobs([7], [-0.5], 1)
    outputs = StepOutputs(
        keys=[("a", 0), ("b", 0), ("a", 1), ("c", 0)],
        tokens=[1, 2, 3, 4],
        logprobs={1: entry, 2: entry},
        prompt_logprobs=[(("b", 0), PromptLogprobs(1, [entry]))],
        vectors=[(("c", 0), b"1234")],
        started=[Started(("a", 0), 1.0, 0), Started(("b", 0), 1.0, 16)],
        preempted=[("b", 0)],
        finished=[Finished(("a", 1), "stop"), Finished(("c", 0), "length")],
    )
    first, rest = split_outputs(outputs, {"a"})
    assert first == StepOutputs(
        keys=[("a", 0), ("a", 1)],
        tokens=[1, 3],
        logprobs={1: entry},
        started=[Started(("a", 0), 1.0, 0)],
        finished=[Finished(("a", 1), "stop")],
    )
    assert rest == StepOutputs(
        keys=[("b", 0), ("c", 0)],
        tokens=[2, 4],
        logprobs={0: entry},
        prompt_logprobs=outputs.prompt_logprobs,
        vectors=outputs.vectors,
        started=[Started(("b", 0), 1.0, 16)],
        preempted=[("b", 0)],
        finished=[Finished(("c", 0), "length")],
    )


def test_a_first_token_is_read_before_the_others_of_its_step(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NULL_ENGINE_PACE", "20")
    asked = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    read: list[str] = []

    async def user(llm: AsyncLLM, name: str) -> list[int]:
        tokens: list[int] = []
        async for output in llm.generate([5, 6, 7], asked, name):
            read.append(name)
            tokens += output.outputs[0].token_ids
        return tokens

    async def work() -> None:
        async with NullLLM(tiny_model) as llm:
            readers = [asyncio.ensure_future(user(llm, f"r{i}")) for i in range(20)]
            while len(read) < 100:
                await asyncio.sleep(0.001)
            late = asyncio.ensure_future(user(llm, "late"))
            while "late" not in read:
                await asyncio.sleep(0)
            # Its step has a token for every stream, and its own row is the last.
            at = read.index("late")
            assert len(set(read[at - 20 : at])) == 20  # the step before
            await asyncio.sleep(0.02)
            assert set(read[at + 1 : at + 21]) == {f"r{i}" for i in range(20)}
            for reader in (late, *readers):
                assert len(await reader) == 60

    asyncio.run(asyncio.wait_for(work(), 60))


def test_tokens_keep_their_order_while_others_arrive(tiny_model: Path) -> None:
    """An engine without delays sends many steps in one read: deferred outputs must precede the next step's."""
    asked = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, output_kind=RequestOutputKind.DELTA)

    async def user(llm: AsyncLLM) -> tuple[str, list[int]]:
        text, tokens = "", list[int]()
        async for output in llm.generate([5, 6, 7], asked):
            text += output.outputs[0].text
            tokens += output.outputs[0].token_ids
        return text, tokens

    async def work() -> None:
        async with NullLLM(tiny_model) as llm:
            tokenizer = await llm.get_tokenizer()
            running: list[asyncio.Task[tuple[str, list[int]]]] = []
            for _ in range(120):
                running.append(asyncio.ensure_future(user(llm)))
                await asyncio.sleep(0)
            for text, tokens in await asyncio.gather(*running):
                assert len(tokens) == 50 and text == tokenizer.decode(tokens)

    asyncio.run(asyncio.wait_for(work(), 60))
