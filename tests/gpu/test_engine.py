"""The same engine on a CUDA device: same tokens as transformers, whatever the batch, the chunks or the depth."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from tests.conftest import TINY_VOCAB, write_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = [[(7 * i + 3 * j) % TINY_VOCAB for j in range(5 + 9 * i)] for i in range(8)]
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """Greedy continuations by transformers, one prompt at a time."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    outputs = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt], device="cuda")
        for _ in range(NEW_TOKENS):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
        outputs.append(tokens[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 24, "max_num_seqs": 8}, {"num_gpu_blocks_override": 24, "block_size": 8}],
    ids=["plain", "tiny chunks", "preempted"],
)
def test_greedy_tokens_equal_transformers(folder: Path, expected: list[list[int]], settings: dict, depth: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(str(folder), dtype="float32", device="cuda", pipeline_depth=depth, **settings) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        if "num_gpu_blocks_override" in settings:
            assert llm.llm_engine.core.scheduler.stats.preemptions > 0
        llm.llm_engine.check_idle()


def test_a_seed_draws_the_same_text_on_both_devices(folder: Path) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=11, n=3, max_tokens=24, ignore_eos=True)
    texts = []
    for device in ("cuda", "cpu"):
        with LLM(str(folder), dtype="float32", device=device) as llm:
            texts.append([sample.token_ids for sample in llm.generate(PROMPTS[3], params, use_tqdm=False)[0].outputs])
            llm.llm_engine.check_idle()
    assert texts[0] == texts[1]


def test_penalties_lists_and_logprobs_run_on_the_device(folder: Path) -> None:
    params = SamplingParams(
        temperature=0.8, seed=3, max_tokens=16, min_tokens=8, repetition_penalty=1.2, presence_penalty=0.5,
        logit_bias={5: 2.0}, allowed_token_ids=list(range(2, 90)), logprobs=3, prompt_logprobs=2,
    )  # fmt: skip
    with LLM(str(folder), dtype="bfloat16", device="cuda", max_num_batched_tokens=32, max_num_seqs=8) as llm:
        (output,) = llm.generate([PROMPTS[5]], params, use_tqdm=False)
        assert len(output.prompt_logprobs) == len(PROMPTS[5])
        assert all(2 <= token < 90 for token in output.outputs[0].token_ids)
        assert len(output.outputs[0].logprobs) == len(output.outputs[0].token_ids) >= 8
        llm.llm_engine.check_idle()
