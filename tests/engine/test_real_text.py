"""Greedy text of the default model equals transformers', token for token, with any settings. A difference is excused
only where the reference's two best logits are within TIE of each other: there another order of additions may choose the
other token. Such near-ties are counted and printed, and the rest of that prompt is not compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.loading.hub import DEFAULT_MODEL, resolve
from quire.messages.outputs import RequestOutput
from tests.conftest import assert_idle
from tests.engine.reference import Greedy, greedy, transformers_model

pytestmark = pytest.mark.timeout(900)

LENGTH, FULL_LENGTH = 32, 64
"""Tokens compared for each prompt: in every run of the tests, and in the slow ones."""
TIE = 1e-4

_STORY = (
    "The lighthouse keeper kept a ledger of every ship that passed the rock. In spring she wrote down fishing boats, "
    "in summer the white ferries, and in autumn the heavy freighters that came in low and slow from the north. Nobody "
    "had asked her to do it. She counted because counting made the days different from each other, and because one "
    "day, she was sure, somebody would want to know. "
)
RAW = [
    "Hello",
    "The capital of France is",
    "1, 1, 2, 3, 5, 8, 13,",
    "def quicksort(items):\n    if len(items) < 2:\n        return items\n",
    "SELECT name, COUNT(*) FROM orders",
    "<html>\n<head>\n<title>",
    "Il était une fois, dans un petit village,",
    "Es war einmal ein König, der",
    "Había una vez un perro que",
    "東京は日本の",
    "Жили-были старик со старухой",
    "🙂🚀 Emoji test:",
    "3.14159 * 2 =",
    "To be, or not to be, that is",
    "\n\n",
    4 * _STORY + "One evening",
]
CHATS = [
    "What is the capital of Japan?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "Translate 'good morning' into Spanish.",
]
ALL = range(len(RAW) + len(CHATS))
FEW = (0, 3, 9, 15, 16, 19)
"""One word, code, Japanese, long, and two chats."""


@pytest.fixture(scope="module")
def prompts(shared_smollm: LLM) -> list[list[int]]:
    tokenizer = shared_smollm.get_tokenizer()
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for text in CHATS
    ]
    return [tokenizer.encode(text) for text in RAW] + chats


@pytest.fixture(scope="module")
def reference() -> Any:
    return transformers_model(resolve(DEFAULT_MODEL, progress=False).path)


@pytest.fixture(scope="module")
def expected(reference: Any, prompts: list[list[int]]) -> list[Greedy]:
    return greedy(reference, prompts, LENGTH)


@pytest.fixture(scope="module")
def expected_full(reference: Any, prompts: list[list[int]]) -> list[Greedy]:
    return greedy(reference, prompts, FULL_LENGTH)


@pytest.fixture
def engine(shared_smollm: LLM) -> Iterator[Callable[..., LLM]]:
    """The default model with a test's own settings; without settings: the shared engine."""
    made: list[LLM] = []

    def make(**settings: Any) -> LLM:
        if not settings:
            shared_smollm.reset_prefix_cache()
            return shared_smollm
        made.append(
            LLM(
                **{
                    "dtype": "float32",
                    "device": "cpu",
                    "max_model_len": 1024,
                    "num_gpu_blocks_override": 384,
                    "cpu_weights": "dense",
                    **settings,
                }
            )
        )
        return made[-1]

    yield make
    assert_idle(shared_smollm)
    for llm in made:
        assert_idle(llm)
        llm.shutdown()


