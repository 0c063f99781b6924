"""The fork server: `python -m quire.engine.grammar.process FD`. It loads the library and the vocabulary, then only
forks: each fork is a matcher, which compiles one grammar and matches every sequence that uses it.

Everything is bounded: a matcher's memory is limited, and the engine has it killed when it takes too long. All of them
exit with the engine, or by themselves after IDLE_SECONDS without use.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import mmap
import os
import resource
import select
import signal
import socket
import sys
import threading
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import numpy as np

from quire.engine.grammar import wire
from quire.engine.grammar.free_part import FreePart
from quire.engine.grammar.wire import Op
from quire.executor.child import ignore_signals
from quire.loading.files import ModelFiles
from quire.loading.tokenizer import load_tokenizer
from quire.messages.structured import StructuredOutputsParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from quire.engine.grammar.xgrammar_backend import GrammarSequence, GrammarVocabulary

IDLE_SECONDS = 600.0
"""Idle matchers, and a fork server without matchers, exit after this many seconds."""
PR_SET_PDEATHSIG = 1


class ForkServer:
    """Forks matchers, kills them on request, and reaps them."""

    def __init__(self, control: socket.socket, spec: wire.ForkServerSpec, vocabulary: GrammarVocabulary) -> None:
        self._control = control
        self._spec = spec
        self._vocabulary = vocabulary
        self._pids: dict[int, int] = {}
        self._wake, wake = os.pipe()
        for end in (self._wake, wake):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler is needed for the wakeup file
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._inherited = (self._wake, wake)

    def run(self) -> None:
        """Run until the engine has exited, or there were no matchers for IDLE_SECONDS."""
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
            self._reap()
            if self._control.fileno() in events and not self._handle_command():
                return

    def _handle_command(self) -> bool:
        """Handle one command; False if the engine has closed the socket."""
        try:
            data, files, _, _ = socket.recv_fds(self._control, wire.COMMAND.size, 2)
        except ConnectionResetError:  # it was killed, and has not read everything
            return False
        if not data:
            return False
        command, number, length = wire.COMMAND.unpack(data)
        if command == wire.START:
            self._start(number, length, *files)
        elif command == wire.KILL and number in self._pids:
            os.kill(self._pids[number], signal.SIGKILL)
        return True

    def _start(self, number: int, length: int, sock: int, memory: int) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._run_matcher(parent, length, sock, memory)
        self._pids[number] = pid
        os.close(sock)
        os.close(memory)

    def _run_matcher(self, parent: int, length: int, sock: int, memory: int) -> NoReturn:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            for end in self._inherited:
                os.close(end)
            _die_with(parent)
            _limit_memory(self._spec.memory_bytes)
            MatcherProcess(socket.socket(fileno=sock), memory, length, self._spec, self._vocabulary).run()
            status = 0
        except (ConnectionError, TimeoutError):
            status = 0
        finally:
            os._exit(status)  # skips the fork server's exit handlers

    def _reap(self) -> None:
        for number, pid in list(self._pids.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self._pids[number]


class MatcherProcess:
    """One grammar, and its sequences. Each has a slot in the shared memory for its next mask."""

    def __init__(
        self, sock: socket.socket, memory: int, length: int, spec: wire.ForkServerSpec, vocabulary: GrammarVocabulary
    ) -> None:
        self._socket = sock
        self._spec = spec
        self._vocabulary = vocabulary
        shared = mmap.mmap(memory, 0)
        os.close(memory)
        self._form = msgspec.msgpack.decode(shared[:length], type=StructuredOutputsParams)
        self._free = FreePart(self._form, vocabulary.bytes)
        shape = (spec.rows, spec.places, -(-spec.vocab_size // 32))
        self._masks = np.frombuffer(shared, np.int32, math.prod(shape)).reshape(shape)
        self._sequences: dict[int, GrammarSequence] = {}
        self._users = 0

    def run(self) -> None:
        """Compile, report the outcome, and serve."""
        from quire.engine.grammar.xgrammar_backend import compile_form

        self._send(wire.MatcherStatus(pid=os.getpid()))
        try:
            self._grammar = compile_form(self._vocabulary.compiler, self._form)
            self._begin(0, []).fill(self._masks[0, 0])  # the first mask may take as long as all later ones
        except MemoryError:
            raise
        except Exception as error:  # of any kind the library raises
            self._send(wire.MatcherStatus(refused=_reason(error)))
            return
        self._send(wire.MatcherStatus(memory=_private_bytes()))
        decoder = msgspec.msgpack.Decoder(list[list[Any]])
        while True:
            self._socket.settimeout(None if self._users else IDLE_SECONDS)
            data = self._socket.recv(wire.MESSAGE_BYTES)
            if not data:
                return
            self._send(self._apply_all(decoder.decode(data)))

    def _apply_all(self, operations: list[list[Any]]) -> wire.MatcherReply:
        reply = wire.MatcherReply({}, {}, {})
        for op, *arguments in operations:
            try:
                self._apply(reply, Op(op), *arguments)
            except (ValueError, RuntimeError) as error:
                reply.failures[arguments[0]] = _reason(error)
        return reply

    def _apply(self, reply: wire.MatcherReply, op: Op, number: int = 0, slot: int = 0, *more: Any) -> None:
        if op is Op.SET_USERS:
            self._users = number
        elif op is Op.DROP:
            self._sequences.pop(number, None)
        elif op is Op.BEGIN:
            self._sequences[number] = self._begin(*more)
            self._fill(reply, number, slot, [])
        elif op is Op.ADVANCE:
            for token in more[0]:
                self._sequences[number].accept(token)
            self._fill(reply, number, slot, [])
        else:
            self._fill(reply, number, slot, more[0])

    def _fill(self, reply: wire.MatcherReply, number: int, slot: int, drafts: list[int]) -> None:
        """Write the masks along the drafts, or along the tokens that are certain."""
        sequence, masks = self._sequences[number], self._masks[slot]
        sequence.fill(masks[0])
        if drafts:
            reply.runs[number] = sequence.follow(drafts, masks)
        elif self._spec.places > 1:
            reply.certain[number] = certain = sequence.follow_certain(masks)
            reply.runs[number] = certain[: len(masks) - 1]

    def _begin(self, min_tokens: int, stop_ids: list[int]) -> GrammarSequence:
        from quire.engine.grammar.xgrammar_backend import GrammarSequence

        texts = self._vocabulary.bytes
        return GrammarSequence(self._grammar, self._spec.end_ids, stop_ids, min_tokens, self._free, texts)

    def _send(self, message: object) -> None:
        self._socket.sendall(wire.encode(message))


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the fork server exits: it may be in a computation that never ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _limit_memory(extra: int) -> None:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + extra
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _private_bytes() -> int:
    """Memory not shared with other processes."""
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Private"))


def _reason(error: Exception) -> str:
    """The library's message, without its source location."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    _, found, text = lines[0].partition(".cc:")
    return (text.partition(": ")[2] if found else lines[0]).strip()[:500]


