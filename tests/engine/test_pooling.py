"""Vectors equal transformers' hidden states, pooled: for any chunking, caching, preemption and mix of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, PoolingParams, SamplingParams
from quire.errors import CacheTooSmallError
from quire.platforms.cpu import CpuPlatform
from tests.conftest import assert_idle
from tests.kernels.triton_target import ON_GPU
from tests.models.harness import random_reference
from tests.models.zoo import ZOO

PROMPTS = [[(11 * i + 5 * j) % 97 for j in range(length)] for i, length in enumerate((1, 7, 16, 33, 50))]
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, detokenize=False)
RAW = {name: PoolingParams(pooling=name, use_activation=False) for name in ("last", "mean")}
POOLINGS = pytest.mark.parametrize("pooling", RAW)
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


class Model:
    """A tiny random checkpoint, and its vectors by transformers."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self._reference = random_reference(ZOO[name])
        self._reference.save_pretrained(folder)

    @torch.inference_mode()
    def vector(self, prompt: list[int], pooling: str) -> np.ndarray:
        (hidden,) = self._reference.base_model(torch.tensor([prompt])).last_hidden_state
        return (hidden[-1] if pooling == "last" else hidden.mean(0)).numpy()

    def assert_vectors(self, outputs: list[Any], pooling: str, prompts: list[list[int]] = PROMPTS) -> None:
        for output, prompt in zip(outputs, prompts, strict=True):
            assert output.finished and output.error is None and output.prompt_token_ids == prompt
            np.testing.assert_allclose(output.outputs.data, self.vector(prompt, pooling), rtol=2e-4, atol=2e-4)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def engine(llama: Model) -> Iterator[Callable[..., LLM]]:
    """Engines over the llama, checked and shut down after the test."""
    made: list[LLM] = []

    def make(model: Model = llama, **settings: Any) -> LLM:
        usual = {"dtype": "float32", "num_gpu_blocks_override": 64, "device": "cpu", "skip_tokenizer_init": True}
        made.append(LLM(str(model.folder), **(usual | {"block_size": 4, "max_num_seqs": 8} | settings)))
        return made[-1]

    yield make
    for llm in made:
        assert_idle(llm)
        llm.shutdown()


def preemptions(llm: LLM) -> int:
    return llm.llm_engine.core.scheduler.stats.preemptions


@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "qwen3", "mistral-window", "gpt2", "gpt-neox"])
def test_every_architecture(name: str, engine: Callable[..., LLM], tmp_path: Path) -> None:
    model = Model(tmp_path, name)
    for settings in ({}, {"max_num_batched_tokens": 9}):
        llm = engine(model, enable_prefix_caching=False, **settings)
        for pooling, params in RAW.items():
            model.assert_vectors(llm.encode(PROMPTS, params, use_tqdm=False), pooling)


@DEPTHS
@POOLINGS
@pytest.mark.parametrize("budget", [8, 13, 200])
def test_chunks_of_any_size(pooling: str, depth: int, budget: int, llama: Model, engine: Callable[..., LLM]) -> None:
    llm = engine(pipeline_depth=depth, max_num_batched_tokens=budget)
    llama.assert_vectors(llm.encode(PROMPTS, RAW[pooling], use_tqdm=False), pooling)


@DEPTHS
def test_last_token_pooling_uses_cached_tokens_and_mean_pooling_needs_all(
    depth: int, llama: Model, engine: Callable[..., LLM]
) -> None:
    llm = engine(pipeline_depth=depth)
    (generated,) = llm.generate([PROMPTS[4]], GREEDY, use_tqdm=False)
    for pooling, cached in (("last", 48), ("mean", 0), ("last", 48)):
        (output,) = llm.encode([PROMPTS[4]], RAW[pooling], use_tqdm=False)
        assert output.num_cached_tokens == cached
        llama.assert_vectors([output], pooling, [PROMPTS[4]])
    (again,) = llm.generate([PROMPTS[4]], GREEDY, use_tqdm=False)
    assert again.num_cached_tokens == 48 and again.outputs[0].token_ids == generated.outputs[0].token_ids


@DEPTHS
@pytest.mark.parametrize("blocks", [64, 18])
def test_pooling_and_generating_requests_share_steps(
    depth: int, blocks: int, llama: Model, engine: Callable[..., LLM]
) -> None:
    """Generating requests draw the same tokens as alone; with few blocks, some of both kinds are preempted."""
    alone = engine().generate(PROMPTS, GREEDY, use_tqdm=False)
    expected = {tuple(output.prompt_token_ids): list(output.outputs[0].token_ids) for output in alone}
    llm = engine(
        pipeline_depth=depth, num_gpu_blocks_override=blocks, max_num_batched_tokens=12, enable_prefix_caching=False
    )
    asked: dict[str, Any] = {}
    for i, prompt in enumerate(PROMPTS):
        for params in (GREEDY, RAW["mean"], GREEDY, RAW["last"]):
            asked[str(len(asked))] = (prompt, params)
            llm.llm_engine.add_request(str(len(asked) - 1), prompt, params, priority=i)
    seen = {}
    while llm.llm_engine.has_unfinished_requests():
        seen |= {output.request_id: output for output in llm.llm_engine.step() if output.finished}
    assert seen.keys() == asked.keys()
    for request, (prompt, params) in asked.items():
        if params is GREEDY:
            assert list(seen[request].outputs[0].token_ids) == expected[tuple(prompt)]
        else:
            llama.assert_vectors([seen[request]], params.pooling, [prompt])
    assert (preemptions(llm) > 0) == (blocks < 64)


