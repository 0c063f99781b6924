"""Random load on the real engine: suspend, resume, fork, evict, swap, truncate, abort. Every token as in an
uninterrupted run."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.messages.outputs import RequestOutput
from tests.conftest import assert_idle

MOST_SESSIONS, LONGEST = 12, 220
BLOCK_BYTES = {16: 8192, 8: 4096}
MakeLLM = Callable[..., LLM]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


class Storm:
    """Session users and other requests on an engine with few blocks. `truth` is what each session must hold."""

    def __init__(self, llm: LLM, reference: LLM, seed: int) -> None:
        self.llm, self.reference = llm, reference
        self.rng = random.Random(seed)
        self.truth: dict[str, list[int]] = {}
        self.seen: Counter[str] = Counter()
        self.shared = self._random(48)

    def run(self, operations: int) -> None:
        acts = [self._create, self._append, *[self._turn] * 3, self._turns, self._plain_requests, self._suspend]
        acts += [self._fork, self._truncate, self._abort, self._evict, self._delete]
        for i in range(operations):
            act = self.rng.choice(acts) if len(self.truth) > 2 else self._create
            act()
            self.seen[act.__name__] += 1
            if i % 10 == 0:
                self.llm.llm_engine.check_idle()
        self.check()

    def check(self) -> None:
        """Sessions hold the expected tokens, and no block is held without an owner."""
        assert {info.name for info in self.llm.sessions} == self.truth.keys()
        for name, tokens in self.truth.items():
            assert self.llm.sessions.get(name).tokens == tokens
            self.llm.sessions.get(name).suspend()
        assert_idle(self.llm)
        assert self.llm.llm_engine.core.scheduler.tables.pool.used == 0, "suspended sessions hold nothing on the device"

    # Operations

    def _random(self, count: int) -> list[int]:
        return [self.rng.randrange(4, 110) for _ in range(count)]

    def _some(self, most: int) -> list[int]:
        begin = self.shared[: self.rng.choice([0, 16, 40, 48])] if most > 40 else []
        return begin + self._random(self.rng.randint(1, most))

    def _any(self) -> str:
        return self.rng.choice(list(self.truth))

    def _name(self) -> str:
        self.seen["names"] += 1
        return f"s{self.seen['names']}"

    def _answer(self, tokens: list[int], count: int) -> list[int]:
        (output,) = self.reference.generate({"prompt_token_ids": tokens}, greedy(count), use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def _create(self) -> None:
        if len(self.truth) < MOST_SESSIONS:
            name = self._name()
            self.truth[name] = self._some(60)
            self.llm.sessions.create(name, self.truth[name])

    def _append(self) -> None:
        name, more = self._any(), self._some(20)
        if len(self.truth[name]) + len(more) <= LONGEST:
            self.llm.sessions.get(name).append(more)
            self.truth[name] = self.truth[name] + more

    def _turn(self) -> None:
        name, count = self._any(), self.rng.randint(1, 16)
        if len(before := self.truth[name]) + count <= LONGEST:
            output = self.llm.sessions.resume(name).generate(greedy(count))
            self._said(name, output)
            self.seen["tokens"] += len(before)
            self.seen["found"] += output.num_cached_tokens or 0

    def _said(self, name: str, output: RequestOutput) -> None:
        answer, before = list(output.outputs[0].token_ids), self.truth[name]
        assert answer == self._answer(before, len(answer)), f"{name} yields wrong tokens"
        self.truth[name] = before + answer

    def _turns(self) -> None:
        """A few concurrent turns, and a request without a session."""
        names = self.rng.sample(list(self.truth), min(5, len(self.truth)))
        names = [name for name in names if len(self.truth[name]) + 12 <= LONGEST]
        streams: dict[str, Iterator[RequestOutput]] = {
            name: self.llm.sessions.resume(name).stream(greedy(12)) for name in names
        }
        while streams:
            name = self.rng.choice(list(streams))
            if (output := next(streams[name])).finished:
                del streams[name]
                self._said(name, output)
            elif self.rng.random() < 0.05:
                self.llm.sessions.get(name).suspend()  # when its turn ends

    def _plain_requests(self) -> None:
        """Requests without a session, enough of them to be swapped or recomputed."""
        prompts = [self._some(80) for _ in range(self.rng.randint(1, 6))]
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy(40), use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert list(output.outputs[0].token_ids) == self._answer(prompt, 40), "a plain request yields wrong tokens"

    def _suspend(self) -> None:
        self.llm.sessions.get(self._any()).suspend()

    def _fork(self) -> None:
        if len(self.truth) < MOST_SESSIONS:
            name, new = self._any(), self._name()
            at = self.rng.choice([None, self.rng.randint(1, len(self.truth[name]))])
            self.llm.sessions.get(name).fork(new, at)
            self.truth[new] = self.truth[name][:at]

    def _truncate(self) -> None:
        name = self._any()
        at = self.rng.randint(1, len(self.truth[name]))
        sessions = self.llm.sessions
        if self.rng.random() < 0.5:
            sessions.keeper.cut(sessions.key_of(name), at)
            self.truth[name] = self.truth[name][:at]
        else:
            self.truth[name] = self.truth[name][:at] + self._random(5)
            sessions.keeper.rewrite(sessions.key_of(name), self.truth[name])

    def _abort(self) -> None:
        name = self._any()
        if len(self.truth[name]) + 20 <= LONGEST:
            stream = self.llm.sessions.get(name).stream(greedy(20))
            for _ in range(self.rng.randrange(4)):
                if next(stream).finished:
                    break
            stream.close()  # type: ignore[attr-defined]
            before, tokens = self.truth[name], self.llm.sessions.get(name).tokens
            if tokens != before:  # the turn had ended before: with drafts that takes few steps
                assert tokens == before + self._answer(before, 20)
                self.truth[name] = tokens

    def _evict(self) -> None:
        """Drop the device's cache, or host memory, or a part of it."""
        tiers = self.llm.llm_engine.core.scheduler.tiers
        self.llm.reset_prefix_cache()
        if tiers is not None and self.rng.random() < 0.5:
            keys = list(tiers.host.oldest())
            tiers.host.discard(self.rng.sample(keys, self.rng.randint(0, len(keys))))

    def _delete(self) -> None:
        if len(self.truth) > MOST_SESSIONS // 2:
            name = self._any()
            self.llm.sessions.delete(name)
            del self.truth[name]


