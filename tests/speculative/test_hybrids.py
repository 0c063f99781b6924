"""Hybrid models with drafts: the tokens of the engine without drafts, whatever becomes of pages, states and snapshots.

A proposer that knows the outputs of the plain engine proposes them, some changed, in runs of random length.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.api.inputs import TokensPrompt
from quire.errors import ConfigError
from tests.conftest import assert_idle
from tests.engine.test_tiers_engine import Storm
from tests.models.test_hybrids import hybrid_reference
from tests.speculative.scripted import SCRIPTED, VOCABULARY, Scripted, Tally

MODELS = [
    "qwen3.5", "granite-4", "jamba", "lfm2-moe",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3-next", "bamba", "nemotron-h", "mamba-2", "lfm2")),
]  # fmt: skip
STATEFUL = "qwen3.5-moe"
"""The model of what does not depend on the kind of recurrent layer."""
LONGEST, OUTPUT, BLOCK = 256, 18, 4
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "block_size": BLOCK, "max_num_seqs": 4,
    "max_model_len": LONGEST, "num_gpu_blocks_override": 900, "disable_log_stats": True,
}  # fmt: skip
SHARED = [random.Random(5).randrange(4, 90) for _ in range(24)]
PROMPTS = [
    SHARED + [random.Random(seed).randrange(4, 90) for _ in range(length)] for seed, length in enumerate((3, 30, 17))
]
PROMPTS += [[9], [17, 4, 30]]
BLOCKS = 48
"""Too few for all requests at once."""
USUAL: dict[str, Any] = {"max_tokens": OUTPUT, "ignore_eos": True, "detokenize": False}
PARAMS = [
    SamplingParams(temperature=0, **USUAL),
    SamplingParams(temperature=0.9, seed=7, n=2, **USUAL),
    SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.2, top_p=0.95, **USUAL),
    SamplingParams(temperature=0, **USUAL),
    SamplingParams(temperature=0, **(USUAL | {"max_tokens": 5})),
]


def run(llm: LLM, prompts: Sequence[list[int]] = PROMPTS) -> list[RequestOutput]:
    return llm.generate([TokensPrompt(prompt_token_ids=each) for each in prompts], PARAMS, use_tqdm=False)


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


class Case:
    """A checkpoint, and what the engine yields without drafts: for the prompts, then for longer ones that begin with
    these and their outputs."""

    def __init__(self, name: str, folder: Path) -> None:
        self.path = str(folder)
        hybrid_reference(name, max_position_embeddings=LONGEST, vocab_size=VOCABULARY).save_pretrained(folder)
        with LLM(self.path, **SETTINGS, enable_prefix_caching=False) as llm:
            self.turns = [run(llm)]
            self.longer = [
                [*(output.prompt_token_ids or []), *output.outputs[0].token_ids, 5, 6, 7] for output in self.turns[0]
            ]
            self.turns.append(run(llm, self.longer))

    def open(self, **more: Any) -> LLM:
        return LLM(self.path, **{**SETTINGS, "speculative_config": SCRIPTED, **more})

    def check(self, llm: LLM) -> list[int]:
        """Compare all tokens; returns how many tokens of each of the longer prompts were cached."""
        Scripted.learn([output for turn in self.turns for output in turn])
        assert tokens_of(run(llm)) == tokens_of(self.turns[0])
        outputs = run(llm, self.longer)
        assert tokens_of(outputs) == tokens_of(self.turns[1])
        assert_idle(llm)
        return [output.num_cached_tokens or 0 for output in outputs]


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_recurrent_layer(name: str, tmp_path: Path) -> None:
    """Steps with chunks of prompts beside drafts, samples that fork, and hits on snapshots of prompts and outputs."""
    case = Case(name, tmp_path)
    with case.open(max_num_batched_tokens=24, pipeline_depth=1) as llm:
        tally = Tally(llm)
        hits = case.check(llm)
        assert 0 < tally.accepted < tally.verified
    for prompt, cached in zip(PROMPTS[:4], hits, strict=False):
        assert cached > len(prompt), "snapshots of outputs were taken, and used"


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(STATEFUL, tmp_path_factory.mktemp("stateful"))


@pytest.mark.parametrize("swap", [0.0, 0.05], ids=["recomputed", "swapped"])
def test_preempted(stateful: Case, swap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # A tiny model computes faster than any link copies.
    monkeypatch.setattr("quire.scheduler.swapping.LEAST_SWAP", 1)
    monkeypatch.setattr("quire.kvcache.offload.costs.Costs.swapping_pays", lambda *_: True)
    monkeypatch.setattr("quire.kvcache.offload.costs.Costs.loading_pays", lambda *_: True)
    with stateful.open(num_gpu_blocks_override=BLOCKS, swap_space=swap, max_num_batched_tokens=16) as llm:
        stateful.check(llm)
        stats = llm.llm_engine.core.scheduler.stats
        assert stats.preemptions and bool(stats.swaps) == bool(swap)


def test_sessions(stateful: Case, tmp_path: Path) -> None:
    """A session that is suspended between its turns, and one that forks from it within the first answer."""
    prompt, params = PROMPTS[0], PARAMS[0]
    said = tokens_of(stateful.turns[0])[0][0]
    half = len(prompt) + OUTPUT // 2
    with stateful.open(kv_disk=str(tmp_path), kv_disk_size=0.2, swap_space=0.05) as llm:
        Scripted.learn(stateful.turns[0])
        session = llm.sessions.create("one", prompt)
        assert list(session.generate(params).outputs[0].token_ids) == said
        other = session.fork("two", half)
        session.suspend()
        output = other.generate(SamplingParams(temperature=0, **(USUAL | {"max_tokens": OUTPUT // 2})))
        assert list(output.outputs[0].token_ids) == said[OUTPUT // 2 :]
        assert output.num_cached_tokens
        session = llm.sessions.resume("one")
        session.append([5, 6, 7])
        Scripted.learn(stateful.turns[1])
        output = session.generate(params)
        assert list(output.outputs[0].token_ids) == tokens_of(stateful.turns[1])[0][0]
        assert (output.num_cached_tokens or 0) > len(prompt)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tiers", ["none", "host", "disk"])
def test_storms_of_sessions(stateful: Case, tmp_path: Path, tiers: str, seed: int) -> None:
    """Sessions suspended, woken, forked and cut, requests preempted and swapped, over a cache for a few of them."""
    drafts = {"method": "suffix", "num_speculative_tokens": 5, "tune": False}
    settings: dict[str, Any] = {
        "num_gpu_blocks_override": 260,
        "pipeline_depth": seed % 2,
        "speculative_config": drafts,
    }
    if tiers != "none":
        settings["swap_space"] = random.Random(seed).choice([0.002, 0.02])
    if tiers == "disk":
        settings |= {"kv_disk": str(tmp_path), "kv_disk_size": random.Random(seed).choice([0.01, 0.1])}
    with LLM(stateful.path, **SETTINGS, enable_prefix_caching=False) as reference, stateful.open(**settings) as llm:
        tally = Tally(llm)
        Storm(llm, reference, seed).run(40)
        assert tally.accepted


@pytest.mark.slow
def test_stages_are_refused(stateful: Case) -> None:
    with pytest.raises(ConfigError, match="recurrent layers on several pipeline stages"):
        stateful.open(pipeline_parallel_size=2)
