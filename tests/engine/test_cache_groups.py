"""Models whose layers have windows, in cache groups of their own, through the whole engine: the tokens of transformers,
with prefix hits, chunked prompts, a cache too small for all requests, samples, ranks, and captured steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.platforms.cpu import CpuPlatform
from tests.conftest import assert_idle
from tests.kernels.triton_target import ON_GPU
from tests.models.harness import random_reference
from tests.models.zoo import ZOO
from tests.worker.eager_graphs import run_graphs_eagerly

LONGEST = 128
OUTPUT = 14
LENGTHS = (40, 17, 54, 3)
PROMPTS = [
    torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in LENGTHS
]
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "block_size": 4, "max_num_seqs": 4,
    "max_model_len": LONGEST,
}  # fmt: skip
KINDS = {
    "mistral-window": ["window"],
    "qwen2-upper-windows": ["full", "window", "window"],
    "deepseek-v2-lite": ["full"],  # latent
}


class Case:
    """A checkpoint, and what transformers yields for the prompts."""

    def __init__(self, name: str, folder: Path) -> None:
        config = type(ZOO[name])(**{**ZOO[name].to_dict(), "max_position_embeddings": LONGEST})
        self.name, self.path = name, str(folder / name)
        reference = random_reference(config)
        reference.save_pretrained(self.path)
        self.tokens = [self._continue(reference, prompt) for prompt in PROMPTS]

    @torch.no_grad()
    def _continue(self, reference: Any, prompt: list[int]) -> list[int]:
        tokens = list(prompt)
        for _ in range(OUTPUT):
            tokens.append(int(reference(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        return tokens[len(prompt) :]

    def open(self, **more: Any) -> LLM:
        return LLM(self.path, **{**SETTINGS, "num_gpu_blocks_override": 400, **more})

    def check(self, llm: LLM) -> int:
        """Compares the tokens of all prompts; returns how many of the prompts' tokens were cached."""
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == self.tokens
        return sum(output.num_cached_tokens or 0 for output in outputs)


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("windows"))


def test_tokens_of_transformers_and_prefix_hits(case: Case) -> None:
    with case.open(max_num_batched_tokens=24) as llm:
        tables = llm.llm_engine.core.scheduler.tables
        assert [group.kind for group in tables.groups] == KINDS[case.name]
        assert case.check(llm) == 0
        assert case.check(llm) == sum((length - 1) // 4 * 4 for length in LENGTHS)
        # A penalty reads all earlier tokens, also those of a cached prefix.
        strict = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, repetition_penalty=1.7)
        cached = llm.generate([PROMPTS[0]], strict, use_tqdm=False)[0]
        assert cached.num_cached_tokens == 36
        llm.reset_prefix_cache()
        fresh = llm.generate([PROMPTS[0]], strict, use_tqdm=False)[0]
        assert fresh.num_cached_tokens == 0 and fresh.outputs[0].token_ids == cached.outputs[0].token_ids
        assert_idle(llm)


def test_rows_that_wait_for_pages_and_samples_of_one_prompt(case: Case) -> None:
    """A cache that holds less than all rows need, so that some are preempted."""
    several = SamplingParams(temperature=1, seed=3, n=3, max_tokens=OUTPUT, ignore_eos=True)
    found = []
    for pages in (400, 24 if KINDS[case.name][0] == "window" else 44):
        with case.open(num_gpu_blocks_override=pages) as llm:
            case.check(llm)
            samples = llm.generate([PROMPTS[1]], several, use_tqdm=False)[0].outputs
            found.append([list(sample.token_ids) for sample in samples])
            assert_idle(llm)
    assert found[0] == found[1] and len({tuple(tokens) for tokens in found[0]}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_ranks(case: Case, sizes: dict[str, int]) -> None:
    with case.open(**sizes) as llm:
        assert case.check(llm) == 0
        assert case.check(llm) > 0


@pytest.mark.skipif(ON_GPU, reason="on a GPU steps are really captured: tests/gpu runs them there")
def test_captured_steps(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the GPU's kernels in the interpreter, on the paths that would be captured."""
    if len(KINDS[case.name]) == 1:
        pytest.skip("one group: the paths of any other model")
    from quire.worker import mixed_steps

    monkeypatch.setattr(mixed_steps, "DECODES", (0, 2))
    monkeypatch.setattr(mixed_steps, "TOKENS", (8, 24))
    monkeypatch.setattr(CpuPlatform, "ops", "quire.kernels.triton.ops.TritonOps")
    monkeypatch.setattr(CpuPlatform, "attention", "triton")
    used = run_graphs_eagerly(monkeypatch, {"mixed", "decode"})
    prompts, wanted = PROMPTS[1:4:2], [tokens[:3] for tokens in case.tokens[1:4:2]]
    few = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with case.open(enforce_eager=False, max_num_batched_tokens=24, max_num_seqs=10) as llm:
        outputs = llm.generate(prompts, few, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
        assert_idle(llm)
    assert {(True, "mixed step"), (True, "decode step")} <= used
