"""Killed at any moment, an engine's sessions are afterwards what it had promised, and go on as if nothing had been."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from tests.conftest import assert_idle
from tests.engine import session_worker
from tests.engine.session_worker import greedy

Model = dict[str, list[int]]
"""The tokens of each session."""


class Nursery:
    """Where the engines come from that are killed."""

    def __init__(self, model: Path) -> None:
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.session_worker", str(model)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, cwd=root,
            env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def live_and_die(self, folder: Path, seed: int, notes: Path, seconds: float, early: bool) -> list[list[Any]]:
        """An engine works on the folder, is killed so long after it was up (`early`: was begun). What it told."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{folder} {seed} {seed % 2} {notes}\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        deadline = time.monotonic() + 60
        while not early and not (notes.exists() and notes.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        assert self._process.stdout.readline() == "ended\n"
        lines = notes.read_text().splitlines() if notes.exists() else []
        notes.unlink(missing_ok=True)
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self._process.communicate()


class Ledger:
    """What sessions must hold, by what was told of them."""

    def __init__(self, reference: LLM) -> None:
        self._reference = reference
        self.sessions: Model = {}
        self.open: dict[str, list[Any]] = {}
        """What was begun, and nobody was told the end of."""
        self.seen: Counter[str] = Counter()

    def read(self, told: list[list[Any]]) -> None:
        self.open = {}
        for kind, *what in told:
            assert kind != "error", what
            if kind == "begin":
                act, name, *rest = what
                self.open[name] = [act, *rest]
            elif kind == "done":
                name, *answer = what
                begun = self.open.pop(name)
                after = self.after(name, begun)
                if begun[0] == "turn":
                    assert after is not None and answer[0] == after[len(self.sessions[name]) :], "a turn went wrong"
                self._set(name, after)
                self.seen[begun[0]] += 1

    def after(self, name: str, begun: list[Any]) -> list[int] | None:
        """The session's tokens after that; None: there is no such session."""
        act, *what = begun
        before = self.sessions.get(name, [])
        if act == "delete":
            return None
        if act == "fork":
            source, at = what
            return self.sessions[source][:at]
        if act == "turn":
            return before + self.answer(before, what[0])
        return before + (what[0] if act in ("create", "append") else [])

    def answer(self, tokens: list[int], count: int) -> list[int]:
        """What an undisturbed engine says."""
        (output,) = self._reference.generate({"prompt_token_ids": tokens}, greedy(count), use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def _set(self, name: str, tokens: list[int] | None) -> None:
        if tokens is None:
            self.sessions.pop(name, None)
        else:
            self.sessions[name] = tokens

    def check(self, found: Model) -> None:
        """All that was told is there, and what was begun is there whole or not at all."""
        for name, begun in self.open.items():
            after = self.after(name, begun)
            if found.get(name) == after != self.sessions.get(name):
                self.seen["unfinished kept"] += 1
                self._set(name, after)
            elif begun[0] != "suspend":
                self.seen["unfinished gone"] += 1
        assert found.keys() == self.sessions.keys()
        for name, tokens in self.sessions.items():
            assert found[name] == tokens, f"session {name} is wrong"


def survive(model: Path, reference: LLM, folder: Path, kills: int, seed: int, longest: float) -> Counter[str]:
    """Kill so many engines on one folder, and see after each what is left."""
    rng = random.Random(seed)
    ledger, nursery = Ledger(reference), Nursery(model)
    try:
        for kill in range(kills):
            early = rng.random() < 0.15
            told = nursery.live_and_die(
                folder / "kv", seed + kill, folder / "notes", rng.random() * (0.2 if early else longest), early
            )
            ledger.read(told)
            with LLM(str(model), kv_disk=str(folder / "kv"), **session_worker.SETTINGS) as llm:
                reopened(llm, ledger, rng)
    finally:
        nursery.close()
    return ledger.seen


def reopened(llm: LLM, ledger: Ledger, rng: random.Random) -> None:
    """The store has opened: compare it with the ledger, and go on with some of the sessions."""
    infos = list(llm.sessions)
    assert [info.name for info in infos if info.lost] == [], "a process that dies loses nothing it promised"
    ledger.check({info.name: llm.sessions.get(info.name).tokens for info in infos})
    for name in rng.sample(sorted(ledger.sessions), min(3, len(ledger.sessions))):
        if len(before := ledger.sessions[name]) + 6 > session_worker.LONGEST:
            continue
        session = llm.sessions.resume(name)
        output = session.generate(greedy(6))
        ledger.sessions[name] = before + ledger.answer(before, 6)
        assert session.tokens == ledger.sessions[name], f"session {name} goes on with something else"
        ledger.seen["continued"] += 1
        ledger.seen["tokens of theirs"] += len(before)
        ledger.seen["not computed again"] += output.num_cached_tokens or 0
        session.suspend()
    assert_idle(llm)


def test_killed_at_random_moments_sessions_are_what_was_promised(
    tiny_model: Path, shared_tiny: LLM, tmp_path: Path
) -> None:
    seen = survive(tiny_model, shared_tiny, tmp_path, kills=8, seed=1, longest=0.5)
    print(dict(seen))
    assert seen["turn"] > 10 and seen["continued"] > 5 and seen["not computed again"] > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_kills(tiny_model: Path, shared_tiny: LLM, tmp_path: Path) -> None:
    seen = survive(tiny_model, shared_tiny, tmp_path, kills=210, seed=1000, longest=0.8)
    print(dict(seen))
    assert seen["turn"] > 1000 and seen["continued"] > 300
    assert seen["unfinished kept"] + seen["unfinished gone"] > 50, "most were killed in the middle of something"
