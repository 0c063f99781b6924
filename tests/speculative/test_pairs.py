"""Drafts with everything else that an engine does, on tiny random models of every kind of cache: the tokens are those
without drafts each time.

The proposer has a book of the expected tokens and changes some of them, so that steps accept none, some and all of
their drafts. Long cases (tiers, sessions, ranks, storms) carry the marker `slow`: `make spec-pairs`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.errors import ConfigError, UnsupportedModelError
from tests.conftest import assert_idle
from tests.engine.test_cache_kinds import KINDS, OUTPUT, PROMPTS, Case, greedy
from tests.engine.test_tiers_engine import Storm
from tests.speculative.scripted import SCRIPTED, Scripted, Tally

LENGTH = 20
STOP = 17
SUFFIX = {"method": "suffix", "tune": False}


class PairsCase(Case):
    """A checkpoint, and what engines without drafts yield."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, folder)
        # Rows of hybrids verify no drafts close to a snapshot, and tiny ones take a snapshot for each block.
        self.block_size = 16 if name == "hybrid" else 4
        self._plain: dict[str, list[RequestOutput]] = {}

    def open(self, **more: Any) -> LLM:
        return super().open(**({"block_size": self.block_size} | more))

    def without_drafts(self, **settings: Any) -> list[RequestOutput]:
        """The outputs of the workload in an engine without drafts."""
        name = repr(settings)
        if name not in self._plain:
            with self.open(**settings) as llm:
                self._plain[name] = generate(llm)
        return self._plain[name]

    def compare(self, expected: list[RequestOutput], rounds: int = 2, preempts: bool = False, **settings: Any) -> None:
        """Check the workload with drafts against these outputs, `rounds` times. `preempts`: rows must be preempted, and
        swapped if there is room for them on the host."""
        Scripted.learn(expected)
        with self.open(speculative_config=SCRIPTED, **settings) as llm:
            tally = Tally(llm)
            for _ in range(rounds):
                check(generate(llm), expected)
            assert tally.verified > tally.accepted > 15 * rounds
            if preempts:
                stats = llm.llm_engine.core.scheduler.stats
                assert stats.preemptions and bool(stats.swaps) == bool(settings.get("swap_space"))
            assert_idle(llm)


def workload() -> tuple[list[Any], list[SamplingParams]]:
    """Requests with every parameter that reads the tokens before it, or ends the output."""

    def params(**fields: Any) -> SamplingParams:
        usual = {"temperature": 0.8, "seed": 3, "max_tokens": LENGTH, "ignore_eos": True, "detokenize": False}
        return SamplingParams(**(usual | fields))

    wanted = [
        params(temperature=0),
        params(n=2),
        params(top_k=30, top_p=0.9, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.4, presence_penalty=0.3),
        params(temperature=0, logit_bias={STOP: 3.0, 8: -100.0}, stop_token_ids=[STOP], min_tokens=7),
        params(logprobs=2, allowed_token_ids=list(range(4, 90, 3))),
        params(max_tokens=3),
    ]
    return [{"prompt_token_ids": PROMPTS[i % len(PROMPTS)]} for i in range(len(wanted))], wanted


def generate(llm: LLM) -> list[RequestOutput]:
    return llm.generate(*workload(), use_tqdm=False)


