"""`batch_invariant`: a request's tokens and their probabilities, bit for bit, whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from tests.conftest import TINY_VOCAB
from tests.gpu.target import ON_A_GPU

pytestmark = ON_A_GPU

PROMPTS = [[(11 * i + 5 * j) % TINY_VOCAB for j in range(1 + 17 * i)] for i in range(10)]


def params(i: int) -> SamplingParams:
    """Greedy and random, of different lengths; the reported probabilities are compared to their last bit."""
    drawn = {"temperature": 0.9, "top_p": 0.95, "seed": i} if i % 2 else {"temperature": 0}
    return SamplingParams(**drawn, max_tokens=8 + 5 * i, ignore_eos=True, logprobs=3)


def bits(llm: LLM, wanted: list[int]) -> dict[int, Any]:
    outputs = llm.generate([PROMPTS[i] for i in wanted], [params(i) for i in wanted], use_tqdm=False)
    return {
        i: [(token, report[token].logprob) for token, report in zip(sample.token_ids, sample.logprobs, strict=True)]
        for i, sample in zip(wanted, (output.outputs[0] for output in outputs), strict=True)
    }


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 24}, {"num_gpu_blocks_override": 14, "block_size": 16}],
    ids=["whole prompts", "tiny chunks", "preempted"],
)
def test_alone_or_in_a_batch_the_same_bits(engine: Callable[..., LLM], settings: dict[str, Any]) -> None:
    alone = engine(dtype="bfloat16", batch_invariant=True, enable_prefix_caching=False)
    together = engine(dtype="bfloat16", batch_invariant=True, **settings)
    expected = {i: bits(alone, [i])[i] for i in range(len(PROMPTS))}
    assert bits(together, list(range(len(PROMPTS)))) == expected
    if "num_gpu_blocks_override" in settings:
        assert together.llm_engine.core.scheduler.stats.preemptions > 0


def test_unsupported_settings_are_refused(engine: Callable[..., LLM]) -> None:
    with pytest.raises(ConfigError, match="batch_invariant needs"):
        engine(dtype="float32", batch_invariant=True)
