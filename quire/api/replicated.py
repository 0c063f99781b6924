"""`LLM` over several engines: an `AsyncLLM` in a thread of its own, as one engine that makes steps."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from quire.api.async_llm import AsyncLLM
from quire.api.engine import LLMEngine
from quire.api.inputs import PromptType
from quire.api.mailbox import Mailbox
from quire.config import EngineConfig
from quire.engine.stats import Metric
from quire.errors import ConfigError, EngineDeadError, QuireError, ValidationError
from quire.messages.beams import BeamSearchParams
from quire.messages.experts import Rebalanced
from quire.messages.memory_map import MemoryMap
from quire.messages.outputs import Output
from quire.messages.pooling import PoolingParams
from quire.messages.sampling import SamplingParams

T = TypeVar("T")


class ReplicatedEngine(LLMEngine):
    """What `LLMEngine` is for one engine in this process, for several in processes of their own. A step is whatever has
    come by then, from any of them."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._llm = AsyncLLM.from_config(config)
        self.facts = self._llm.facts  # type: ignore[assignment]  # where its bytes went only an engine itself knows
        self.inputs = self._llm.inputs
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._came: queue.SimpleQueue[Output | QuireError] = queue.SimpleQueue()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quire-replicas", daemon=True)
        self._thread.start()

    def __getattr__(self, name: str) -> Any:
        if name == "core":
            raise ConfigError(
                f"with data_parallel_size {self.config.data_parallel_size} the engines run in processes of their own, "
                "and this needs one in this process",
                "data_parallel_size",
                self.config.data_parallel_size,
            )
        raise AttributeError(f"{type(self).__name__} has no {name!r}")

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams | BeamSearchParams,
        *,
        priority: int = 0,
        tenant: str = "",
        session: str = "",
    ) -> None:
        """Check a request and send it to an engine."""
        if self._closed:
            raise EngineDeadError("the engine has been shut down; make a new one")
        if session:
            raise ValidationError("sessions over several engines are for AsyncLLM and the server", "session")
        self._wait(self._add(request_id, prompt, params, priority, tenant))

    async def _add(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams | BeamSearchParams,
        priority: int,
        tenant: str,
    ) -> None:
        box = await self._llm.submit(prompt, params, request_id, priority, tenant)
        self._readers[request_id] = asyncio.ensure_future(self._read(box))

    async def _read(self, box: Mailbox) -> None:
        try:
            while not box.is_finished:
                self._came.put(await box.take())
        except QuireError as error:
            self._came.put(error)
        finally:
            self._llm.leave(box)
            del self._readers[box.request_id]

    def begin_when_full(self) -> None:
        """They have begun."""

    def step(self) -> list[Output]:
        """What has come; waits until something has."""
        if not self._readers and self._came.empty():
            return []
        came = [self._came.get()]
        while not self._came.empty():
            came.append(self._came.get())
        for one in came:
            if isinstance(one, QuireError):
                raise one
        return [one for one in came if not isinstance(one, QuireError)]

    def abort_request(self, request_ids: str | list[str]) -> None:
        """End requests now; their outputs are not shown any more."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        if not self._closed:
            self._wait(self._abort(ids))

    async def _abort(self, request_ids: list[str]) -> None:
        readers = [reader for one in request_ids if (reader := self._readers.get(one)) is not None]
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    def has_unfinished_requests(self) -> bool:
        """Whether something will come."""
        return bool(self._readers)

    def get_num_unfinished_requests(self) -> int:
        return len(self._readers)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; True if none had to stay with a running request."""
        return self._wait(self._llm.reset_prefix_cache())

    def rebalance_experts(self) -> Rebalanced:
        """Move experts to where the load since the last time says they had better be."""
        return self._wait(self._llm.rebalance_experts())

    def get_metrics(self) -> list[Metric]:
        """Counters and gauges of all engines together."""
        return self._wait(self._llm.get_metrics())

    def memory_map(self) -> MemoryMap:
        """Who holds what now at the first engine, on the device and in the tiers below."""
        return self._wait(self._llm.memory_map())

    def check_idle(self) -> None:
        """Raise unless every request has ended everywhere."""
        report = self._wait(self._llm.report_health())
        if self._readers or report.unfinished:
            raise RuntimeError(f"{len(self._readers)} requests are read, and {report.unfinished} are open in engines")

    def shutdown(self) -> None:
        """End all engines. Calling it twice is fine."""
        if not self._closed:
            self._closed = True
            self._wait(self._llm.__aexit__(None, None, None))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
