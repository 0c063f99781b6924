"""What is done at start, so that requests need not wait for it."""

from __future__ import annotations

from collections.abc import Callable

from quire import LLM, SamplingParams
from tests.conftest import TINY_VOCAB
from tests.gpu.target import ON_A_GPU

pytestmark = ON_A_GPU


def test_no_kernel_is_compiled_while_a_request_runs(engine: Callable[..., LLM]) -> None:
    from quire.kernels.triton.launch import compiled, watch_compiles

    llm = engine(dtype="bfloat16", max_num_seqs=40, max_num_batched_tokens=96)
    watch_compiles()
    prompts = [[(13 * i + j) % TINY_VOCAB for j in range(1 + 7 * i)] for i in range(30)]
    kinds = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.7, max_tokens=17, seed=1, ignore_eos=True),
        SamplingParams(temperature=0.7, top_p=0.9, top_k=20, max_tokens=9, n=3, ignore_eos=True),
        SamplingParams(temperature=0.7, repetition_penalty=1.2, logprobs=2, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=12, stop_token_ids=list(range(90, 110)), ignore_eos=True),
    ]
    outputs = llm.generate(prompts, [kinds[i % len(kinds)] for i in range(len(prompts))], use_tqdm=False)
    assert all(output.finished and output.error is None for output in outputs)
    assert compiled == []


def test_the_memory_table_accounts_for_the_whole_card(engine: Callable[..., LLM]) -> None:
    llm = engine(num_gpu_blocks_override=None, max_num_seqs=8, gpu_memory_utilization=0.3)
    memory = llm.llm_engine.info.memory
    parts = memory.before + memory.weights + memory.loaded + memory.activations + memory.reserve + memory.cache
    assert memory.is_measured
    assert memory.total == parts + memory.free
    assert memory.free >= 0.6 * memory.total
