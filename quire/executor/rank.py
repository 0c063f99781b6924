"""A rank's own process: `python -m quire.executor.rank SOCKET PULSE RANK`, started by `quire.executor.processes`.

It loads its part of the model and then does nothing but steps: take plans, run them, tell.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import mmap
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
import zlib
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import QuireError, StepError
from quire.executor import wire
from quire.executor.pulse import beat
from quire.messages.frames import Frames, Inlet
from quire.messages.plan import decode_masks, decode_plan, encode

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.executor.local import LocalExecutor
    from quire.platforms.base import Platform
    from quire.worker.worker import Worker

logger = logging.getLogger("quire.executor.rank")

SPIN_SECONDS = 0.005
PAUSE_SHARE = 0.01
"""How a wait for the device asks: at first without pause, then as seldom as it has waited long."""
JOIN_SECONDS = 600.0
"""So long ranks wait for each other. A dead one is noticed long before, by the engine."""


class Link:
    """The rank's end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._inlet = Inlet(sock)
        self._frames = Frames()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._lock = threading.Lock()

    def send(self, message: wire.Up) -> None:
        """May be called from any thread."""
        data = wire.encode(message)
        with self._lock:
            self._socket.sendall(data)

    def receive(self, seconds: float | None) -> list[wire.Down]:
        """What has come; waits at most so long, None for ever. Raises EOFError when the engine is gone."""
        if not self._poll.poll(None if seconds is None else 1000 * seconds):
            return []
        try:
            data = self._inlet.receive()
        except ConnectionError:
            data = memoryview(b"")
        if not data:
            raise EOFError("the engine has gone")
        return [wire.decode_down(each) for each in self._frames.feed(data)]


class RankLoop:
    """Plans in, steps, answers out; steps are launched as soon as they come and told in their order."""

    def __init__(self, link: Link, worker: Worker, executor: LocalExecutor, rank: int) -> None:
        self._link, self._worker, self._executor, self._rank = link, worker, executor, rank
        self._launched: deque[tuple[int, Any]] = deque()
        self._waiting_since = 0.0
        self._is_open = True

    def run(self) -> None:
        """Until told to stop."""
        while self._is_open:
            for message in self._link.receive(self._pause()):
                self._take(message)
            while self._launched and _is_over(self._launched[0][1]):
                self._tell(*self._launched.popleft())
                self._waiting_since = time.monotonic()

    def _pause(self) -> float | None:
        """How long nothing but a message needs to be looked for."""
        if not self._launched or _waits_for_masks(self._launched[0][1]):
            return None
        waited = time.monotonic() - self._waiting_since
        return 0.0 if waited < SPIN_SECONDS else min(PAUSE_SHARE * waited, 0.001)

    def _take(self, message: wire.Down) -> None:
        match message:
            case wire.Step(plan=data):
                plan = decode_plan(data)
                if not self._launched:
                    self._waiting_since = time.monotonic()
                self._launched.append((plan.step, self._executor.submit(plan)))
            case wire.Supply(masks=data):
                step, handle = self._launched[-1]
                try:
                    self._executor.supply(handle, decode_masks(data))
                except StepError as error:
                    self._launched[-1] = (step, error)
            case wire.CountExperts():
                counts = {layer: list(map(int, each)) for layer, each in self._executor.expert_counts().items()}
                self._link.send(wire.ExpertCounts(counts))
            case wire.Shutdown():
                self._is_open = False
            case _:
                raise RuntimeError(f"a rank that runs was sent {type(message).__name__}")

    def _tell(self, step: int, handle: Any) -> None:
        from quire.distributed.collectives import calls

        try:
            result = self._executor.collect(handle)
        except StepError as error:
            self._link.send(wire.Failed(step, type(error).__name__, str(error), calls()))
            return
        moves, result.moves_done = result.moves_done, []
        drawn = zlib.crc32(result.tokens.tobytes())
        self._link.send(wire.Done(step, drawn, moves, encode(result) if self._rank == 0 else b""))


def _waits_for_masks(handle: Any) -> bool:
    return not isinstance(handle, StepError) and handle.draws is None


def _is_over(handle: Any) -> bool:
    return isinstance(handle, StepError) or (handle.draws is not None and handle.ready())


class _LogSender(logging.Handler):
    """Hands log lines to the engine."""

    def __init__(self, link: Link, rank: int) -> None:
        super().__init__()
        self._link, self._rank = link, rank

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._link.send(wire.Log(record.name, record.levelno, f"rank {self._rank}: {self.format(record)}"))
        except Exception:  # nobody is there to read it
            self.handleError(record)


