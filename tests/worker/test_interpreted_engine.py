"""The whole engine with the GPU's kernels, in Triton's interpreter: the tokens of the engine with the CPU's kernels.
Not covered here is what only a device has: pinned memory, events, graphs (`tests/gpu`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.platforms.cpu import CpuPlatform
from tests.conftest import TINY_VOCAB, assert_idle
from tests.kernels.triton_target import ON_GPU

pytestmark = pytest.mark.skipif(ON_GPU, reason="on a GPU the kernels are compiled: tests/gpu runs the engine there")

LENGTH = 5
PROMPTS = [[(11 * i + 5 * j) % TINY_VOCAB for j in range(4 + 5 * i)] for i in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=-7, max_tokens=LENGTH, ignore_eos=True)
PLAIN = SamplingParams(temperature=1.1, seed=2**63, max_tokens=LENGTH, ignore_eos=True)
TOP_K = SamplingParams(temperature=0.8, top_k=9, min_p=0.02, seed=5, n=2, max_tokens=LENGTH, ignore_eos=True)
XTC = SamplingParams(
    temperature=1.2, top_n_sigma=2.0, xtc_probability=0.6, xtc_threshold=0.01, seed=9, max_tokens=LENGTH,
    ignore_eos=True,
)  # fmt: skip
PARAMS = [GREEDY, SEEDED, TOP_K, XTC]


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    assert all(output.error is None for output in outputs)
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[list[int]]]:
    """Tokens of the CPU's kernels."""
    with LLM(str(tiny_model), dtype="float32", num_gpu_blocks_override=64, device="cpu") as llm:
        return tokens_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.fixture
def interpreted(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    """Engines on the CPU that run the GPU's kernels."""
    monkeypatch.setattr(CpuPlatform, "ops", "quire.kernels.triton.ops.TritonOps")
    monkeypatch.setattr(CpuPlatform, "attention", "triton")
    made: list[LLM] = []

    def make(**settings: Any) -> LLM:
        usual = {"dtype": "float32", "num_gpu_blocks_override": 64, "device": "cpu", "enforce_eager": True}
        made.append(LLM(str(tiny_model), **(usual | {"max_num_seqs": 8} | settings)))
        return made[-1]

    yield make
    for llm in made:
        assert_idle(llm)
        llm.shutdown()


def preemptions(llm: LLM) -> int:
    return llm.llm_engine.core.scheduler.stats.preemptions


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"pipeline_depth": 0}, marks=pytest.mark.slow),
        {"pipeline_depth": 1, "max_num_batched_tokens": 6, "max_num_seqs": 4, "block_size": 8},
        pytest.param({"pipeline_depth": 0, "num_gpu_blocks_override": 8, "block_size": 4}, marks=pytest.mark.slow),
        {"pipeline_depth": 1, "num_gpu_blocks_override": 8, "block_size": 4},
    ],
    ids=["synchronous", "overlapped, tiny chunks", "preempted", "overlapped, preempted"],
)
def test_tokens_equal_those_of_the_cpus_kernels(
    interpreted: Callable[..., LLM], expected: list[list[list[int]]], settings: dict[str, Any]
) -> None:
    llm = interpreted(**settings)
    assert tokens_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    assert (preemptions(llm) > 0) == ("num_gpu_blocks_override" in settings)


@pytest.mark.parametrize("name", [pytest.param("fp8", marks=pytest.mark.slow), "int8_per_token_head"])
def test_keys_and_values_in_few_bits(
    interpreted: Callable[..., LLM], tiny_model: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    settings = {"kv_cache_dtype": name, "block_size": 4, "max_num_batched_tokens": 12}
    prompts, params = PROMPTS[1:3], [msgspec.structs.replace(each, max_tokens=3) for each in (GREEDY, SEEDED)]
    ours = interpreted(pipeline_depth=1, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(CpuPlatform, "ops", "quire.kernels.cpu.ops.CpuOps")
        patch.setattr(CpuPlatform, "attention", "cpu")
        usual = {"dtype": "float32", "num_gpu_blocks_override": 64, "device": "cpu"}
        with LLM(str(tiny_model), **usual, **settings) as theirs:
            expected = tokens_of(theirs.generate(prompts, params, use_tqdm=False))
    assert tokens_of(ours.generate(prompts, params, use_tqdm=False)) == expected


def test_cached_blocks_with_rows_of_every_kind(
    interpreted: Callable[..., LLM], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefix hit, a prefix group, and rows with lists and logprobs in one batch: the same results as the CPU's
    kernels."""
    for least in ("LEAST_TOKENS", "LEAST_SAVED"):
        monkeypatch.setattr(f"quire.scheduler.prefix_groups.{least}", 8)
    listed = SamplingParams(
        temperature=0.8, seed=3, max_tokens=4, min_tokens=3, repetition_penalty=1.2, presence_penalty=0.5,
        logit_bias={5: 2.0}, allowed_token_ids=list(range(2, 90)), logprobs=2, prompt_logprobs=1,
    )  # fmt: skip
    ours = interpreted(pipeline_depth=1, block_size=4)
    prompts, params = [PROMPTS[2]] * 3, [GREEDY, listed, PLAIN]
    theirs = llm.generate(prompts, params, use_tqdm=False)
    worker = ours.llm_engine.core._executor._worker  # type: ignore[attr-defined]
    launch, grouped = worker.launch, []
    worker.launch = lambda plan: grouped.append(bool(plan.groups)) or launch(plan)
    outputs = ours.generate(prompts, params, use_tqdm=False)
    assert any(grouped)
    assert tokens_of(outputs) == tokens_of(theirs)
    (again,) = ours.generate([PROMPTS[2]], GREEDY, use_tqdm=False)
    assert again.num_cached_tokens == 12
    assert tokens_of([again]) == tokens_of(outputs[:1])
    _assert_same_reports(outputs[1], theirs[1])


def _assert_same_reports(ours: RequestOutput, theirs: RequestOutput) -> None:
    mine = [*(ours.prompt_logprobs or []), *(ours.outputs[0].logprobs or [])]
    others = [*(theirs.prompt_logprobs or []), *(theirs.outputs[0].logprobs or [])]
    for entry, other in zip(mine, others, strict=True):
        assert (entry or {}).keys() == (other or {}).keys()
        for token, value in (entry or {}).items():
            assert value.logprob == pytest.approx(other[token].logprob, abs=1e-4)
            assert value.rank == other[token].rank


def test_gemms_fused_with_the_residual_add(
    interpreted: Callable[..., LLM], expected: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.kernels.triton import ops

    added: list[int] = []
    linear_add = ops.TritonOps.linear_add

    def noted(self: Any, stream: Any, x: Any, *more: Any) -> Any:
        result = linear_add(self, stream, x, *more)
        added.append(len(x) if result is None else 0)
        return result

    monkeypatch.setattr(ops, "FUSED_ADD_MIN_ROWS", 6)
    monkeypatch.setattr(ops.TritonOps, "linear_add", noted)
    llm = interpreted(pipeline_depth=0)
    assert tokens_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    assert max(added) >= sum(map(len, PROMPTS))
    assert min(added) == 0
