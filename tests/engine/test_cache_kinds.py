"""Every kind of cache (all tokens, windows, latent vectors, recurrent states) with everything that moves, shares or
drops pages: the tokens of transformers each time, and hit counts that prove that the cache was used.

The long cases (storms of sessions over tiers, ranks, other processes) carry the marker `slow`: `make cache-kinds`.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from tests.conftest import assert_idle
from tests.engine.beam_reference import ENDS, Model, params_of
from tests.engine.test_tiers_engine import Storm
from tests.models.harness import random_reference
from tests.models.test_hybrids import hybrid_reference
from tests.models.zoo import ZOO

LONGEST, OUTPUT, VOCABULARY = 256, 10, 112
KINDS = {
    "plain": ("llama", {"full"}),
    "window": ("gpt-oss", {"full", "window"}),
    "latent": ("deepseek-v2-lite", {"full"}),
    "hybrid": ("qwen3.5-moe", {"full", "state"}),
}
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "block_size": 4, "max_num_seqs": 4,
    "max_model_len": LONGEST, "num_gpu_blocks_override": 600, "disable_log_stats": True,
}  # fmt: skip
SHARED = [random.Random(5).randrange(4, 90) for _ in range(24)]
PROMPTS = [
    SHARED + [random.Random(seed).randrange(4, 90) for _ in range(length)] for seed, length in enumerate((3, 30, 17))
]


def greedy(tokens: int = OUTPUT) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


class Case:
    """A checkpoint, and what transformers yields for the prompts."""

    def __init__(self, name: str, folder: Path) -> None:
        model, self.groups = KINDS[name]
        self.name, self.path = name, str(folder / name)
        changes = {"max_position_embeddings": LONGEST, "vocab_size": VOCABULARY}
        if model in ZOO:
            config = type(ZOO[model])(**{**ZOO[model].to_dict(), **changes})
            self.reference = random_reference(config)
        else:
            self.reference = hybrid_reference(model, **changes)
        self.reference.save_pretrained(self.path)
        self.tokens = [self.continuation(prompt) for prompt in PROMPTS]

    @torch.no_grad()
    def continuation(self, prompt: list[int], count: int = OUTPUT) -> list[int]:
        """Greedy tokens, each from all tokens before it."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.reference(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        return tokens[len(prompt) :]

    def open(self, **more: Any) -> LLM:
        return LLM(self.path, **{**SETTINGS, **more})

    def check(self, llm: LLM) -> int:
        """Compare the tokens of all prompts; returns how many of the prompts' tokens were cached."""
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy(), use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == self.tokens
        return sum(output.num_cached_tokens or 0 for output in outputs)


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("kinds"))


