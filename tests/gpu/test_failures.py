"""Failures on a device end a request, or a step, and not the engine; impossible settings are refused at start."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, RequestOutput, SamplingParams
from quire.errors import CacheTooSmallError, ModelTooLargeError
from quire.messages.plan import StepPlan
from tests.conftest import TINY_VOCAB, tiny_tokenizer
from tests.gpu.near_ties import NearTies, greedy
from tests.gpu.target import DEVICE, ON_A_GPU, USUAL

pytestmark = ON_A_GPU

PROMPTS = [[(13 * i + 5 * j) % TINY_VOCAB for j in range(6 + 4 * i)] for i in range(6)]
LENGTH = 24
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
RANDOM = SamplingParams(temperature=1.0, seed=1, max_tokens=LENGTH, ignore_eos=True)
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


class Poison:
    """A logits processor that yields NaN after a number of tokens."""

    def applies(self, params: SamplingParams) -> bool:
        return "poison" in (params.extra_args or {})

    def apply(
        self, logits: torch.Tensor, prompt: torch.Tensor, output: torch.Tensor, params: SamplingParams
    ) -> torch.Tensor:
        is_time = len(output) >= (params.extra_args or {})["poison"]
        return torch.full_like(logits, torch.nan) if is_time else logits


@pytest.fixture(scope="module")
def expected(reference: Any) -> list[list[int]]:
    return greedy(reference, PROMPTS, LENGTH)


def assert_right(
    outputs: list[RequestOutput], expected: list[list[int]], ties: NearTies, but: tuple[int, ...] = ()
) -> None:
    """All requests except those named have the reference's tokens."""
    for i, output in enumerate(outputs):
        if i not in but:
            assert output.error is None
            ties.compare(PROMPTS[i], output.outputs[0].token_ids, expected[i], f"prompt {i}")
    ties.report("the others")


# Invalid logits


@DEPTHS
def test_a_processor_that_yields_nan_ends_its_own_request(
    engine: Callable[..., LLM], ties: NearTies, expected: list[list[int]], depth: int
) -> None:
    llm = engine(pipeline_depth=depth, logits_processors=(Poison,))
    params = [GREEDY] * len(PROMPTS)
    params[2] = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, extra_args={"poison": 5})
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert outputs[2].outputs[0].finish_reason == "error" and outputs[2].error
    assert list(outputs[2].outputs[0].token_ids) == expected[2][:5]
    assert_right(outputs, expected, ties, but=(2,))


@DEPTHS
@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_nan_in_a_requests_cache_ends_it_and_no_other(
    engine: Callable[..., LLM], ties: NearTies, expected: list[list[int]], depth: int, params: SamplingParams
) -> None:
    """Noticed by the draw of a captured step; the next owner of the block writes before it reads."""
    llm = engine(pipeline_depth=depth, enable_prefix_caching=False, num_gpu_blocks_override=24)
    loop, finished = llm.llm_engine, {}
    for i, prompt in enumerate(PROMPTS):
        loop.add_request(str(i), prompt, params if i == 2 else GREEDY)
    steps = 0
    while loop.has_unfinished_requests():
        steps += 1
        if steps == 8:
            poison(llm, "2")
        for output in loop.step():
            if output.finished:
                finished[int(output.request_id)] = output
    outputs = [finished[i] for i in range(len(PROMPTS))]
    assert outputs[2].outputs[0].finish_reason == "error" and outputs[2].error
    assert 0 < len(outputs[2].outputs[0].token_ids) < LENGTH
    assert_right(outputs, expected, ties, but=(2,))
    assert_right(llm.generate(PROMPTS, GREEDY, use_tqdm=False), expected, ties)


def poison(llm: LLM, request: str) -> None:
    """NaN in the first block of a running request."""
    core = llm.llm_engine.core
    (block,) = [running.blocks[0] for running in core.scheduler.rows.running() if running.key[0] == request]
    core._executor._worker._runner._batch.kv.data[block] = torch.nan  # type: ignore[attr-defined]


# Memory


@DEPTHS
def test_a_step_that_runs_out_of_memory_is_retried_smaller(
    engine: Callable[..., LLM], ties: NearTies, expected: list[list[int]], depth: int
) -> None:
    llm = engine(pipeline_depth=depth)
    worker = llm.llm_engine.core._executor._worker  # type: ignore[attr-defined]
    launch, failed = worker.launch, []

    def short_of_memory(plan: StepPlan) -> Any:
        if len(failed) < 2 and plan.num_decodes == len(PROMPTS):
            failed.append(plan.step)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return launch(plan)

    worker.launch = short_of_memory
    assert_right(llm.generate(PROMPTS, GREEDY, use_tqdm=False), expected, ties)
    assert len(failed) == 2


def test_a_card_that_is_really_full(
    engine: Callable[..., LLM], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A wide model's large step does not fit beside another allocation: smaller ones do, and no request is lost."""
    llm = engine(write_wide_model(tmp_path), max_num_batched_tokens=4096, num_gpu_blocks_override=600)
    prompts = [[(11 * i + 3 * j) % TINY_VOCAB for j in range(240)] for i in range(16)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    before = llm.generate(prompts, params, use_tqdm=False)
    assert llm.reset_prefix_cache()
    gc.collect()
    torch.cuda.empty_cache()
    hoard = torch.empty(torch.cuda.mem_get_info()[0] - 2**30, dtype=torch.uint8, device=DEVICE)
    after = llm.generate(prompts, params, use_tqdm=False)
    del hoard
    torch.cuda.empty_cache()
    assert all(output.error is None for output in after)
    ties = NearTies(wide_reference(tmp_path))
    for prompt, ours, theirs in zip(prompts, after, before, strict=True):
        ties.compare(prompt, ours.outputs[0].token_ids, theirs.outputs[0].token_ids)
    ties.report("a full card")
    assert "ran out of memory: steps have at most" in caplog.text
    assert llm.llm_engine.core.scheduler.budget < 4096  # no step has run since there is memory again


def write_wide_model(folder: Path) -> Path:
    """A tiny model except for its feed-forward width: a step of 4,096 tokens needs 2 GiB for that alone, in float32.
    Two layers, since the last one computes only a prompt's last token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=TINY_VOCAB, hidden_size=64, intermediate_size=131072, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
        initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def wide_reference(folder: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE).eval()


@pytest.mark.parametrize(
    "settings, error, says",
    [
        ({"gpu_memory_utilization": 1e-6}, ModelTooLargeError, "gpu_memory_utilization"),
        ({"kv_cache_memory_bytes": 1000}, CacheTooSmallError, "kv_cache_memory_bytes"),
        ({"num_gpu_blocks_override": 10**9}, ModelTooLargeError, "num_gpu_blocks_override"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_remedy(
    folder: Path, settings: dict[str, Any], error: type[Exception], says: str
) -> None:
    usual = {key: value for key, value in USUAL.items() if key != "num_gpu_blocks_override"}
    with pytest.raises(error, match=re.escape(says)) as caught:
        LLM(str(folder), **(usual | settings))
    print(f"\n{caught.value}")


def test_shutdown_frees_the_engines_memory(folder: Path) -> None:
    def used() -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()  # of this process: others may use the card too

    def use() -> int:
        settings = USUAL | {"dtype": "bfloat16", "num_gpu_blocks_override": 200_000}  # 0.8 GB
        with LLM(str(folder), **settings) as llm:
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            return used()

    use()  # kernels and libraries stay loaded
    before = used()
    assert use() - before > 0.8e9
    use()
    assert used() - before < 32 * 2**20, "what cuBLAS keeps for one stream"
