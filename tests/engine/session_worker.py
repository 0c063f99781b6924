"""An engine that runs random operations on its sessions until it is killed. It reports each operation when it begins
and when it is done. Run as a program it forks such workers, so that each need not start Python."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from quire import LLM, SamplingParams
from quire.api.sessions import SessionHandle

MOST_SESSIONS, LONGEST = 30, 200
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 64, "max_num_seqs": 4, "swap_space": 0.001,
    "kv_disk_size": 0.004, "skip_tokenizer_init": True, "disable_log_stats": True,
}  # fmt: skip
"""Host memory holds 130 blocks, the disk 500."""


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


class Worker:
    """Runs operations on sessions. `note` is called before each operation and after it is done."""

    def __init__(self, llm: LLM, rng: random.Random, note: Callable[[list[Any]], object]) -> None:
        self._sessions = llm.sessions
        self._rng = rng
        self._note = note
        self._names = {info.name for info in llm.sessions}
        self._born = 0

    def work(self) -> None:
        """One operation, or a few concurrent turns."""
        acts = [self._append, self._turns, self._turns, self._suspend, self._fork, self._delete, self._create]
        self._rng.choice(acts if self._names else [self._create])()

    def _name(self) -> str:
        return self._rng.choice(sorted(self._names))

    def _new_name(self) -> str:
        self._born += 1
        return f"s-{os.getpid()}-{self._born}"

    def _some(self, most: int) -> list[int]:
        shared = [7, 8, 9] * 8 if self._rng.random() < 0.5 else []
        return shared + [self._rng.randrange(4, 110) for _ in range(self._rng.randint(1, most))]

    def _create(self) -> None:
        if len(self._names) < MOST_SESSIONS:
            name, tokens = self._new_name(), self._some(40)
            self._note(["begin", "create", name, tokens])
            self._sessions.create(name, tokens)
            self._done(name)
            self._names.add(name)

    def _append(self) -> None:
        name, tokens = self._name(), self._some(20)
        if self._sessions.get(name).info.num_tokens + len(tokens) <= LONGEST:
            self._note(["begin", "append", name, tokens])
            self._sessions.get(name).append(tokens)
            self._done(name)

    def _turns(self) -> None:
        names = self._rng.sample(sorted(self._names), min(len(self._names), self._rng.choice([1, 1, 3])))
        handles = [self._sessions.resume(name) for name in names]
        streams = {}
        for handle in handles:
            count = self._rng.randint(1, 8)
            if handle.info.num_tokens + count <= LONGEST:
                self._note(["begin", "turn", handle.name, count])
                streams[handle] = handle.stream(greedy(count))
        while streams:
            handle = self._rng.choice(list(streams))
            answer = _advance(streams[handle])
            if answer is not None:
                del streams[handle]
                self._done(handle.name, answer)

    def _suspend(self) -> None:
        handle: SessionHandle = self._sessions.get(self._name())
        self._note(["begin", "suspend", handle.name])
        handle.suspend()
        self._done(handle.name)

    def _fork(self) -> None:
        if len(self._names) < MOST_SESSIONS:
            name, new = self._name(), self._new_name()
            at = self._rng.randint(1, self._sessions.get(name).info.num_tokens)
            self._note(["begin", "fork", new, name, at])
            self._sessions.get(name).fork(new, at)
            self._done(new)
            self._names.add(new)

    def _delete(self) -> None:
        if len(self._names) > MOST_SESSIONS // 2:
            name = self._name()
            self._note(["begin", "delete", name])
            self._sessions.delete(name)
            self._done(name)
            self._names.discard(name)

    def _done(self, name: str, *what: Any) -> None:
        self._note(["done", name, *what])


def _advance(stream: Iterable[Any]) -> list[int] | None:
    """Read one output; the whole answer if it was the last."""
    output = next(iter(stream))
    return list(output.outputs[0].token_ids) if output.finished else None


def run(model: str, folder: str, seed: int, depth: int, note: Callable[[list[Any]], object]) -> None:
    """Run until killed."""
    llm = LLM(model, kv_disk=folder, pipeline_depth=depth, **SETTINGS)
    worker = Worker(llm, random.Random(seed), note)
    note(["ready"])
    while True:
        worker.work()


def fork_workers(model: str) -> None:
    """Fork a worker for each line; print its pid, and when it has ended."""
    torch.set_num_threads(1)  # children would not have the threads of a pool
    LLM(model, **SETTINGS).shutdown()  # an engine's imports happen once
    for line in sys.stdin:
        folder, seed, depth, notes = line.split()
        pid = os.fork()
        if pid == 0:
            fd = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

            def note(what: list[Any], fd: int = fd) -> None:
                os.write(fd, json.dumps(what).encode() + b"\n")

            try:
                run(model, folder, int(seed), int(depth), note)
            except BaseException as error:
                note(["error", f"{type(error).__name__}: {error}"])
            finally:
                os._exit(1)
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    fork_workers(sys.argv[1])