def check(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for one, other in zip(found, expected, strict=True):
        for sample, right in zip(one.outputs, other.outputs, strict=True):
            assert list(sample.token_ids) == list(right.token_ids)
            assert (sample.finish_reason, sample.stop_reason) == (right.finish_reason, right.stop_reason)
            assert len(sample.logprobs or []) == len(right.logprobs or [])
            for entry, true in zip(sample.logprobs or [], right.logprobs or [], strict=True):
                assert {token: value.rank for token, value in entry.items()} == {t: v.rank for t, v in true.items()}
                for token, value in entry.items():
                    assert value.logprob == pytest.approx(true[token].logprob, abs=1e-3)


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PairsCase:
    return PairsCase(request.param, tmp_path_factory.mktemp("pairs"))


@pytest.fixture(autouse=True)
def usual_script(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("book", []), ("wrong", 0.2), ("fails", 0.0)):
        monkeypatch.setattr(Scripted, name, value)


def tight(case: PairsCase) -> dict[str, Any]:
    """Settings of a cache that holds little more than one of the workload's requests."""
    with case.open() as llm:
        tables = llm.llm_engine.core.scheduler.tables
        states = sum(group.pages for group in tables.groups)
        grown = len(tables.groups) - sum(group.kind == "state" for group in tables.groups)
    blocks = -(-(max(map(len, PROMPTS)) + LENGTH) // case.block_size) + 2
    # Windows give back what others keep.
    pages = int((states + grown * blocks) * (1.0 if case.name == "window" else 1.2))
    return {"num_gpu_blocks_override": pages, "max_num_batched_tokens": 24}


def test_chunks_hits_and_preemption(case: PairsCase) -> None:
    """Overlapped steps, prompts in chunks, prefix hits in the second round, and a cache for little more than one of the
    requests."""
    expected = case.without_drafts()
    assert list(expected[0].outputs[0].token_ids)[:OUTPUT] == case.tokens[0], "the reference is transformers"
    case.compare(expected, preempts=True, pipeline_depth=1, **tight(case))


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("swap", [0.0, 0.05])
def test_preempted_rows(case: PairsCase, depth: int, swap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # A tiny model computes faster than any link copies.
    monkeypatch.setattr("quire.scheduler.swapping.LEAST_SWAP", 1)
    for name in ("swapping_pays", "loading_pays"):
        monkeypatch.setattr(f"quire.kvcache.offload.costs.Costs.{name}", lambda *_: True)
    case.compare(case.without_drafts(), 3, True, pipeline_depth=depth, swap_space=swap, **tight(case))


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"enforce_eager": True}, {"enable_prefix_caching": False}, {"block_size": 8}])
@pytest.mark.parametrize("depth", [0, 1])
def test_other_settings(case: PairsCase, more: dict[str, Any], depth: int) -> None:
    case.compare(case.without_drafts(), pipeline_depth=depth, **more)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantized_weights(case: PairsCase, kind: str) -> None:
    settings: dict[str, Any] = {"quantization": kind}
    if case.name == "window":
        with pytest.raises(UnsupportedModelError, match="MXFP4"):
            case.open(**settings)
        return
    case.compare(case.without_drafts(**settings), pipeline_depth=1, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8_per_token_head", "fp8"])
def test_a_cache_in_few_bits(case: PairsCase, kind: str) -> None:
    settings: dict[str, Any] = {"kv_cache_dtype": kind}
    if case.name == "latent":
        with pytest.raises(ConfigError, match="kv_cache_dtype"):
            case.open(**settings)
        return
    case.compare(case.without_drafts(**settings), pipeline_depth=1, max_num_batched_tokens=24, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_ranks(case: PairsCase, sizes: dict[str, int]) -> None:
    if case.name == "hybrid" and "pipeline_parallel_size" in sizes:
        with pytest.raises(ConfigError, match="recurrent layers on several pipeline stages"):
            case.open(speculative_config=SCRIPTED, **sizes)
        return
    case.compare(case.without_drafts(**sizes), **sizes)


@pytest.mark.slow
def test_sessions(case: PairsCase, tmp_path: Path) -> None:
    """A turn with drafts, then the session is suspended, woken, forked and continued."""
    first = PROMPTS[1] + case.continuation(PROMPTS[1], 12)
    second = [*first, 30, 31, 32]
    second += case.continuation(second, 12)
    forked = [*first[:-5], 40, 41]
    forked += case.continuation(forked, 12)
    Scripted.book = [second, forked]
    settings = {"kv_disk": str(tmp_path), "kv_disk_size": 0.2, "swap_space": 0.05}
    with case.open(speculative_config=SCRIPTED, **settings) as llm:
        tally = Tally(llm)
        session = llm.sessions.create("one", PROMPTS[1])
        assert list(session.generate(greedy(12)).outputs[0].token_ids) == first[len(PROMPTS[1]) :]
        session.suspend()
        other = llm.sessions.resume("one").fork("two", len(first) - 5)
        for one, tokens, whole in ((session, [30, 31, 32], second), (other, [40, 41], forked)):
            one.append(tokens)
            output = one.generate(greedy(12))
            assert list(output.outputs[0].token_ids) == whole[-12:]
            assert (output.num_cached_tokens or 0) > 0
            one.suspend()
        assert tally.verified > tally.accepted > 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tiers", ["none", "host", "disk"])
def test_storms_of_sessions(case: PairsCase, tmp_path: Path, tiers: str, seed: int) -> None:
    """Sessions suspended, woken, forked and cut, requests preempted and swapped, with a suffix proposer."""
    settings: dict[str, Any] = {"num_gpu_blocks_override": 260, "pipeline_depth": seed % 2, "swap_space": 0.0}
    if tiers != "none":
        settings["swap_space"] = random.Random(seed).choice([0.002, 0.02])
    if tiers == "disk":
        settings |= {"kv_disk": str(tmp_path), "kv_disk_size": random.Random(seed).choice([0.01, 0.1])}
    make: Callable[[], LLM] = lambda: case.open(speculative_config=SUFFIX, **settings)  # noqa: E731
    with case.open(enable_prefix_caching=False) as reference:
        storm = Storm(make(), reference, seed)
        tally = Tally(storm.llm)
        storm.run(80)
        assert tally.accepted > 0
        if tiers == "disk":
            storm.llm.shutdown()
            storm.llm = make()
            storm.run(20)
        storm.llm.shutdown()