def main() -> int:
    """Run the fork server."""
    ignore_signals()
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    # Left in the socket until the vocabulary is loaded: `_start_again` reads it once more.
    spec = msgspec.msgpack.decode(control.recv(wire.MESSAGE_BYTES, socket.MSG_PEEK), type=wire.ForkServerSpec)
    watch = _Watch(control)
    try:
        tokenizer = load_tokenizer(
            ModelFiles.from_plain(spec.files) if spec.tokenizer is None else spec.tokenizer,
            trust_remote_code=spec.trust_remote_code,
            revision=spec.revision,
            spares_torch=True,
        )
        vocabulary = _load_vocabulary(spec, tokenizer, control)
        control.recv(wire.MESSAGE_BYTES)
    except Exception as error:
        with contextlib.suppress(ConnectionError):  # the engine has exited meanwhile
            control.sendall(f"{type(error).__name__}: {error}".encode()[: wire.MESSAGE_BYTES])
        return 1
    watch.end()  # a fork has no threads, and locks they hold would stay locked
    gc.collect()
    gc.freeze()
    try:
        control.sendall(wire.READY)
    except ConnectionError:  # the engine has exited meanwhile
        return 1
    ForkServer(control, spec, vocabulary).run()
    return 0


WITH_TORCH = "with-torch"
"""The argument of a fork server whose xgrammar needs torch."""


def _load_vocabulary(
    spec: wire.ForkServerSpec, tokenizer: PreTrainedTokenizerFast, control: socket.socket
) -> GrammarVocabulary:
    """The vocabulary, loaded before the forks. Torch stays out of this process if xgrammar works without it: half of
    the start time, and more than half of the memory."""
    if "torch" in sys.modules or WITH_TORCH in sys.argv:
        return _try_vocabulary(spec, tokenizer)
    try:
        with _torch_stand_in():
            return _try_vocabulary(spec, tokenizer)
    except Exception:  # this xgrammar needs more of torch, or fails with it too
        _start_again(control)


def _try_vocabulary(spec: wire.ForkServerSpec, tokenizer: PreTrainedTokenizerFast) -> GrammarVocabulary:
    """Load the vocabulary, and make a mask with it as matchers do: what the library lacks shows here."""
    from quire.engine.grammar.xgrammar_backend import GrammarSequence, GrammarVocabulary, compile_form

    vocabulary = GrammarVocabulary(spec, tokenizer)
    form = StructuredOutputsParams(regex="a*")
    sequence = GrammarSequence(
        compile_form(vocabulary.compiler, form), spec.end_ids, [], 0, FreePart(form, vocabulary.bytes), vocabulary.bytes
    )
    sequence.fill(np.empty(-(-spec.vocab_size // 32), np.int32))
    return vocabulary


@contextlib.contextmanager
def _torch_stand_in() -> Iterator[None]:
    """A module in torch's place with the few names that xgrammar needs unless it applies masks."""
    sys.modules["torch"] = None  # type: ignore[assignment] # makes `import torch` fail, which tvm_ffi allows for
    try:
        import tvm_ffi  # noqa: F401

        stand_in = types.ModuleType("torch")
        names = dict.fromkeys(("Tensor", "LongTensor", "FloatTensor"), object)
        vars(stand_in).update(names, int32="int32", tensor=lambda *_, **__: None)
        sys.modules["torch"] = stand_in
        yield
    finally:
        del sys.modules["torch"]


def _start_again(control: socket.socket) -> NoReturn:
    """Run this program anew with the real torch: its libraries cannot be imported twice."""
    control.set_inheritable(True)
    os.execv(sys.executable, [sys.executable, "-m", "quire.engine.grammar.process", sys.argv[1], WITH_TORCH])


class _Watch:
    """A thread that exits the process if the engine exits while the vocabulary is loaded."""

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
