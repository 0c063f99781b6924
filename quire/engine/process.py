"""The engine's own process: `python -m quire.engine.process FD`, started by `quire.engine.remote`.

The first message says which engine to build. Then it runs the loop: read messages, make a step, send outputs. Without
work it sleeps in the kernel until a message comes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quire.engine import ipc
from quire.engine.device_split import limit_to_share
from quire.engine.engine_view import describe_block
from quire.engine.memory_watch import HeapReturns
from quire.engine.session_calls import SessionAnswer, SessionHandler
from quire.errors import EngineDeadError, OutOfResourcesError, QuireError
from quire.executor.child import apply_context, exit_with_peer, ignore_signals, load_context
from quire.messages.engine_view import BlockDetail, EngineView, RequestTimeline
from quire.resource_limits import as_resource_error, out_of_memory_reason, raise_descriptor_limit
from quire.scheduler.timelines import Timelines

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.engine.core import EngineCore
    from quire.engine.engine_info import EngineInfo
    from quire.loading.files import ModelFiles
    from quire.loading.model_config import ModelConfig

    MakeEngine = Callable[[EngineConfig, ModelFiles, ModelConfig], tuple[EngineCore, EngineInfo]]

logger = logging.getLogger("quire.engine.process")


class EngineLoop:
    """Reads messages, makes steps, sends outputs."""

    def __init__(self, link: ipc.MessageLink, core: EngineCore) -> None:
        self._link = link
        self._core = core
        self._is_open = True
        self._rebalances: list[int] = []
        self._sessions = SessionHandler(lambda: core.sessions)
        self._heap = HeapReturns()
        core.scheduler.requests.timelines = Timelines()
        core.wakes.append(link.fileno())

    def run(self) -> None:
        """Run until `ShutdownEngine` arrives. Waits for messages only while there is no work."""
        while self._is_open:
            seconds = self._tick_idle()
            for data in self._link.receive(not self._core.has_work, seconds):
                self._handle(data)
            if self._is_open and self._core.has_work:
                outputs = self._core.step()
                if not outputs.is_empty:
                    for piece in outputs.pieces():
                        self._link.send(ipc.Outputs(piece))
                self._sessions.answer_saved()
                self._report_rebalanced()
                self._heap.tick()

    def _tick_idle(self) -> float | None:
        """What is to be done while there is no work; returns after how many seconds again, None: not before there is
        work."""
        if self._core.has_work:
            return None
        pauses = (self._core.tick_idle(), self._heap.tick_idle())
        return min((seconds for seconds in pauses if seconds is not None), default=None)

    def _handle(self, data: bytes) -> None:
        try:
            message = ipc.decode_down(data)
        except ipc.MalformedRequestError as error:
            self._link.send(refusal(error.request_id, error))
            return
        except ipc.MalformedCallError as error:
            self._reply_session(error.question, error)
            return
        core, send = self._core, self._link.send
        match message:
            case ipc.Add(request=request):
                try:
                    core.add(request)
                except Exception as error:  # one bad request must not end the others
                    send(refusal(request.id, error))
            case ipc.Abort(id=request_id):
                core.abort(request_id)
            case ipc.Finish(key=key, at=at, stop_reason=stop_reason):
                core.finish(key, at, stop_reason)
            case ipc.ResetPrefixCache(question=question):
                send(ipc.ResetReport(question, core.scheduler.reset_prefix_cache()))
            case ipc.Ping(question=question):
                send(ipc.HealthReport(question, core.scheduler.unfinished - core.compiling, core.scheduler.stats.steps))
            case ipc.GetStats(question=question):
                send(ipc.StatsReport(question, core.metrics()))
            case ipc.GetMemoryMap(question=question, block_bytes=block_bytes):
                send(self._map_memory(question, block_bytes))
            case ipc.GetView(question=question):
                self._report_view(question, core.view)
            case ipc.GetTimeline(question=question, id=request_id):
                self._report_view(question, lambda: core.scheduler.requests.timelines.of(request_id))
            case ipc.GetBlock(question=question, block=block, tier=tier):
                self._report_view(question, lambda: describe_block(core.scheduler, block, tier))
            case ipc.Wake(number=number):
                core.wake(number)
            case ipc.PrepareGrammars(end_ids=end_ids):
                core.prepare_grammars(end_ids)
            case ipc.RebalanceExperts(question=question, number=number):
                self._rebalance(question, number)
            case ipc.SessionCall(question=question, op=op):
                self._sessions.handle(op, lambda outcome: self._reply_session(question, outcome))
            case ipc.ShutdownEngine():
                self._is_open = False
            case ipc.StartEngine():
                raise RuntimeError("unexpected second StartEngine message")

    def _rebalance(self, question: int, number: int) -> None:
        """Move experts, and answer; engines in lockstep answer later, in `_report_rebalanced`."""
        try:
            outcome = self._core.rebalance_experts(number)
        except EngineDeadError:
            raise  # ends the process, not just this call
        except QuireError as error:
            self._link.send(ipc.RebalanceReport(question, error=refusal(str(question), error)))
            return
        if outcome is None:
            self._rebalances.append(question)
        else:
            self._link.send(ipc.RebalanceReport(question, outcome))

    def _report_rebalanced(self) -> None:
        """Answer rebalance calls once all engines in lockstep have moved their experts."""
        if self._rebalances and (outcomes := self._core.take_rebalanced()):
            for question in self._rebalances:
                self._link.send(ipc.RebalanceReport(question, outcomes[-1]))
            self._rebalances.clear()

    def _map_memory(self, question: int, block_bytes: int) -> ipc.MemoryReport:
        try:
            return ipc.MemoryReport(question, self._core.memory_map(block_bytes))
        except Exception as error:  # a debugging aid must not end the engine
            logger.exception("the memory map failed")
            return ipc.MemoryReport(question, error=f"{type(error).__name__}: {error}")

    def _report_view(
        self, question: int, make: Callable[[], EngineView | RequestTimeline | BlockDetail | None]
    ) -> None:
        try:
            report = ipc.ViewReport(question, make())
        except Exception as error:  # looking at the engine must not end it
            if not isinstance(error, QuireError):
                logger.exception("a view of the engine failed")
            report = ipc.ViewReport(question, refused=refusal(str(question), error))
        self._link.send(report)

    def _reply_session(self, question: int, outcome: SessionAnswer | Exception) -> None:
        if isinstance(outcome, SessionAnswer):
            self._link.send(ipc.SessionReply(question, outcome))
            return
        outcome = as_resource_error(outcome) or outcome
        if not isinstance(outcome, QuireError):
            logger.error("a session call failed", exc_info=outcome)
        self._link.send(ipc.SessionReply(question, refused=refusal(str(question), outcome)))


TENANT_GRAMMARS = 256
"""Default of max_tenant_grammars for an engine that serves many callers."""
_MALFORMED = (ipc.MalformedRequestError, ipc.MalformedCallError)


def refusal(request_id: str, error: Exception) -> ipc.RequestRefused:
    """An error as a message."""
    error = as_resource_error(error) or error
    name = next(kind.__name__ for kind in type(error).__mro__ if kind not in _MALFORMED)
    return ipc.RequestRefused(request_id, name, str(error), getattr(error, "parameter", None))


def main(make: MakeEngine | None = None) -> int:
    """Run the process. `make`: builds another engine than the default one."""
    ignore_signals()
    raise_descriptor_limit()
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    exit_with_peer(sock)
    link = ipc.MessageLink(sock)
    core = _start(link, make)
    if core is None:
        return 1
    gc.freeze()  # these objects stay: a collection over all of them would pause every stream
    try:
        EngineLoop(link, core).run()
    except (EOFError, BrokenPipeError):
        pass
    except Exception as error:
        _die(link, error)
    core.shutdown()
    return 0


def _start(link: ipc.MessageLink, make: MakeEngine | None) -> EngineCore | None:
    """Build the engine that the first message describes; None if that failed, after sending the error."""
    start = ipc.decode_down(link.next_payload())
    assert isinstance(start, ipc.StartEngine)
    prefix = f"replica {start.replica}: " if start.replicas > 1 else ""
    apply_context(start, start.log_level, link.send, prefix)
    try:
        config, files, model = load_context(start)
        if make is None:
            limit_to_share(config, start.replica, start.replicas)
        lockstep = (start.replica, start.replicas, start.rendezvous)
        default = functools.partial(make_default, lockstep=lockstep, grammar_ends=start.grammar_ends)
        core, info = (make or default)(config, files, model)
    except Exception as error:
        link.send(start_refusal(error))
        return None
    link.send(ipc.ready_message(info))
    return core


def start_refusal(error: Exception) -> ipc.RequestRefused:
    """The error that kept an engine from starting, as a message."""
    if not isinstance(error, QuireError):
        if reason := out_of_memory_reason(error):
            return refusal("", OutOfResourcesError(reason))
        logger.error("the engine could not be started", exc_info=error)
    return refusal("", error)


def make_default(
    config: EngineConfig,
    files: ModelFiles,
    model: ModelConfig,
    lockstep: tuple[int, int, str] = (0, 1, ""),
    grammar_ends: Sequence[int] = (),
) -> tuple[EngineCore, EngineInfo]:
    from quire.distributed.lockstep import LockstepAddress
    from quire.engine.setup import make_engine
    from quire.scheduler.pacing import STREAM_STRETCH
    from quire.sessions.quota import SERVED, SessionQuota

    address = LockstepAddress(*lockstep) if config.steps_together else None
    quota = SessionQuota.of(config, SERVED).share(lockstep[1])
    return make_engine(config, files, model, STREAM_STRETCH, address, TENANT_GRAMMARS, quota, grammar_ends)


def death_notice(error: Exception) -> ipc.Died:
    """The last message of a loop that failed."""
    if isinstance(error, EngineDeadError):
        return ipc.Died(str(error))
    logger.error("the engine's loop failed", exc_info=error)
    return ipc.Died(f"its loop failed: {type(error).__name__}: {error}")


def _die(link: ipc.MessageLink, error: Exception) -> None:
    """Send the reason and exit at once: cleaning up on a lost device may hang, but not that of temporary files."""
    with contextlib.suppress(OSError):
        link.send(death_notice(error))
    if (tiers := sys.modules.get("quire.engine.tiers")) is not None:  # otherwise it has no sessions
        tiers.remove_scratch()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