def main() -> int:
    """The process, from its first message to its end."""
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)  # the engine decides when ranks leave
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    pulses, rank = mmap.mmap(int(sys.argv[2]), 0), int(sys.argv[3])
    os.close(int(sys.argv[2]))
    threading.Thread(target=beat, args=(pulses, rank), name="quire-pulse", daemon=True).start()
    link = Link(sock)
    start = _first(link)
    folder = Path(start.rendezvous).parent
    threading.Thread(target=_leave_with_engine, args=(sock, folder), name="quire-engine-watch", daemon=True).start()
    sys.path[:] = start.import_path
    root = logging.getLogger("quire")
    root.setLevel(start.log_level if start.rank == 0 else max(start.log_level, logging.WARNING))
    root.addHandler(_LogSender(link, start.rank))
    root.propagate = False
    try:
        loop = _start(link, start)
    except Exception as error:
        if not isinstance(error, QuireError):
            logger.exception("the rank could not start")
        link.send(wire.Refused(type(error).__name__, str(error), getattr(error, "parameter", None)))
        return 1
    gc.freeze()  # what is there now stays: a collection that went through all of it would stop every stream
    code = 0
    try:
        with contextlib.suppress(EOFError, BrokenPipeError):
            loop.run()
    except Exception:
        logger.exception("the rank's loop failed")
        code = 1
    os._exit(code)  # the system takes everything back faster than we could, and nobody hangs in a destructor


def _first(link: Link) -> wire.Start:
    while not (messages := link.receive(None)):
        pass
    assert isinstance(messages[0], wire.Start)
    return messages[0]


def _start(link: Link, start: wire.Start) -> RankLoop:
    """Load this rank's part; the cache comes when all ranks have said what they have room for."""
    # Imported now and not above: torch takes its time, and the watch on the engine must stand before.
    import torch

    from quire.config import EngineConfig
    from quire.distributed.groups import Ranks
    from quire.distributed.world import join
    from quire.executor.local import LocalExecutor
    from quire.loading.files import ModelFiles
    from quire.loading.read_config import read_model_config
    from quire.worker.memory import no_room
    from quire.worker.worker import Worker

    torch.set_num_threads(start.threads)
    config = EngineConfig(**start.settings)
    paths = {name: None if start.files[name] is None else Path(start.files[name]) for name in ("gguf", "folder")}
    files = ModelFiles(start.files["name"], Path(start.files["path"]), **paths)
    model = read_model_config(files, config.hf_overrides)
    platform, config, backend = _place(config, start)
    ranks = Ranks(tp_rank=start.rank, tp_size=start.size)
    join(ranks, Path(start.rendezvous), backend, JOIN_SECONDS)
    before = platform.free_memory()
    doing = "while the model was loaded and a first step tried"
    worker: Worker | None = None
    try:
        worker = Worker(config, files, model, platform, start.max_model_len, start.max_rows, start.max_tokens, ranks)
        memory = worker.needs.plan(config, platform, before, platform.free_memory())
        link.send(
            wire.Loaded(
                device=platform.describe(),
                dtype=str(worker.needs.dtype),
                weight_bytes=worker.needs.weight_bytes,
                reads_groups=worker.reads_groups,
                memory=dataclasses.asdict(memory),
                phases=worker.phases,
            )
        )
        num_blocks = _blocks(link)
        doing = f"with a KV cache of {num_blocks} blocks"
        worker.make_cache(num_blocks)
    except torch.OutOfMemoryError as error:
        if worker is None:
            raise
        raise no_room(error, worker.needs, platform, doing) from error
    link.send(_ready(worker))
    return RankLoop(link, worker, LocalExecutor(worker, can_give_up=False), start.rank)


def _blocks(link: Link) -> int:
    while not (messages := link.receive(None)):
        pass
    assert isinstance(messages[0], wire.MakeCache)
    return messages[0].num_blocks


def _ready(worker: Worker) -> wire.Ready:
    if worker.mover is None:
        return wire.Ready()
    room = worker.mover.room()
    return wire.Ready(room.num_slots, room.slot_bytes, room.out_rate, room.back_rate)


def _place(config: EngineConfig, start: wire.Start) -> tuple[Platform, EngineConfig, str]:
    """The device of this rank, what it may take of it, and how it talks to the others'."""
    import torch

    from quire.distributed.world import BACKENDS
    from quire.platforms import choose

    size = start.size
    if config.device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(start.rank % torch.cuda.device_count())
    platform = choose(config.device)
    backend = BACKENDS[platform.device.type]
    share: dict[str, Any] = {"swap_space": config.swap_space / size}  # all ranks share the machine's memory
    if platform.device.type == "cpu":
        share["cpu_kv_cache_share"] = config.cpu_kv_cache_share / size
    elif size > torch.cuda.device_count():  # several to a card, which NCCL refuses and gloo cannot capture
        share |= {"gpu_memory_utilization": config.gpu_memory_utilization / size, "enforce_eager": True}
        backend = "gloo"
    return platform, dataclasses.replace(config, **share), backend


def _leave_with_engine(sock: socket.socket, folder: Path) -> None:
    """In a thread: when the engine's end of the socket closes, go, whatever the loop is in the middle of."""
    poll = select.poll()
    poll.register(sock, getattr(select, "POLLRDHUP", 0))  # what comes to read wakes nobody here
    poll.poll()
    shutil.rmtree(folder, ignore_errors=True)  # the engine's doing, where it lived to do it
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