@DEPTHS
@POOLINGS
def test_a_preempted_prompt_restarts_its_sum(
    pooling: str, depth: int, llama: Model, engine: Callable[..., LLM]
) -> None:
    """A long prompt is half computed when decoding rows take its blocks."""
    llm = engine(
        pipeline_depth=depth, num_gpu_blocks_override=22, max_num_batched_tokens=8, enable_prefix_caching=False,
        scheduling_policy="priority",
    )  # fmt: skip
    decodes = GREEDY.clone()
    decodes.max_tokens = 25
    for i in range(3):
        llm.llm_engine.add_request(f"decode {i}", PROMPTS[1], decodes)
    for _ in range(5):
        llm.llm_engine.step()
    llm.llm_engine.add_request("vector", PROMPTS[3], RAW[pooling], priority=5)
    outputs = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += [output for output in llm.llm_engine.step() if output.request_id == "vector"]
    llama.assert_vectors(outputs, pooling, [PROMPTS[3]])
    assert outputs[0].metrics.preemptions > 0


@DEPTHS
@POOLINGS
def test_a_failed_step_restarts_from_the_prompt(
    pooling: str, depth: int, llama: Model, engine: Callable[..., LLM]
) -> None:
    llm = engine(pipeline_depth=depth, max_num_batched_tokens=8)
    worker = llm.llm_engine.core._executor._worker  # type: ignore[attr-defined]
    launch, steps = worker.launch, []

    def failing(plan: Any) -> Any:
        steps.append(plan.step)
        if len(steps) == 4:
            raise RuntimeError("a step of this test fails")
        return launch(plan)

    worker.launch = failing
    llama.assert_vectors(llm.encode(PROMPTS, RAW[pooling], use_tqdm=False), pooling)


@DEPTHS
def test_aborted_requests_leave_nothing_behind(depth: int, engine: Callable[..., LLM]) -> None:
    llm = engine(pipeline_depth=depth, max_num_batched_tokens=8)
    for i, params in enumerate(RAW.values()):
        llm.llm_engine.add_request(str(i), PROMPTS[4], params)
    for _ in range(3):
        llm.llm_engine.step()
    llm.llm_engine.abort_request(["0", "1"])
    assert_idle(llm)


def test_hidden_states_that_are_not_numbers_fail_their_request_alone(
    llama: Model, engine: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine()
    worker = llm.llm_engine.core._executor._worker  # type: ignore[attr-defined]
    worker.model.model.embed_tokens.weight[3] = float("nan")
    good, bad = llm.encode([PROMPTS[1], [1, 3, 5]], RAW["mean"], use_tqdm=False)
    llama.assert_vectors([good], "mean", [PROMPTS[1]])
    assert bad.finish_reason == "error" and "not numbers" in bad.error and len(bad.outputs.data) == 0


def test_a_prompt_may_fill_the_models_length_and_the_cache(llama: Model, engine: Callable[..., LLM]) -> None:
    """Nothing is generated, so no slot is reserved for a new token."""
    llm = engine(num_gpu_blocks_override=16)
    prompt = [(3 * i) % 97 for i in range(64)]
    llama.assert_vectors(llm.encode([prompt], RAW["mean"], use_tqdm=False), "mean", [prompt])
    small = engine(num_gpu_blocks_override=15)
    with pytest.raises(CacheTooSmallError, match="61 tokens do not fit the KV cache of 60"):
        small.encode([prompt[:61]], use_tqdm=False)
    params = PoolingParams(pooling="last", use_activation=False, truncate_prompt_tokens=-1)
    llama.assert_vectors(small.encode([prompt], params, use_tqdm=False), "last", [prompt[:60]])


@pytest.mark.skipif(ON_GPU, reason="on a GPU the kernels are compiled: tests/gpu runs the engine there")
@pytest.mark.parametrize("depth, budget", [(0, 200), (1, 13)])
def test_with_the_gpu_kernels(
    depth: int, budget: int, llama: Model, engine: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter, both kinds of pooling beside a generating request."""
    few = GREEDY.clone()
    few.max_tokens = 4
    expected = engine().generate([PROMPTS[2]], few, use_tqdm=False)[0].outputs[0].token_ids
    monkeypatch.setattr(CpuPlatform, "ops", "quire.kernels.triton.ops.TritonOps")
    monkeypatch.setattr(CpuPlatform, "attention", "triton")
    llm = engine(enforce_eager=True, pipeline_depth=depth, max_num_batched_tokens=budget)
    stream = llm.stream([PROMPTS[2]], few)
    next(stream)
    for pooling, params in RAW.items():
        llama.assert_vectors(llm.encode(PROMPTS[1:3], params, use_tqdm=False), pooling, PROMPTS[1:3])
    *_, last = stream
    assert list(last.outputs[0].token_ids) == list(expected)
