"""Engines in lockstep, driven without a front: messages in, tokens out."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire import SamplingParams
from quire.config import EngineConfig
from quire.engine import ipc
from quire.engine.remote import RemoteEngine
from quire.loading.files import local_files
from quire.loading.model_config import read_model_config
from quire.messages.experts import Rebalanced
from quire.messages.outputs import Key
from quire.messages.request import NewRequest


class LockstepEngines:
    """Two engines or more of one model. Each request wakes all of them, as a front does."""

    def __init__(self, folder: Path, size: int = 2, **settings: Any) -> None:
        config = EngineConfig(str(folder), data_parallel_size=size, enable_expert_parallel=True, **settings)
        files = local_files(str(folder), folder)
        model = read_model_config(files)
        self._folder = tempfile.TemporaryDirectory(prefix="quire-rendezvous-")
        rendezvous = str(Path(self._folder.name) / "rendezvous")
        self.engines = [
            RemoteEngine(config, files, model, replica=i, replicas=size, rendezvous=rendezvous) for i in range(size)
        ]
        self.tokens: dict[Key, list[int]] = defaultdict(list)
        self.ended: dict[Key, str] = {}
        self.replies: list[Any] = []
        self.deaths: dict[int, tuple[str, float]] = {}
        self.number = 0
        for index, engine in enumerate(self.engines):
            engine.wait_until_ready()
            engine.on_message = self._take
            engine.on_death = lambda reason, index=index: self.deaths.update({index: (reason, time.monotonic())})

    def _take(self, message: ipc.Up) -> None:
        if not isinstance(message, ipc.Outputs):
            self.replies.append(message)
            return
        outputs = message.outputs
        tokens = iter(outputs.tokens)
        for key, count in zip(outputs.keys, outputs.counts or [1] * len(outputs.keys), strict=True):
            self.tokens[tuple(key)].extend(next(tokens) for _ in range(count))
        for finished in outputs.finished:
            self.ended[tuple(finished.key)] = finished.reason

    def add(self, engine: int, request_id: str, prompt: list[int], params: SamplingParams, wakes: bool = True) -> None:
        info = self.engines[engine].info
        self.number += 1
        limit = min(len(prompt) + (params.max_tokens or 16), info.max_model_len)
        keys = info.keys.of(prompt, "")
        request = NewRequest(request_id, list(prompt), params, limit, keys=keys, seed=params.seed or 0)
        self.engines[engine].send(ipc.Add(request))
        for each in self.engines if wakes else []:
            each.send(ipc.Wake(self.number))

    async def generate(self, prompts: Mapping[int, Sequence[list[int]]], **params: Any) -> dict[int, list[list[int]]]:
        """The tokens of each engine's prompts, by sequence."""
        asked = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **params})
        self.attach()
        keys: dict[int, list[Key]] = {}
        for engine, wanted in prompts.items():
            for i, prompt in enumerate(wanted):
                self.add(engine, name := f"{self.number}-{engine}-{i}", prompt, asked)
                keys.setdefault(engine, []).extend((name, sample) for sample in range(asked.n))
        expected = {key for each in keys.values() for key in each}
        await self.until(lambda: expected <= set(self.ended))
        return {engine: [self.tokens[key] for key in each] for engine, each in keys.items()}

    async def rebalance(self) -> list[Rebalanced]:
        self.attach()
        self.replies.clear()
        self.number += 1
        for engine in self.engines:
            engine.send(ipc.RebalanceExperts(question=1, number=self.number))
        await self.until(lambda: len(self.replies) == len(self.engines))
        return [report.outcome for report in self.replies]

    async def ask(self, engine: int, question: Any) -> Any:
        self.attach()
        self.replies.clear()
        self.engines[engine].send(question)
        await self.until(lambda: bool(self.replies))
        return self.replies[0]

    def attach(self) -> None:
        for engine in self.engines:
            engine.attach()

    async def until(self, done: Any, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, "nothing comes any more"
            assert not self.deaths, self.deaths
            await asyncio.sleep(0.005)

    def close(self) -> None:
        for engine in self.engines:
            engine.close("over")
        for engine in self.engines:
            engine.stop()
        self._folder.cleanup()
