"""Beam search finds what transformers' finds, with its scores; beams and sequences of one prompt share its blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, BeamSearchParams, EngineConfig, SamplingParams
from quire.loading.hub import find_model
from quire.messages.plan import StepPlan
from quire.platforms.cpu import CpuPlatform
from tests.conftest import assert_idle, write_tiny_model
from tests.engine.beam_reference import ENDS, Model, params_of
from tests.engine.reference import transformers_model
from tests.kernels.triton_target import ON_GPU
from tests.models.harness import random_reference
from tests.models.zoo import ZOO

PROMPTS = [[(11 * i + 5 * j) % 97 for j in range(length)] for i, length in enumerate((1, 7, 16, 33))]
RULES = list(itertools.product([1.0, 0.0, -0.7, 2.0], [False, True, "never"]))
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def zoo_model(folder: Path, name: str) -> Model:
    reference = random_reference(ZOO[name])
    reference.save_pretrained(folder)
    return Model(folder, reference)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return zoo_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def engine(llama: Model) -> Iterator[Callable[..., LLM]]:
    """Engines over the llama, checked and shut down after the test."""
    made: list[LLM] = []

    def make(model: Model = llama, **settings: Any) -> LLM:
        usual = {"dtype": "float32", "num_gpu_blocks_override": 128, "device": "cpu", "skip_tokenizer_init": True}
        made.append(LLM(str(model.folder), **(usual | {"block_size": 4, "max_num_seqs": 16} | settings)))
        return made[-1]

    yield make
    for llm in made:
        assert_idle(llm)
        llm.shutdown()


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral-window", "gpt2", "gpt-neox", "deepseek-v3"])
def test_every_architecture(name: str, engine: Callable[..., LLM], tmp_path: Path) -> None:
    model = zoo_model(tmp_path, name)
    llm = engine(model)
    params = params_of(4, 7)
    for output, prompt in zip(llm.beam_search(PROMPTS[1:3], params), PROMPTS[1:3], strict=True):
        model.assert_found(output, prompt, params, ENDS)


@pytest.mark.parametrize("width", range(2, 9))
def test_every_width_penalty_and_early_stopping_mode(width: int, llama: Model, engine: Callable[..., LLM]) -> None:
    llm = engine()
    ways = RULES if width == 3 else RULES[width % 4 :: 4]
    for (penalty, early), prompt in zip(ways, itertools.cycle(PROMPTS[1:]), strict=False):
        params = params_of(width, 9, length_penalty=penalty, early_stopping=early)
        (output,) = llm.beam_search(prompt, params)
        llama.assert_found(output, prompt, params, ENDS)


@DEPTHS
@pytest.mark.parametrize(
    "settings",
    [
        {"num_gpu_blocks_override": 14},
        {"num_gpu_blocks_override": 14, "enable_prefix_caching": False},
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 16},
    ],
    ids=["cache of one beam", "and no prefix cache", "three rows", "short steps"],
)
def test_shortages_of_rows_or_blocks_change_nothing(
    depth: int, settings: dict[str, Any], llama: Model, engine: Callable[..., LLM]
) -> None:
    llm = engine(pipeline_depth=depth, max_model_len=48, **settings)
    params = params_of(5, 8, ends=None)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    stream = llm.stream(PROMPTS[1], greedy)  # with another request
    next(stream)
    outputs = llm.beam_search(PROMPTS[1:], params)
    *_, mixed = stream
    for output, prompt in zip(outputs, PROMPTS[1:], strict=True):
        llama.assert_found(output, prompt, params, None)
    (alone,) = llm.generate(PROMPTS[1], greedy, use_tqdm=False)
    assert mixed.outputs[0].token_ids == alone.outputs[0].token_ids


@DEPTHS
def test_a_failed_step_changes_nothing(depth: int, llama: Model, engine: Callable[..., LLM]) -> None:
    llm = engine(pipeline_depth=depth)
    worker = llm.llm_engine.core._executor._worker  # type: ignore[attr-defined]
    launch, steps = worker.launch, []

    def short_of_memory(plan: StepPlan) -> object:
        steps.append(plan.step)
        if len(steps) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return launch(plan)

    worker.launch = short_of_memory
    params = params_of(4)
    for output, prompt in zip(llm.beam_search(PROMPTS[1:3], params), PROMPTS[1:3], strict=True):
        llama.assert_found(output, prompt, params, ENDS)


# Blocks


class Watched:
    """The largest number of blocks an engine used, checked at every step."""

    def __init__(self, llm: LLM) -> None:
        core, self.pool = llm.llm_engine.core, llm.llm_engine.core.scheduler.tables.pool
        self.used: list[int] = []
        step = core.step

        def watched() -> Any:
            outputs = step()
            self.used.append(self.pool.used)
            return outputs

        core.step = watched  # type: ignore[method-assign]


@pytest.mark.parametrize("n, depth", [(8, 0), (8, 1), (300, 1)])
def test_sequences_share_their_prompts_blocks(n: int, depth: int, make_llm: Callable[..., LLM], big: Path) -> None:
    llm = make_llm(
        big, pipeline_depth=depth, block_size=16, num_gpu_blocks_override=1000, max_num_seqs=n, max_model_len=576
    )
    watched = Watched(llm)
    params = SamplingParams(n=n, max_tokens=20, ignore_eos=True, temperature=1.0, seed=1, detokenize=False)
    (output,) = llm.generate([[7 + i % 90 for i in range(512)]], params, use_tqdm=False)
    assert len(output.outputs) == n
    stats = llm.llm_engine.core.scheduler.stats
    assert stats.prompt_tokens == 512, "computed once"
    # 32 blocks of the prompt; 19 tokens of a sequence are in the cache (the last one needs none): 2 blocks each.
    assert max(watched.used) == 32 + 2 * n
    assert stats.preemptions == 0


@pytest.mark.parametrize("width, depth", [(8, 0), (8, 1), (40, 1)])
def test_beams_share_their_prompts_blocks(width: int, depth: int, make_llm: Callable[..., LLM], big: Path) -> None:
    llm = make_llm(
        big, pipeline_depth=depth, block_size=16, num_gpu_blocks_override=300, max_num_seqs=width, max_model_len=576
    )
    watched = Watched(llm)
    (output,) = llm.beam_search([7 + i % 90 for i in range(512)], BeamSearchParams(width, 20, ignore_eos=True))
    assert len(output.sequences) == width
    stats = llm.llm_engine.core.scheduler.stats
    assert stats.prompt_tokens == 512, "computed once, and no beam ever again"
    assert 32 < max(watched.used) <= 32 + 2 * width, "beams that have a common past share its blocks too"
    assert stats.preemptions == 0


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with room for long prompts."""
    folder = write_tiny_model(tmp_path_factory.mktemp("long"))
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"max_position_embeddings": 256', '"max_position_embeddings": 1024'))
    return folder


