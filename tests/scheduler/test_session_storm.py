"""Storms of sessions: create, append, take turns, suspend, fork, rewrite, delete, among other requests and shortages.
The checking device verifies that every token is computed over the right KV, whichever tiers it passed through; here it
is checked that sessions hold the expected tokens, and that every block is freed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from quire.errors import CacheTooSmallError, SessionBusyError
from quire.messages.caches import FULL, CacheGroup
from quire.messages.plan import MAX_WIDTH, StepPlan
from quire.sessions.keeper import SessionKeeper
from tests.scheduler.harness import Bench, MemoryDisk, ending, rng_of
from tests.scheduler.proposals import Proposals


@dataclass(frozen=True)
class EngineShape:
    """One configuration of the engine."""

    block_size: int = 4
    blocks: int = 60
    rows: int = 6
    budget: int = 24
    depth: int = 0
    host: int = 0
    disk: int = 0
    failure_rate: float = 0.0
    prefix_caching: bool = True
    groups: tuple[CacheGroup, ...] = (FULL,)
    drafts: str = ""
    """Where drafts come from: the device, the host, or both."""
    most_drafts: int = MAX_WIDTH - 1
    skill: float = 0.8
    """The share of drafts that are right."""
    verifies_with_prompts: bool = True
    tunes: bool = False


class SessionStorm:
    """Session users, and a few other requests, around a bench."""

    def __init__(self, shape: EngineShape, folder: Path, seed: int) -> None:
        self.shape = shape
        self.rng = rng_of("sessions", seed)
        proposals = Proposals(shape, seed)
        self.bench = Bench(
            shape.blocks, shape.block_size, shape.rows, shape.budget, depth=shape.depth, draws=ending,
            prefix_caching=shape.prefix_caching, fails=self._fails, host_slots=shape.host,
            disk=MemoryDisk(shape.disk, seed) if shape.disk else None, sessions=folder, groups=shape.groups,
            drafting=proposals.drafting(), guess=proposals.guess, verifies_with_prompts=shape.verifies_with_prompts,
        )  # fmt: skip
        proposals.bench = self.bench
        self.bench.device.keep_plans = False
        self.keeper: SessionKeeper = self.bench.core.sessions
        self.longest = shape.blocks * shape.block_size // 3
        self.truth: dict[str, list[int]] = {}
        """What each session must hold."""
        self.turns: dict[str, str] = {}
        """Turns in flight, by session."""
        self.aborted: set[str] = set()
        self.made = 0
        self.resumed = 0

    def run(self, operations: int) -> None:
        for _ in range(operations):
            self.rng.choice(self._choices())()
            self.bench.now += self.rng.random()
            for _ in range(self.rng.choice([0, 0, 1, 3])):
                self._step()
        for _ in range(20_000):
            if not self.bench.core.has_work:
                break
            self._step()
        assert not self.bench.core.has_work and not self.turns
        self.bench.scheduler.check_idle()
        self.bench.audit()
        for name, tokens in self.truth.items():
            assert self.keeper.tokens(name) == tokens
            assert self.keeper.get(name).num_tokens == len(tokens)
        for name in list(self.truth):
            self.keeper.suspend(name)
        while self.bench.core.has_work:
            self._step()
        assert self.bench.tables.pool.used == 0, "suspended sessions hold blocks"

    def _choices(self) -> list[object]:
        usual = [self._create, self._turn, self._turn, self._turn, self._suspend, self._plain_request]
        return [*usual, self._fork, self._append, self._rewrite, self._abort, self._delete]  # type: ignore[list-item]

    def _step(self) -> None:
        outputs = self.bench.core.step()
        self.bench.note(outputs)
        ended: set[str] = set()
        for end in outputs.finished:
            name = self.turns.pop(end.key[0], "")
            if not name:
                continue
            received = self.bench.sequences[end.key]
            if end.reason in ("stop", "length"):
                assert received.tokens == self.bench.device.truth(*end.key).output
                self.truth[name] += received.tokens
            ended.add(name)
        for name in ended & set(self.truth) - set(self.turns.values()):
            assert self.keeper.tokens(name) == self.truth[name]
        if self.rng.random() < 0.2:
            self.bench.audit()

    def _fails(self, plan: StepPlan, requests: set[str]) -> str:
        return "collect" if self.rng.random() < self.shape.failure_rate else ""

    # User operations

    def _some(self, longest: int = 12) -> list[int]:
        return [self.rng.randint(2, 9) for _ in range(self.rng.randint(1, longest))]

    def _any(self) -> str | None:
        return self.rng.choice(list(self.truth)) if self.truth else None

    def _name(self) -> str:
        self.made += 1
        return f"s{self.made}"

    def _create(self) -> None:
        name, shared = self._name(), [3] * 10
        self.truth[name] = shared + self._some()
        self.keeper.create(name, self.truth[name])

    def _turn(self) -> None:
        name = self._any()
        if name is None or len(self.truth[name]) > self.longest:
            return
        id, output = f"t{self.made}", self.rng.randint(1, 12)
        self.made += 1
        was_busy = self.keeper.get(name).phase == "live"
        is_open = name in self.turns.values()  # or its end is known here, and not reported yet
        try:
            if not is_open and self.rng.random() < 0.5:
                more = self._some(6)
                self.keeper.append(name, more)
                self.truth[name] += more
            self.bench.put(self.bench.request(id, list(self.truth[name]), output, session=name))
        except SessionBusyError:
            assert is_open
            return
        except CacheTooSmallError:
            return
        assert not was_busy
        self.turns[id] = name

    def _append(self) -> None:
        name = self._any()
        if name is not None and name not in self.turns.values():
            more = self._some()
            self.keeper.append(name, more)
            self.truth[name] += more

    def _rewrite(self) -> None:
        name = self._any()
        if name is not None and name not in self.turns.values():
            at = self.rng.randint(0, len(self.truth[name]))
            self.truth[name] = self.truth[name][:at] + self._some()
            self.keeper.rewrite(name, self.truth[name])

    def _suspend(self) -> None:
        if (name := self._any()) is not None:
            self.keeper.suspend(name)

    def _fork(self) -> None:
        name = self._any()
        if name is not None and len(self.truth) < 40:
            at = self.rng.choice([None, self.rng.randint(0, len(self.truth[name]))])
            tokens, new = self.keeper.tokens(name), self._name()  # an answer may be stored before it is reported
            self.keeper.fork(name, new, at)
            self.truth[new] = tokens[:at]
            if not self.truth[new]:
                self.truth[new] = self._some()
                self.keeper.append(new, self.truth[new])

    def _delete(self) -> None:
        name = self._any()
        if name is not None and len(self.truth) > 10 and name not in self.turns.values():
            self.keeper.delete(name)
            del self.truth[name]

    def _abort(self) -> None:
        if self.turns and self.rng.random() < 0.3:
            self.bench.core.abort(self.rng.choice(list(self.turns)))

    def _plain_request(self) -> None:
        id = f"r{self.made}"
        self.made += 1
        prompt = self.rng.choice([[3] * 10 + self._some(20), self._some(40)])
        self.bench.put(self.bench.request(id, prompt, self.rng.randint(1, 15), n=self.rng.choice([1, 1, 3])))


WEATHERS = {
    "device alone": EngineShape(),
    "device alone, overlapped": EngineShape(depth=1, blocks=40),
    "no prefix cache": EngineShape(prefix_caching=False, host=50, depth=1),
    "host": EngineShape(host=200),
    "host, tight": EngineShape(host=20, blocks=36, depth=1),
    "disk": EngineShape(host=8, disk=2000, depth=1),
    "disk, tight": EngineShape(host=4, disk=60, blocks=36),
    "small blocks": EngineShape(block_size=1, blocks=130, host=300, depth=1),
    "failing": EngineShape(host=100, disk=300, failure_rate=0.02, depth=1),
}


@pytest.mark.parametrize("kind", WEATHERS)
def test_sessions_in_any_engine_shape(kind: str, tmp_path: Path) -> None:
    storm = SessionStorm(WEATHERS[kind], tmp_path, seed=1)
    storm.run(300)
    assert storm.keeper.kv.suspended


GROUPS = {
    "window": (FULL, CacheGroup("window", (), window=6)),
    "state": (FULL, CacheGroup("state", (), pages=2)),
    "only state": (CacheGroup("state", (), pages=2),),
    "all": (FULL, FULL, CacheGroup("window", (), window=9), CacheGroup("state", (), pages=1)),
}


@pytest.mark.parametrize(("kind", "groups"), list(zip([*WEATHERS, *WEATHERS], [*GROUPS] * 5, strict=False)))
def test_sessions_over_several_cache_groups(kind: str, groups: str, tmp_path: Path) -> None:
    shape = replace(WEATHERS[kind], groups=GROUPS[groups], blocks=WEATHERS[kind].blocks * 2)
    storm = SessionStorm(shape, tmp_path, seed=2)
    storm.longest = 40
    storm.run(120)
    assert storm.keeper.kv.suspended


def with_drafts(shape: EngineShape, seed: int) -> EngineShape:
    drafts = ("device", "host", "both")[seed % 3]
    return replace(shape, drafts=drafts, most_drafts=1 + 3 * seed % 7, tunes=seed % 4 == 0)


@pytest.mark.parametrize(("seed", "kind"), list(enumerate(WEATHERS)))
def test_sessions_with_drafts(kind: str, seed: int, tmp_path: Path) -> None:
    """Turns that verify drafts: a session's blocks hold what was accepted, and nothing else."""
    storm = SessionStorm(with_drafts(WEATHERS[kind], seed), tmp_path, seed)
    storm.run(150)
    device = storm.bench.device
    assert storm.keeper.kv.suspended and 0 < device.accepted < device.verified


