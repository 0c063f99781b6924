"""Scripts written for vLLM find its names here, and need only another import."""

from __future__ import annotations

import asyncio
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import quire
from quire import LLM, AsyncEngineArgs, AsyncLLMEngine, EngineArgs, LLMEngine, SamplingParams
from tests.conftest import assert_idle

GREEDY = SamplingParams(temperature=0, max_tokens=4)
TINY = {"device": "cpu", "num_gpu_blocks_override": 16, "max_model_len": 128}


@pytest.mark.parametrize(
    "module, names",
    [
        ("quire.sampling_params", "SamplingParams BeamSearchParams StructuredOutputsParams RequestOutputKind"),
        ("quire.outputs", "RequestOutput CompletionOutput PoolingRequestOutput EmbeddingRequestOutput"),
        ("quire.inputs", "TextPrompt TokensPrompt PromptType"),
    ],
)
def test_names_in_vllms_modules(module: str, names: str) -> None:
    for name in names.split():
        assert getattr(import_module(module), name) is getattr(quire, name)


def test_the_version_as_numbers() -> None:
    assert ".".join(map(str, quire.__version_tuple__)) == quire.__version__


def test_engines_from_engine_args(tiny_model: Path) -> None:
    args = EngineArgs(model=str(tiny_model), quantization=None, enable_lora=False, block_size=None, **TINY)
    assert args.block_size == 16
    with LLM.from_engine_args(args) as llm:
        expected = llm.generate("abc", GREEDY, use_tqdm=False)[0].outputs[0].text
    engine = LLMEngine.from_engine_args(args)
    engine.add_request("0", "abc", GREEDY)
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    engine.shutdown()
    assert outputs[-1].outputs[0].text == expected
    with pytest.raises(TypeError, match="frobnicate"):
        EngineArgs(frobnicate=1)


def test_an_async_engine_from_engine_args(tiny_model: Path) -> None:
    async def last() -> Any:
        engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=str(tiny_model), disable_log_stats=True, **TINY))
        async with engine:
            return [output async for output in engine.generate("abc", GREEDY, "id-1", lora_request=None)][-1]

    output = asyncio.run(last())
    assert output.finished
    assert output.request_id == "id-1"


def test_queue_now_and_collect_later(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ["abc", "the world", "xyz"]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    ids = llm.enqueue(prompts[:2], GREEDY)
    ids += llm.enqueue(prompts[2], GREEDY)
    found = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in found] == ids
    assert [output.outputs[0].token_ids for output in found] == expected
    assert llm.wait_for_completion(use_tqdm=False) == []
    llm.enqueue(prompts[:2], GREEDY)
    llm.enqueue(prompts, GREEDY)
    monkeypatch.setattr(llm, "_gather", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.wait_for_completion(use_tqdm=False)
    assert_idle(llm)


def test_iteration_tokens_are_counted_as_outputs_come(tiny_model: Path) -> None:
    """A step counts if it has outputs: the tokens it generated, and prompts that got their first token or their vector
    by then, less what was cached."""

    def counted(llm: LLM) -> tuple[int, float]:
        metric = next(one for one in llm.get_metrics() if one.name == "quire:iteration_tokens_total")
        return sum(metric.counts), metric.value

    with LLM(tiny_model, device="cpu", num_gpu_blocks_override=64, max_num_seqs=4, max_num_batched_tokens=16) as llm:
        prompt = list(range(5, 45))
        llm.generate(prompt, GREEDY, use_tqdm=False)  # in chunks of 16: two steps have no outputs
        assert counted(llm) == (4, 40 + 4)
        llm.generate(prompt, GREEDY, use_tqdm=False)  # 32 of 40 are cached
        assert counted(llm) == (8, 44 + 8 + 4)
        llm.embed([[5, 6, 7]], use_tqdm=False)
        assert counted(llm) == (9, 56 + 3)
        llm.generate([7, 8], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        assert counted(llm) == (10, 59 + 2 + 1)
        next(llm.stream(prompt[::-1], SamplingParams(temperature=0, max_tokens=9)))  # and is aborted
        count, total = counted(llm)
        llm.generate([9], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        assert counted(llm) == (count + 1, total + 2)
