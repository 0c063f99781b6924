"""`LLM` over several engines: an `AsyncLLM` in a thread of its own, as one engine that makes steps."""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

from quire.api.async_llm import AsyncLLM
from quire.api.engine import FailedRequest, LLMEngine
from quire.api.inputs import PromptType
from quire.api.output_stream import OutputStream
from quire.config import EngineConfig
from quire.engine.stats import Metric
from quire.errors import SHUT, ConfigError, EngineDeadError, QuireError, ValidationError
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
        self.facts = self._llm.facts
        self.inputs = self._llm.inputs
        self._unfinished: dict[str, OutputStream] = {}
        """Requests whose end nobody has been told yet."""
        self._readers: dict[OutputStream, asyncio.Task[None]] = {}
        self._came: queue.SimpleQueue[tuple[OutputStream, Output | QuireError]] = queue.SimpleQueue()
        """The last of a request is its end."""
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quire-replicas", daemon=True)
        self._thread.start()
        # One that is dropped takes its engines along. At the interpreter's end they go by themselves.
        weakref.finalize(self, _end, self._llm, self._loop).atexit = False

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
            raise EngineDeadError(SHUT)
        if session:
            raise ValidationError("sessions over several engines are for AsyncLLM and the server", "session")
        try:
            self._wait(self._add(request_id, prompt, params, priority, tenant))
        except KeyboardInterrupt:  # it may be queued by now, and its caller does not know
            self.abort_request(request_id)
            raise

    async def _add(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams | BeamSearchParams,
        priority: int,
        tenant: str,
    ) -> None:
        box = await self._llm.submit(prompt, params, request_id, priority, tenant)
        box.raises_own = False
        self._unfinished[request_id] = box
        self._readers[box] = asyncio.ensure_future(self._read(box))

    async def _read(self, box: OutputStream) -> None:
        try:
            while not box.is_finished:
                self._came.put((box, await box.take()))
        except QuireError as error:
            self._came.put((box, error))
        finally:
            self._llm.leave(box)
            del self._readers[box]

    def begin_when_full(self) -> None:
        """They have begun."""

    def step(self) -> list[Output]:
        """What has come; waits until something has. Raises if a request has failed."""
        arrivals = self.arrivals()
        failed = next((one for one in arrivals if isinstance(one, FailedRequest)), None)
        if failed is not None:
            raise failed.error
        return [one for one in arrivals if not isinstance(one, FailedRequest)]

    def arrivals(self, patience: float | None = None) -> list[Output | FailedRequest]:
        """What has come; waits until something has, or for so many seconds."""
        arrivals: list[Output | FailedRequest] = []
        while self._unfinished and (not arrivals or not self._came.empty()):
            try:
                box, came = self._came.get(timeout=patience)
            except queue.Empty:
                break
            if self._unfinished.get(box.request_id) is not box:
                continue  # it was aborted
            if isinstance(came, QuireError) or came.finished:
                del self._unfinished[box.request_id]
            arrivals.append(FailedRequest(box.request_id, came) if isinstance(came, QuireError) else came)
        return arrivals

    def abort_request(self, request_ids: str | list[str]) -> None:
        """End requests now; their outputs are not shown any more."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        boxes = [box for one in ids if (box := self._unfinished.pop(one, None)) is not None]
        if boxes and not self._closed:
            self._wait(self._abort(boxes))

    async def _abort(self, boxes: list[OutputStream]) -> None:
        readers = [reader for box in boxes if (reader := self._readers.get(box)) is not None]
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    def has_unfinished_requests(self) -> bool:
        """Whether something will come."""
        return bool(self._unfinished)

    def get_num_unfinished_requests(self) -> int:
        return len(self._unfinished)

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
        open_here, report = len(self._unfinished) + len(self._readers), self._wait(self._llm.report_health())
        if open_here or report.unfinished:
            raise RuntimeError(f"{open_here} requests are read, and {report.unfinished} are open in engines")

    def shutdown(self) -> None:
        """End all engines. Calling it twice is fine."""
        if not self._closed:
            self._wait(self._llm.__aexit__(None, None, None))
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Have it done by the other thread. Who does not wait for it any more, after Ctrl-C, does not want it."""
        if self._closed:
            work.close()
            raise EngineDeadError(SHUT)
        done = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return done.result()
        except BaseException:
            done.cancel()
            raise


def _end(llm: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
    """Nobody has the engines any more; nothing is waited for."""

    async def end() -> None:
        await llm.__aexit__(None, None, None)
        loop.stop()

    if not loop.is_closed():
        asyncio.run_coroutine_threadsafe(end(), loop)
