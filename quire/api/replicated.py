"""`LLM` over several engines: an `AsyncLLM` in its own thread, behind the interface of `LLMEngine`."""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from quire.api.adapters import LoRAChoice
from quire.api.async_llm import AsyncLLM
from quire.api.engine import FailedRequest, LLMEngine
from quire.api.inputs import AnyParams, PromptType
from quire.api.output_stream import OutputStream
from quire.config import EngineConfig
from quire.engine.stats import Metric
from quire.errors import SHUT_DOWN, ConfigError, EngineDeadError, QuireError, ValidationError
from quire.messages.adapter_use import AdapterUse
from quire.messages.experts import Rebalanced
from quire.messages.memory_map import MemoryMap
from quire.messages.outputs import Output

T = TypeVar("T")


class ReplicatedEngine(LLMEngine):
    """`LLMEngine` for several engines in their own processes. A step returns what has arrived from any of them."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._llm = AsyncLLM.from_config(config)
        self.info = self._llm.info
        self.inputs = self._llm.inputs
        self.adapters = self._llm.adapters
        self._unfinished: dict[str, OutputStream] = {}
        """Requests whose end was not returned yet."""
        self._readers: dict[OutputStream, asyncio.Task[None]] = {}
        self._arrived: queue.SimpleQueue[tuple[OutputStream, Output | QuireError]] = queue.SimpleQueue()
        """Outputs and errors; the last of a request is its end."""
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quire-replicas", daemon=True)
        self._thread.start()
        # A dropped object ends its engines. When the interpreter exits they end by themselves.
        weakref.finalize(self, _end, self._llm, self._loop).atexit = False

    def __getattr__(self, name: str) -> Any:
        if name == "core":
            raise ConfigError(
                f"with data_parallel_size {self.config.data_parallel_size} the engines run in their own processes, and "
                "this needs one in this process",
                "data_parallel_size",
                self.config.data_parallel_size,
            )
        raise AttributeError(f"{type(self).__name__} has no {name!r}")

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: AnyParams,
        *,
        priority: int = 0,
        tenant: str = "",
        session: str = "",
        lora_request: LoRAChoice = None,
        adapters: Sequence[AdapterUse] = (),
    ) -> None:
        """Check a request and send it to an engine."""
        if self._closed:
            raise EngineDeadError(SHUT_DOWN)
        if session:
            raise ValidationError("LLM supports sessions with one engine only: use AsyncLLM or the server", "session")
        try:
            uses = [*adapters, *self.adapters.uses(lora_request)]
            self._wait(self._add(request_id, prompt, params, priority, tenant, uses))
        except KeyboardInterrupt:  # it may be queued, and its caller does not have the id
            self.abort_request(request_id)
            raise

    async def _add(
        self,
        request_id: str,
        prompt: PromptType,
        params: AnyParams,
        priority: int,
        tenant: str,
        adapters: list[AdapterUse],
    ) -> None:
        stream = await self._llm.submit(prompt, params, request_id, priority, tenant, adapters=adapters)
        stream.raises_refusals = False
        self._unfinished[request_id] = stream
        self._readers[stream] = asyncio.ensure_future(self._read(stream))

    async def _read(self, stream: OutputStream) -> None:
        try:
            while not stream.is_finished:
                self._arrived.put((stream, await stream.take()))
        except QuireError as error:
            self._arrived.put((stream, error))
        finally:
            self._llm.leave(stream)
            del self._readers[stream]

    def begin_when_full(self) -> None:
        """Nothing to do: the engines start by themselves."""

    def step(self) -> list[Output]:
        """What has arrived; waits until something has. Raises if a request has failed."""
        collected = self.collect()
        failed = next((one for one in collected if isinstance(one, FailedRequest)), None)
        if failed is not None:
            raise failed.error
        return [one for one in collected if not isinstance(one, FailedRequest)]

    def collect(self, timeout: float | None = None) -> list[Output | FailedRequest]:
        """What has arrived; waits until something has, or for `timeout` seconds."""
        collected: list[Output | FailedRequest] = []
        while self._unfinished and (not collected or not self._arrived.empty()):
            try:
                stream, arrived = self._arrived.get(timeout=timeout)
            except queue.Empty:
                break
            if self._unfinished.get(stream.request_id) is not stream:
                continue  # it was aborted
            if isinstance(arrived, QuireError) or arrived.finished:
                del self._unfinished[stream.request_id]
            collected.append(FailedRequest(stream.request_id, arrived) if isinstance(arrived, QuireError) else arrived)
        return collected

    def abort_request(self, request_ids: str | list[str]) -> None:
        """End requests now; they have no further outputs."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        streams = [stream for one in ids if (stream := self._unfinished.pop(one, None)) is not None]
        if streams and not self._closed:
            self._wait(self._abort(streams))

    async def _abort(self, streams: list[OutputStream]) -> None:
        readers = [reader for stream in streams if (reader := self._readers.get(stream)) is not None]
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    def has_unfinished_requests(self) -> bool:
        """Whether more outputs will arrive."""
        return bool(self._unfinished)

    def get_num_unfinished_requests(self) -> int:
        return len(self._unfinished)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached blocks; False if running requests still hold some."""
        return self._wait(self._llm.reset_prefix_cache())

    def rebalance_experts(self) -> Rebalanced:
        """Move experts to balance the load measured since the last time."""
        return self._wait(self._llm.rebalance_experts())

    def get_metrics(self) -> list[Metric]:
        """Counters and gauges of all engines together."""
        return self._wait(self._llm.get_metrics())

    def memory_map(self) -> MemoryMap:
        """What holds which blocks now at the first engine, on all tiers."""
        return self._wait(self._llm.memory_map())

    def check_idle(self) -> None:
        """Raise unless every request has finished everywhere."""
        report = self._wait(self._llm.report_health())
        open_here = len(self._unfinished) + len(self._readers)  # counted last: a reader ends just after its last output
        if open_here or report.unfinished:
            raise RuntimeError(f"{open_here} requests are being read, {report.unfinished} are open in engines")

    def shutdown(self) -> None:
        """End all engines. Calling it twice is fine."""
        if not self._closed:
            self._wait(self._llm.__aexit__(None, None, None))
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it in the other thread and wait; Ctrl-C cancels it."""
        if self._closed:
            work.close()
            raise EngineDeadError(SHUT_DOWN)
        done = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return done.result()
        except BaseException:
            done.cancel()
            raise


def _end(llm: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
    """Shut the engines of a dropped object down, without waiting."""

    async def end() -> None:
        await llm.__aexit__(None, None, None)
        loop.stop()

    if not loop.is_closed():
        asyncio.run_coroutine_threadsafe(end(), loop)
