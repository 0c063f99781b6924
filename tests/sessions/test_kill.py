"""After a kill at any moment, the session store holds everything that was durable."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from quire.sessions.log import SessionStore
from tests.sessions import storm


class WorkerServer:
    """Forks the workers that are killed, so that each need not start Python."""

    def __init__(self) -> None:
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            [sys.executable, storm.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
        )  # fmt: skip

    def run_and_kill(self, folder: Path, seed: int, notes: Path, seconds: float) -> None:
        """Run a worker on the folder and kill it after `seconds`."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{folder} {seed} {notes}\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        assert self._process.stdout.readline() == "ended\n"

    def close(self) -> None:
        self._process.communicate()


def states_allowed(start: storm.Model, seed: int, promised: int, begun: int) -> list[storm.Model]:
    """What the store may hold: everything durable, and possibly more of what was begun, in order."""
    rng = random.Random(seed)
    model = {name: dict(session) for name, session in start.items()}
    states = [_copy(model)] if promised == 0 else []
    for count in range(1, begun + 1):
        operation = storm.choose(rng, model)
        rng.random()
        rng.random()
        storm.apply(operation, model)
        if count >= promised:
            states.append(_copy(model))
    return states


def _copy(model: storm.Model) -> storm.Model:
    return {name: dict(session) for name, session in model.items()}


def survive(folder: Path, kills: int, seed: int, longest: float) -> Counter[str]:
    """Kill `kills` workers on one folder, and check the store after each."""
    rng = random.Random(seed)
    server = WorkerServer()
    model: storm.Model = {}
    seen: Counter[str] = Counter()
    try:
        for kill in range(kills):
            notes = folder.with_name(f"notes-{kill}")
            server.run_and_kill(folder, seed + kill, notes, rng.random() * longest)
            text = notes.read_text().splitlines() if notes.exists() else []
            assert not [line for line in text if line.startswith("e")], text[-1]
            begun = sum(line.startswith("b") for line in text)
            promised = max((int(line[1:]) + 1 for line in text if line.startswith("d")), default=0)
            with SessionStore.open(folder, file_bytes=storm.FILE_BYTES) as store:
                assert storm.lost(store) == {}, "a crash loses nothing that was promised"
                found = storm.observe(store)
                while store._cleaner.clean():
                    pass
                assert storm.observe(store) == found
                stats = store.stats()
                assert stats.log_bytes <= 2 * stats.live_bytes + 3 * storm.FILE_BYTES, "garbage is bounded"
            allowed = states_allowed(model, seed + kill, promised, begun)
            assert found in allowed, f"after {kill} kills: {promised} promised, {begun} begun"
            model = found
            seen["operations"] += begun
            seen["unfinished kept"] += found == allowed[-1] and begun > promised
            seen["unfinished gone"] += found != allowed[-1]
            seen["idle kills"] += begun == 0
            notes.unlink(missing_ok=True)
    finally:
        server.close()
    return seen


def test_killed_at_random_moments_the_store_opens_and_holds_everything_durable(tmp_path: Path) -> None:
    seen = survive(tmp_path / "sessions", kills=25, seed=1, longest=0.15)
    assert seen["operations"] > 50


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1000, 2000])
def test_hundreds_of_kills(tmp_path: Path, seed: int) -> None:
    seen = survive(tmp_path / "sessions", kills=250, seed=seed, longest=0.2)
    print(dict(seen))
    assert seen["operations"] > 500
    assert seen["idle kills"] < 125
