"""The nursery: `python -m quire.engine.grammar.process FD`. It loads the library and the vocabulary, then does nothing
but fork: each fork is a guide, which compiles one grammar and follows it for every sequence that asks.

Nothing here runs without a bound: a guide has a limit on its memory, and the engine has it killed when it is late. All
are gone when the engine is, and leave by themselves when nobody has needed them for a while.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import resource
import select
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import numpy as np

from quire.engine.grammar import wire
from quire.engine.grammar.wire import Op
from quire.executor.child import leave_signals
from quire.loading.files import ModelFiles
from quire.loading.tokenizer import load_tokenizer
from quire.messages.structured import StructuredOutputsParams

if TYPE_CHECKING:
    from quire.engine.grammar.sequences import GrammarSequence
    from quire.engine.grammar.vocabulary import GrammarVocabulary

IDLE_SECONDS = 600.0
"""Whom nobody has needed for so long leaves; the next one who does pays for another."""
PR_SET_PDEATHSIG = 1


class ForkServer:
    """Forks guides, kills them when told to, and buries them."""

    def __init__(self, control: socket.socket, setup: wire.Setup, vocabulary: GrammarVocabulary) -> None:
        self._control = control
        self._setup = setup
        self._vocabulary = vocabulary
        self._pids: dict[int, int] = {}
        self._wake, wake = os.pipe()
        for end in (self._wake, wake):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # to be woken at all
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._inherited = (self._wake, wake)

    def run(self) -> None:
        """Until the engine is gone, or nobody has needed anything for long."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            events = dict(poll.poll(None if self._pids else IDLE_SECONDS * 1000))
            if not events:
                return
            if self._wake in events:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
            self._bury()
            if self._control.fileno() in events and not self._take():
                return

    def _take(self) -> bool:
        """One order; False if there will be no more."""
        data, files, _, _ = socket.recv_fds(self._control, wire.ORDER.size, 2)
        if not data:
            return False
        order, number, length = wire.ORDER.unpack(data)
        if order == wire.START:
            self._start(number, length, *files)
        elif number in self._pids:
            os.kill(self._pids[number], signal.SIGKILL)
        return True

    def _start(self, number: int, length: int, sock: int, memory: int) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._be_guide(parent, length, sock, memory)
        self._pids[number] = pid
        os.close(sock)
        os.close(memory)

    def _be_guide(self, parent: int, length: int, sock: int, memory: int) -> NoReturn:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            for end in self._inherited:
                os.close(end)
            _die_with(parent)
            _limit_memory(self._setup.memory_bytes)
            MatcherProcess(socket.socket(fileno=sock), memory, length, self._setup, self._vocabulary).run()
            status = 0
        except (ConnectionError, TimeoutError):
            status = 0
        finally:
            os._exit(status)  # nothing of the nursery's is to be tidied up twice

    def _bury(self) -> None:
        for number, pid in list(self._pids.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self._pids[number]


class MatcherProcess:
    """One grammar, and the sequences that follow it. Each has a slot in the shared memory for its next mask."""

    def __init__(
        self, sock: socket.socket, memory: int, length: int, setup: wire.Setup, vocabulary: GrammarVocabulary
    ) -> None:
        self._socket = sock
        self._setup = setup
        self._vocabulary = vocabulary
        shared = mmap.mmap(memory, 0)
        os.close(memory)
        self._form = msgspec.msgpack.decode(shared[:length], type=StructuredOutputsParams)
        words = -(-setup.vocab_size // 32)
        self._masks = np.frombuffer(shared, np.int32, setup.rows * words).reshape(setup.rows, words)
        self._sequences: dict[int, GrammarSequence] = {}
        self._holds = 0

    def run(self) -> None:
        """Compile, tell how that went, and serve."""
        from quire.engine.grammar.rules import compile_form

        self._send(wire.Told(pid=os.getpid()))
        try:
            self._grammar = compile_form(self._vocabulary.compiler, self._form)
            self._begin(0, []).fill(self._masks[0])  # the first mask may take as long as all the rest
        except MemoryError:
            raise
        except Exception as error:  # whatever the library makes of it
            self._send(wire.Told(refused=_reason(error)))
            return
        self._send(wire.Told(memory=_private_bytes()))
        decoder = msgspec.msgpack.Decoder(list[list[Any]])
        while True:
            self._socket.settimeout(None if self._holds else IDLE_SECONDS)
            data = self._socket.recv(wire.MESSAGE_BYTES)
            if not data:
                return
            self._send(wire.MatcherReply(self._do_all(decoder.decode(data))))

    def _do_all(self, operations: list[list[Any]]) -> dict[int, str]:
        failures: dict[int, str] = {}
        for op, *arguments in operations:
            try:
                self._do(Op(op), *arguments)
            except (ValueError, RuntimeError) as error:
                failures[arguments[0]] = _reason(error)
        return failures

    def _do(self, op: Op, number: int = 0, slot: int = 0, *more: Any) -> None:
        if op is Op.HOLD:
            self._holds = number
        elif op is Op.DROP:
            self._sequences.pop(number, None)
        elif op is Op.BEGIN:
            self._sequences[number] = self._begin(*more)
            self._sequences[number].fill(self._masks[slot])
        else:
            sequence = self._sequences[number]
            for token in more[0] if op is Op.ADVANCE else ():
                sequence.accept(token)
            sequence.fill(self._masks[slot])

    def _begin(self, min_tokens: int, stop_ids: list[int]) -> GrammarSequence:
        from quire.engine.grammar.sequences import GrammarSequence

        after = (self._form.after or "").encode()
        return GrammarSequence(self._grammar, self._setup.end_ids, stop_ids, min_tokens, after, self._vocabulary.bytes)

    def _send(self, message: object) -> None:
        self._socket.sendall(wire.encode(message))


def _die_with(parent: int) -> None:
    """A guide in the middle of something endless must not outlive the engine."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _limit_memory(extra: int) -> None:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + extra
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _private_bytes() -> int:
    """Memory that is this process's alone."""
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Private"))


def _reason(error: Exception) -> str:
    """What the library says, without the place in its source."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    _, found, said = lines[0].partition(".cc:")
    return (said.partition(": ")[2] if found else lines[0]).strip()[:500]


def main() -> int:
    """The process, from its first message to its end."""
    leave_signals()
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    setup = msgspec.msgpack.decode(control.recv(wire.MESSAGE_BYTES), type=wire.Setup)
    watch = _Watch(control)
    try:
        tokenizer = load_tokenizer(
            ModelFiles.from_plain(setup.files) if setup.tokenizer is None else setup.tokenizer,
            trust_remote_code=setup.trust_remote_code,
            revision=setup.revision,
            spares_torch=True,
        )
        # The library comes after the tokenizer, because it imports torch, and before the forks.
        from quire.engine.grammar import rules, sequences  # noqa: F401
        from quire.engine.grammar.vocabulary import GrammarVocabulary

        vocabulary = GrammarVocabulary(setup, tokenizer)
    except Exception as error:
        control.sendall(f"{type(error).__name__}: {error}".encode()[: wire.MESSAGE_BYTES])
        return 1
    watch.end()  # a fork takes no threads along, and what they hold stays held
    gc.collect()
    gc.freeze()
    try:
        control.sendall(wire.READY)
    except ConnectionError:  # the engine has gone meanwhile
        return 1
    ForkServer(control, setup, vocabulary).run()
    return 0


class _Watch:
    """In a thread while things are loaded: when the engine goes, so do we."""

    def __init__(self, control: socket.socket) -> None:
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._wait, args=(control,), daemon=True)
        self._thread.start()

    def _wait(self, control: socket.socket) -> None:
        poll = select.poll()
        poll.register(control, getattr(select, "POLLRDHUP", 0))
        poll.register(self._wake, select.POLLIN)
        if any(file == control.fileno() for file, _ in poll.poll()):
            os._exit(1)

    def end(self) -> None:
        os.write(self._waker, b"x")
        self._thread.join()
        os.close(self._wake)
        os.close(self._waker)


if __name__ == "__main__":
    sys.exit(main())
