"""Drafts on a GPU: under `batch_invariant` every token and its probability, bit for bit, as without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.conftest import TINY_VOCAB
from tests.gpu.target import ON_A_GPU
from tests.speculative.scripted import SCRIPTED, Scripted, Tally
from tests.speculative.test_eagle3 import PLAIN, head_weights, save

pytestmark = ON_A_GPU

PROMPTS = [[(11 * i + 5 * j) % TINY_VOCAB for j in range(1 + 17 * i)] for i in range(8)] + [[9, 8, 7] * 12]
INVARIANT: dict[str, Any] = {"dtype": "bfloat16", "batch_invariant": True}


def params(i: int) -> SamplingParams:
    """Greedy and random, sampled inside graphs and not."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 0.9, "seed": i}, {"temperature": 0.8, "top_p": 0.9, "seed": i},
        {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 2}, {"temperature": 1.0, "n": 2, "seed": i},
    ]  # fmt: skip
    return SamplingParams(**kinds[i % len(kinds)], max_tokens=24 + 5 * i, ignore_eos=True)


def bits(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))], use_tqdm=False)
    Scripted.learn(outputs)
    return [
        [
            (list(sample.token_ids), sample.logprobs and [sorted(at) for at in sample.logprobs])
            for sample in each.outputs
        ]
        for each in outputs
    ]


@pytest.fixture
def drafts(tmp_path: Path, folder: Path) -> dict[str, Any]:
    config = {
        **PLAIN, "vocab_size": TINY_VOCAB, "draft_vocab_size": TINY_VOCAB, "hidden_size": 64, "target_hidden_size": 64,
        "max_position_embeddings": 256, "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    }  # fmt: skip
    head = save(tmp_path, config, head_weights(config, vocab=TINY_VOCAB, target=64))
    return {
        "scripted": {**SCRIPTED, "num_speculative_tokens": 5},
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, "tune": False},
        "draft_model": {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3, "tune": False},
        "eagle3": {"method": "eagle3", "model": head, "num_speculative_tokens": 3, "tune": False},
        "tuned": {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3},
    }


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_gpu_blocks_override": 20, "block_size": 16, "max_num_batched_tokens": 32}],
    ids=["roomy", "preempted"],
)
def test_the_same_bits_as_without_drafts(
    engine: Callable[..., LLM], drafts: dict[str, Any], settings: dict[str, Any]
) -> None:
    expected = bits(engine(**INVARIANT))
    for name, config in drafts.items():
        llm = engine(**INVARIANT, speculative_config=config, **settings)
        tally = Tally(llm)
        assert bits(llm) == expected, name
        assert bits(llm) == expected, f"{name}, again"
        assert tally.verified > 0 or name == "tuned", name
        assert tally.accepted > 100 or name not in ("scripted", "draft_model"), (name, vars(tally))