def settings_of(tiers: str, depth: int, block_size: int, folder: Path, rng: random.Random) -> dict[str, Any]:
    """Settings with blocks for two or three requests, and small tiers."""
    size, blocks = BLOCK_BYTES[block_size], 16 // block_size
    settings: dict[str, Any] = {
        "num_gpu_blocks_override": rng.choice([24, 40]) * blocks, "max_num_seqs": 4, "pipeline_depth": depth,
        "block_size": block_size, "session_idle_seconds": rng.choice([None, 0.05]), "disable_log_stats": True,
        "max_num_batched_tokens": rng.choice([32, 256]),
    }  # fmt: skip
    if tiers != "none":
        settings["swap_space"] = rng.choice([20, 60, 200]) * blocks * size / 2**30
    if tiers == "disk":
        settings |= {"kv_disk": str(folder), "kv_disk_size": rng.choice([50, 400]) * blocks * (size + 64) / 2**30}
    return settings


def run_storm(make_llm: MakeLLM, reference: LLM, folder: Path, tiers: str, seed: int, operations: int) -> Counter[str]:
    """One storm; with a disk it continues after a restart."""
    rng = random.Random(seed)
    depth, block_size = seed % 2, rng.choice([8, 16])
    settings = settings_of(tiers, depth, block_size, folder, rng)
    storm = Storm(make_llm(**settings), reference, seed)
    storm.run(operations)
    if tiers == "disk":
        storm.llm.shutdown()
        storm.llm = make_llm(**settings)
        storm.run(operations // 2)
    return storm.seen


@pytest.mark.parametrize(
    "tiers, depth",
    [
        ("host", 0),
        ("disk", 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("none", 0), ("none", 1), ("host", 1), ("disk", 0))),
    ],
)
def test_a_storm_changes_no_token(make_llm: MakeLLM, shared_tiny: LLM, tmp_path: Path, tiers: str, depth: int) -> None:
    seen = run_storm(make_llm, shared_tiny, tmp_path, tiers, seed=10 + depth, operations=60)
    assert seen["found"] > 0.3 * seen["tokens"], "most computed tokens are cache hits"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(100, 108))
@pytest.mark.parametrize("tiers", ["none", "host", "disk"])
def test_long_storms(make_llm: MakeLLM, shared_tiny: LLM, tmp_path: Path, tiers: str, seed: int) -> None:
    print(dict(run_storm(make_llm, shared_tiny, tmp_path, tiers, seed, operations=600)))