@pytest.mark.parametrize("depth", [0, 1])
def test_chunked_prompts_and_prefix_hits(case: Case, depth: int) -> None:
    with case.open(max_num_batched_tokens=16, pipeline_depth=depth) as llm:
        assert {group.kind for group in llm.llm_engine.core.scheduler.tables.groups} == case.groups
        case.check(llm)
        # All but the last block's worth of each prompt, at least.
        assert case.check(llm) >= sum((len(prompt) - 1) // 4 * 4 for prompt in PROMPTS) - 4 * len(PROMPTS)
        assert_idle(llm)


def test_samples_and_beams(case: Case) -> None:
    several = SamplingParams(temperature=1, seed=3, n=3, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
    found = []
    for caching in (True, False):
        with case.open(enable_prefix_caching=caching) as llm:
            prompts = [{"prompt_token_ids": prompt} for prompt in (PROMPTS[0], PROMPTS[0], PROMPTS[2])]
            outputs = llm.generate(prompts, several, use_tqdm=False)
            found.append([[list(one.token_ids) for one in output.outputs] for output in outputs])
            params = params_of(3, 6)
            (beams,) = llm.beam_search([{"prompt_token_ids": PROMPTS[1]}], params)
            Model(Path(case.path), case.reference).assert_found(beams, PROMPTS[1], params, ENDS)
            assert_idle(llm)
    assert found[0] == found[1] and len({tuple(one) for one in found[0][0]}) == 3


@pytest.mark.parametrize("swap", [0.0, 0.05])
def test_preempted_rows(case: Case, swap: float) -> None:
    """A cache that holds one or two of the requests; `swap`: GiB of host memory for what does not fit."""
    with case.open() as llm:
        tables = llm.llm_engine.core.scheduler.tables
        states = sum(group.pages for group in tables.groups)
        grown = len(tables.groups) - sum(group.kind == "state" for group in tables.groups)
    longest = max(map(len, PROMPTS)) + OUTPUT
    pages = states + grown * (longest // 4 + 2)
    with case.open(num_gpu_blocks_override=pages * 3 // 2, swap_space=swap) as llm:
        case.check(llm)
        case.check(llm)
        assert_idle(llm)


def test_a_cache_in_few_bits(case: Case) -> None:
    """The same tokens with prefix hits and chunks as without, in 8 bits; latent caches refuse them by name."""
    settings = {"kv_cache_dtype": "int8_per_token_head"}
    if case.name == "latent":
        with pytest.raises(ConfigError, match="kv_cache_dtype"):
            case.open(**settings)
        return
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    found = []
    for more in ({"enable_prefix_caching": False}, {"max_num_batched_tokens": 16}):
        with case.open(**settings, **more) as llm:
            for _ in range(2):
                outputs = llm.generate(prompts, greedy(), use_tqdm=False)
                found.append([list(output.outputs[0].token_ids) for output in outputs])
            assert_idle(llm)
    assert sum(output.num_cached_tokens or 0 for output in outputs) > 0
    assert all(tokens == found[0] for tokens in found)


def _speak(path: str, folder: str, name: str, count: int, answers: Any) -> None:
    """In a process of its own: one turn of a session, which is then suspended."""
    with LLM(path, **SETTINGS, kv_disk=folder, kv_disk_size=0.2, swap_space=0.05) as llm:
        session = llm.sessions.resume(name)
        output = session.generate(greedy(count))
        answers.put((list(output.outputs[0].token_ids), output.num_cached_tokens))
        session.suspend()


@pytest.mark.slow
def test_a_session_wakes_in_another_process(case: Case, tmp_path: Path) -> None:
    with case.open(kv_disk=str(tmp_path), kv_disk_size=0.2, swap_space=0.05) as llm:
        session = llm.sessions.create("one", PROMPTS[1])
        said = list(session.generate(greedy()).outputs[0].token_ids)
        assert said == case.tokens[1]
        session.fork("two", len(PROMPTS[1])).suspend()
        session.suspend()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    for name, tokens in (("one", PROMPTS[1] + said), ("two", PROMPTS[1])):
        process = context.Process(target=_speak, args=(case.path, str(tmp_path), name, 7, answers))
        process.start()
        answer, cached = answers.get(timeout=240)
        process.join()
        assert answer == case.continuation(tokens, 7)
        assert cached >= len(tokens) - 8, "the session's KV and states were read from disk"


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_ranks(case: Case, sizes: dict[str, int]) -> None:
    with case.open(**sizes) as llm:
        case.check(llm)
        assert case.check(llm) > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tiers", ["none", "host", "disk"])
def test_storms_of_sessions(case: Case, tmp_path: Path, tiers: str, seed: int) -> None:
    """Sessions suspended, woken, forked and cut, requests preempted and swapped, over a cache for a few of them."""
    settings: dict[str, Any] = {"num_gpu_blocks_override": 260, "pipeline_depth": seed % 2, "swap_space": 0.0}
    if tiers != "none":
        settings["swap_space"] = random.Random(seed).choice([0.002, 0.02])
    if tiers == "disk":
        settings |= {"kv_disk": str(tmp_path), "kv_disk_size": random.Random(seed).choice([0.01, 0.1])}
    make: Callable[[], LLM] = lambda: case.open(**settings)  # noqa: E731
    with case.open(enable_prefix_caching=False) as reference:
        storm = Storm(make(), reference, seed)
        storm.run(40)
        if tiers == "disk":
            storm.llm.shutdown()
            storm.llm = make()
            storm.run(20)
        storm.llm.shutdown()
