"""Models with several cache groups on a CUDA device, in captured steps: the tokens of transformers, with prefix hits
and a cache too small for all rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from quire import LLM, SamplingParams
from tests.gpu.near_ties import NearTies, greedy
from tests.gpu.target import DEVICE, ON_A_GPU
from tests.models.harness import random_reference
from tests.models.test_hybrids import HYBRIDS, hybrid_reference
from tests.models.zoo import ZOO

pytestmark = ON_A_GPU

LENGTHS = (40, 17, 90, 3, 64, 33)
PROMPTS = [
    torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in LENGTHS
]
OUTPUT = 30
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
FEW_BLOCKS = {"mistral-window": 20, "qwen2-upper-windows": 40, "gpt-oss": 30, "qwen3-next": 60}


def reference_of(name: str) -> Any:
    configs: dict[str, PretrainedConfig] = HYBRIDS if name in HYBRIDS else ZOO
    configs[name].max_position_embeddings = 128
    return hybrid_reference(name) if name in HYBRIDS else random_reference(configs[name])


@pytest.mark.parametrize("name", FEW_BLOCKS)
def test_tokens_of_transformers(name: str, engine: Callable[..., LLM], tmp_path: Path) -> None:
    reference = reference_of(name)
    reference.save_pretrained(tmp_path)
    reference.to(DEVICE)
    expected, ties = greedy(reference, PROMPTS, OUTPUT), NearTies(reference)
    settings: dict[str, Any] = {"model": tmp_path, "skip_tokenizer_init": True, "max_model_len": 128, "block_size": 16}
    for blocks in (1024, FEW_BLOCKS[name]):
        llm = engine(**settings, num_gpu_blocks_override=blocks)
        for again in range(2):
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            for i, output in enumerate(outputs):
                ties.compare(PROMPTS[i], output.outputs[0].token_ids, expected[i], f"{name}, prompt {i}")
            if again and blocks == 1024:
                assert sum(output.num_cached_tokens or 0 for output in outputs) > 0
    ties.report(name)
