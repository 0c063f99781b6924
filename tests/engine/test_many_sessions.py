"""Ten thousand suspended sessions on disk: what they share is stored once, and none is slower for the others."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from quire import LLM, SamplingParams
from quire.api.sessions import SessionHandle
from tests.conftest import write_tiny_model

SHARED, OWN, BLOCK = 512, 32, 16
SIZES = [(250, 2_000), pytest.param(1_000, 10_000, marks=pytest.mark.slow)]
"""Sessions at the first measurement and at the second."""
AT_ONCE = 100
HOST_SHARE = 10
"""Host memory holds a tenth of the suspended blocks."""
BLOCK_BYTES = 2 * 2 * 2 * 16 * BLOCK * 4
"""Bytes of the tiny model's block: keys and values, layers, heads, head size, block, float32."""
MakeLLM = Callable[..., LLM]
Costs = dict[str, tuple[float, float]]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with room for the shared prompt."""
    folder = write_tiny_model(tmp_path_factory.mktemp("long"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    return folder


class ManySessions:
    """An engine with many sessions that share a prefix."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.rng = random.Random(7)
        self.system = llm.sessions.create("system", self._tokens(SHARED))
        self.system.generate(greedy(1))
        self._shared = self.system.tokens[:SHARED]
        self.prompts: dict[str, list[int]] = {}
        """The tokens of each session before its first turn."""
        self._num_created = 0

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(4, 110) for _ in range(count)]

    def _new_session(self) -> SessionHandle:
        name, self._num_created = f"agent-{self._num_created}", self._num_created + 1
        session = self.system.fork(name, SHARED)
        own = self._tokens(OWN - 1)
        session.append(own)
        self.prompts[name] = [*self._shared, *own]
        return session

    def grow_to(self, count: int) -> None:
        """Fork sessions, append to each, generate a token and suspend it, until there are `count`."""
        while len(self.prompts) < count:
            created = [self._new_session() for _ in range(min(AT_ONCE, count - len(self.prompts)))]
            for stream in [session.stream(greedy(1)) for session in created]:
                for _ in stream:
                    pass
            for session in created:
                session.suspend()

    def costs(self, repeats: int = 15) -> Costs:
        """Median operation counts, and best times in seconds, of calls whose cost must not depend on the number of
        sessions."""
        sessions, sampled = self.llm.sessions, self.rng.sample(list(self.prompts), repeats)
        measured: dict[str, list[tuple[int, float]]] = {"create": [], "list": [], "resume": []}
        for name in sampled:
            measured["create"].append(cost(lambda: sessions.create("temporary", [5, 6, 7])))
            sessions.delete("temporary")
            measured["list"].append(cost(lambda name=name: sessions.list(after=name, limit=20)))
            measured["resume"].append(cost(lambda name=name: sessions.resume(name).generate(greedy(1))))
            sessions.delete(name)
            del self.prompts[name]
        return {
            act: (statistics.median(count for count, _ in values), min(spent for _, spent in values))
            for act, values in measured.items()
        }


def cost(act: Callable[[], object]) -> tuple[int, float]:
    """How many functions a call calls, and how long it takes."""
    count = 0

    def note(frame: FrameType, event: str, value: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    begin = time.perf_counter()
    try:
        act()
    finally:
        seconds = time.perf_counter() - begin
        sys.setprofile(None)
    return count, seconds


def uninterrupted(llm: LLM, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """The tokens after the prompts in an engine without suspends or sharing."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy(tokens), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("few_sessions", "many_sessions"), SIZES, ids=lambda count: f"{count}")
def test_thousands_of_suspended_sessions(
    make_llm: MakeLLM,
    long_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    few_sessions: int,
    many_sessions: int,
) -> None:
    is_slow = many_sessions == 10_000
    host_slots = many_sessions * (OWN // BLOCK) // HOST_SHARE
    # A tiny model computes a few tokens faster than a busy disk reads them, and the engine knows.
    monkeypatch.setattr("quire.kvcache.offload.costs.Costs.loading_pays", lambda *_: True)
    settings = {
        "swap_space": host_slots * BLOCK_BYTES / 2**30, "kv_disk": str(tmp_path), "num_gpu_blocks_override": 1024,
        "max_num_seqs": AT_ONCE, "max_num_batched_tokens": 4096, "block_size": BLOCK,
    }  # fmt: skip
    llm = make_llm(long_model, **settings)
    core = llm.llm_engine.core
    fleet = ManySessions(llm)
    fleet.grow_to(few_sessions)
    few = fleet.costs()
    fleet.grow_to(many_sessions)
    fleet.system.suspend()
    tiers = core.scheduler.tiers
    assert tiers is not None and tiers.store is not None
    assert core.scheduler.tables.pool.used == 0, "suspended sessions hold nothing on the device"
    assert tiers.host.num_slots == host_slots
    stats = tiers.store.stats()
    assert stats.pinned_blocks == SHARED // BLOCK + many_sessions * OWN // BLOCK, "the shared part is stored once"
    assert (stats.refused, stats.failed, stats.damaged) == (0, 0, 0)

    many = fleet.costs()
    for act, (count, seconds) in many.items():
        before, seconds_before = few[act]
        where = f"{act} among {few_sessions} and {many_sessions} sessions"
        assert count <= 1.3 * before, f"{where}: {before} and {count} operations"
        if is_slow:  # a busy machine makes times of a few microseconds meaningless
            assert seconds <= 5 * seconds_before, f"{where}: {seconds_before} and {seconds} s"

    names = fleet.rng.sample(list(fleet.prompts), 12)
    reference = make_llm(long_model, enable_prefix_caching=False, num_gpu_blocks_override=1024)
    expected = uninterrupted(reference, [fleet.prompts[name] for name in names], 9)
    for name, answer in zip(names[:6], expected[:6], strict=True):
        session = llm.sessions.resume(name)
        output = session.generate(greedy(8))
        assert output.num_cached_tokens == SHARED + OWN - 1, "all computed tokens are cached"
        assert session.tokens == [*fleet.prompts[name], *answer]
        session.suspend()
    llm.shutdown()

    llm = make_llm(long_model, **settings)  # the same after a restart
    assert len(llm.sessions) == len(fleet.prompts) + 1
    listed, after = 0, None
    while page := llm.sessions.list(after, limit=1000):
        listed, after = listed + len(page), page[-1].name
    assert listed == len(llm.sessions)
    for name, answer in zip(names, expected, strict=True):
        session = llm.sessions.resume(name)
        if name in names[6:]:
            output = session.generate(greedy(8))
            assert output.num_cached_tokens == SHARED + OWN - 1
        assert session.tokens == [*fleet.prompts[name], *answer]
        session.suspend()
