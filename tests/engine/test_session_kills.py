"""After a kill at any moment, an engine's sessions hold everything durable, and continue as if uninterrupted."""

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


class WorkerServer:
    """Forks the engines that are killed."""

    def __init__(self, model: Path) -> None:
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.session_worker", str(model)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, cwd=root,
            env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def run_and_kill(self, folder: Path, seed: int, notes: Path, seconds: float, early: bool) -> list[list[Any]]:
        """Run an engine on the folder and kill it `seconds` after it was ready (`early`: after it was forked). Its
        reports."""
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


class ExpectedSessions:
    """What sessions must hold, according to the reports."""

    def __init__(self, reference: LLM) -> None:
        self._reference = reference
        self.sessions: Model = {}
        self.open: dict[str, list[Any]] = {}
        """Operations that were begun and not reported done."""
        self.seen: Counter[str] = Counter()

    def read(self, reports: list[list[Any]]) -> None:
        self.open = {}
        for kind, *what in reports:
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
        """The session's tokens after the operation; None: there is no such session."""
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
        """The tokens of an uninterrupted engine."""
        (output,) = self._reference.generate({"prompt_token_ids": tokens}, greedy(count), use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def _set(self, name: str, tokens: list[int] | None) -> None:
        if tokens is None:
            self.sessions.pop(name, None)
        else:
            self.sessions[name] = tokens

    def check(self, found: Model) -> None:
        """Every operation reported done is there, and every one begun is there whole or not at all."""
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
    """Kill `kills` engines on one folder, and check the sessions after each."""
    rng = random.Random(seed)
    expected, workers = ExpectedSessions(reference), WorkerServer(model)
    try:
        for kill in range(kills):
            early = rng.random() < 0.15
            reports = workers.run_and_kill(
                folder / "kv", seed + kill, folder / "notes", rng.random() * (0.2 if early else longest), early
            )
            expected.read(reports)
            with LLM(str(model), kv_disk=str(folder / "kv"), **session_worker.SETTINGS) as llm:
                reopened(llm, expected, rng)
    finally:
        workers.close()
    return expected.seen


def reopened(llm: LLM, expected: ExpectedSessions, rng: random.Random) -> None:
    """The store was opened again: compare it with what is expected, and continue some of the sessions."""
    infos = list(llm.sessions)
    assert [info.name for info in infos if info.lost] == [], "a killed process loses nothing durable"
    expected.check({info.name: llm.sessions.get(info.name).tokens for info in infos})
    for name in rng.sample(sorted(expected.sessions), min(3, len(expected.sessions))):
        if len(before := expected.sessions[name]) + 6 > session_worker.LONGEST:
            continue
        session = llm.sessions.resume(name)
        output = session.generate(greedy(6))
        expected.sessions[name] = before + expected.answer(before, 6)
        assert session.tokens == expected.sessions[name], f"session {name} continues with wrong tokens"
        expected.seen["continued"] += 1
        expected.seen["tokens of theirs"] += len(before)
        expected.seen["not computed again"] += output.num_cached_tokens or 0
        session.suspend()
    assert_idle(llm)


def test_killed_at_random_moments_sessions_hold_everything_durable(
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
    assert seen["unfinished kept"] + seen["unfinished gone"] > 50, "most were killed during an operation"
