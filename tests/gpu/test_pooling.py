"""Vectors on a CUDA device equal transformers' hidden states, pooled, in chunks and beside generating requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, PoolingParams, SamplingParams
from tests.conftest import TINY_VOCAB
from tests.gpu.target import DEVICE, ON_A_GPU

pytestmark = ON_A_GPU

PROMPTS = [[(7 * i + 3 * j) % TINY_VOCAB for j in range(3 + 37 * i)] for i in range(5)]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)


@torch.inference_mode()
def vector(reference: Any, prompt: list[int], pooling: str) -> np.ndarray:
    (hidden,) = reference.base_model(torch.tensor([prompt], device=DEVICE)).last_hidden_state
    return (hidden[-1] if pooling == "last" else hidden.mean(0)).cpu().numpy()


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("depth, budget", [(0, 512), (1, 512), (1, 33)])
def test_vectors_equal_transformers(
    engine: Callable[..., LLM], reference: Any, pooling: str, depth: int, budget: int
) -> None:
    llm = engine(pipeline_depth=depth, max_num_batched_tokens=budget)
    alone = llm.generate([PROMPTS[2]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    stream = llm.stream([PROMPTS[2]], GREEDY)
    next(stream)
    outputs = llm.encode(PROMPTS, PoolingParams(pooling=pooling, use_activation=False), use_tqdm=False)
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        np.testing.assert_allclose(output.outputs.data, vector(reference, prompt, pooling), rtol=5e-4, atol=5e-4)
    *_, last = stream
    assert list(last.outputs[0].token_ids) == list(alone)