@pytest.mark.parametrize(("seed", "kind", "groups"), list(zip(range(30, 39), WEATHERS, [*GROUPS] * 3, strict=False)))
def test_sessions_with_drafts_over_several_cache_groups(kind: str, groups: str, seed: int, tmp_path: Path) -> None:
    shape = replace(WEATHERS[kind], groups=GROUPS[groups], blocks=WEATHERS[kind].blocks * 2)
    storm = SessionStorm(with_drafts(shape, seed), tmp_path, seed)
    storm.longest = 40
    storm.run(80)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40, 60))
@pytest.mark.parametrize("kind", WEATHERS)
def test_long_storms_of_sessions_with_drafts(kind: str, seed: int, tmp_path: Path) -> None:
    shape = WEATHERS[kind]
    if seed % 2:
        groups = GROUPS[list(GROUPS)[seed // 2 % len(GROUPS)]]
        shape = replace(shape, groups=groups, blocks=shape.blocks * 2)
    storm = SessionStorm(with_drafts(shape, seed), tmp_path, seed)
    storm.longest = min(storm.longest, 60)
    storm.run(1500)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 30))
@pytest.mark.parametrize("kind", WEATHERS)
def test_long_storms_of_sessions(kind: str, seed: int, tmp_path: Path) -> None:
    SessionStorm(WEATHERS[kind], tmp_path, seed).run(3000)