def check(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Greedy],
    chosen: Sequence[int] = ALL,
    length: int = LENGTH,
    together: bool = True,
) -> list[RequestOutput]:
    """Generate for the chosen prompts, all in one batch or one after the other, and compare with the reference."""
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    asked = [{"prompt_token_ids": list(prompts[i])} for i in chosen]
    outputs = (
        llm.generate(asked, params, use_tqdm=False)
        if together
        else [llm.generate(one, params, use_tqdm=False)[0] for one in asked]
    )
    ties = 0
    for i, output in zip(chosen, outputs, strict=True):
        sample = output.outputs[0]
        assert sample.finish_reason == "length"
        ties += _compare(i, list(sample.token_ids), expected[i], length)
    print(f"{len(outputs)} prompts × {length} tokens compared; {ties} near-ties (within {TIE})")
    assert ties <= max(1, len(outputs) // 5), "too many differences to be called near-ties"
    return outputs


def _compare(prompt: int, tokens: list[int], expected: Greedy, length: int) -> int:
    """1 if the comparison ended at a near-tie, else 0."""
    assert len(tokens) == length
    for at, (ours, theirs) in enumerate(zip(tokens, expected.tokens, strict=False)):
        if ours != theirs:
            gap = expected.gaps[at]
            assert gap < TIE, f"prompt {prompt}, token {at}: {ours}, transformers has {theirs} by {gap:.6f}"
            return 1
    return 0


def preemptions(llm: LLM) -> int:
    return llm.llm_engine.core.scheduler.stats.preemptions


def test_the_prompts_are_varied(prompts: list[list[int]]) -> None:
    assert len(prompts) == 20
    assert min(map(len, prompts)) == 1
    assert max(map(len, prompts)) >= 300


def test_the_batched_reference_equals_generate_alone(
    reference: Any, prompts: list[list[int]], expected: list[Greedy]
) -> None:
    """Padding, masks and positions of the reference are right: a prompt batched with longer ones gives the tokens it
    gives alone."""
    import torch

    for i in (0, 16):
        ids = torch.tensor([prompts[i]])
        alone = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert alone[0, ids.shape[1] :].tolist() == expected[i].tokens[:8]


def test_all_prompts_in_one_batch_and_again_from_the_prefix_cache(
    engine: Callable[..., LLM], prompts: list[list[int]], expected: list[Greedy]
) -> None:
    llm = engine()
    check(llm, prompts, expected)
    again = check(llm, prompts, expected, FEW, length=24)
    hits = [output.num_cached_tokens or 0 for output in again]
    assert hits[FEW.index(15)] >= len(prompts[15]) - 32
    assert all(hit < len(prompts[i]) for i, hit in zip(FEW, hits, strict=True))


def test_alone_without_prefix_caching_in_blocks_of_32(
    engine: Callable[..., LLM], prompts: list[list[int]], expected: list[Greedy]
) -> None:
    llm = engine(block_size=32, enable_prefix_caching=False, num_gpu_blocks_override=40)
    outputs = check(llm, prompts, expected, (0, 9, 16), length=24, together=False)
    assert all(output.num_cached_tokens == 0 for output in outputs)


def test_tiny_chunks_with_a_step_in_flight_in_blocks_of_8(
    engine: Callable[..., LLM], prompts: list[list[int]], expected: list[Greedy]
) -> None:
    llm = engine(max_num_batched_tokens=24, max_num_seqs=6, block_size=8, pipeline_depth=1)
    check(llm, prompts, expected, FEW, length=24)


@pytest.mark.parametrize("depth", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_small_cache_with_repeated_preemptions(
    engine: Callable[..., LLM], prompts: list[list[int]], expected: list[Greedy], depth: int
) -> None:
    chosen = (0, 1, 2, 6, 9, 16, 17, 18)
    llm = engine(num_gpu_blocks_override=14, block_size=8, pipeline_depth=depth, enable_prefix_caching=False)
    check(llm, prompts, expected, chosen, length=32)
    assert preemptions(llm) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("depth", [0, 1], ids=["depth0", "depth1"])
@pytest.mark.parametrize("budget", [16, 32, None], ids=["chunks16", "chunks32", "whole"])
@pytest.mark.parametrize("block", [8, 16, 32], ids=["blocks8", "blocks16", "blocks32"])
class TestEveryCombination:
    """All prompts at full length under every setting."""

    def test_in_one_batch_twice(
        self, engine: Callable[..., LLM], prompts: list[list[int]], expected_full: list[Greedy], block: int,
        budget: int | None, depth: int, caching: bool,
    ) -> None:  # fmt: skip
        llm = engine(
            block_size=block, max_num_batched_tokens=budget, pipeline_depth=depth, enable_prefix_caching=caching,
            num_gpu_blocks_override=6144 // block,
        )  # fmt: skip
        check(llm, prompts, expected_full, length=FULL_LENGTH)
        again = check(llm, prompts, expected_full, length=FULL_LENGTH)
        hits = sum(output.num_cached_tokens or 0 for output in again)
        assert (hits > 300) == caching

    def test_preempted(
        self, engine: Callable[..., LLM], prompts: list[list[int]], expected_full: list[Greedy], block: int,
        budget: int | None, depth: int, caching: bool,
    ) -> None:  # fmt: skip
        llm = engine(
            block_size=block, max_num_batched_tokens=budget, pipeline_depth=depth, enable_prefix_caching=caching,
            num_gpu_blocks_override=512 // block,
        )  # fmt: skip
        check(llm, prompts, expected_full, length=FULL_LENGTH)
        assert preemptions(llm) >= 5


@pytest.mark.slow
def test_every_prompt_alone(engine: Callable[..., LLM], prompts: list[list[int]], expected_full: list[Greedy]) -> None:
    check(engine(), prompts, expected_full, length=FULL_LENGTH, together=False)