# The kernels of a GPU


@pytest.mark.skipif(ON_GPU, reason="on a GPU the kernels are compiled: tests/gpu runs the engine there")
def test_with_the_gpu_kernels(llama: Model, engine: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter: forked rows and forced tokens in the batch of a GPU."""
    monkeypatch.setattr(CpuPlatform, "ops", "quire.kernels.triton.ops.TritonOps")
    monkeypatch.setattr(CpuPlatform, "attention", "triton")
    llm = engine(enforce_eager=True, pipeline_depth=1)
    params = params_of(3, 5)
    (output,) = llm.beam_search(PROMPTS[1], params)
    llama.assert_found(output, PROMPTS[1], params, ENDS)


# The default model


@pytest.fixture(scope="module")
def default_reference() -> Any:
    return transformers_model(find_model(EngineConfig()).path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("width", range(2, 9))
def test_the_default_model(width: int, smollm: LLM, default_reference: Any) -> None:
    model = Model(smollm.model_path, default_reference)
    ends = smollm.llm_engine.inputs.eos_ids
    tokenizer = smollm.get_tokenizer()
    texts = ["The capital of France is", "Once upon a time there was a", "Question: What is 2 + 2?\nAnswer:"]
    rules: list[dict[str, Any]] = [
        {},
        {"length_penalty": 0.0, "early_stopping": True},
        {"length_penalty": 1.4, "early_stopping": "never"},
    ]
    for i, text in enumerate(texts):
        params = BeamSearchParams(width, 16, include_stop_str_in_output=True, **rules[(i + width) % 3])
        (output,) = smollm.beam_search(text, params)
        model.assert_found(output, tokenizer.encode(text), params, ends)
