"""A recorded run: every plan, mask and result of an engine in one file, for `quire replay` to run again.

The file is a sequence of frames (a length, then msgpack). The first is a `RecordingHeader`; each of the others is one
byte that names its kind, then the message as `messages/plan.py` encodes it. Plans hold the prompts' token ids: treat a
recording as you would the prompts themselves.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Union

import msgspec

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.executor.base import Executor, Lockstep
from quire.executor.child import child_context
from quire.executor.expert_balance import ExpertBalance
from quire.loading.files import ModelFiles
from quire.messages.experts import Rebalanced
from quire.messages.frames import FrameSplitter, frame
from quire.messages.memory_use import MemoryUse
from quire.messages.plan import (
    StepMasks,
    StepPlan,
    StepResult,
    decode_masks,
    decode_plan,
    decode_result,
    encode,
)

VERSION = 1
_READ_BYTES = 1 << 20
_SECRETS = ("hf_token",)
"""Settings that are never written to a recording."""

RecordedMessage = Union[StepPlan, StepMasks, StepResult]
_DECODERS: dict[bytes, Callable[[bytes], RecordedMessage]] = {
    b"P": decode_plan,
    b"M": decode_masks,
    b"R": decode_result,
}


class RecordingHeader(msgspec.Struct):
    """What a replay needs to build an engine of the same shape."""

    version: int
    settings: dict[str, Any]
    """The fields of the engine's `EngineConfig`, without secrets."""
    files: dict[str, str | None]
    """The model's files, as `ModelFiles.to_plain` gives them."""
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    cache_bytes: int
    device: str
    dtype: str

    def config(self, **changes: Any) -> EngineConfig:
        """The recorded configuration with a cache of the recorded size, and some settings changed."""
        return EngineConfig(**(self.settings | {"kv_cache_memory_bytes": self.cache_bytes, "record": None} | changes))


class RecordingExecutor:
    """An executor that records the plans, masks and results of another one."""

    def __init__(self, executor: Executor, config: EngineConfig, files: ModelFiles, **shape: Any) -> None:
        """`shape`: the fields of `RecordingHeader` that are known once the engine has started."""
        assert config.record is not None
        context = child_context(config, files)
        settings = {name: value for name, value in context["settings"].items() if name not in _SECRETS}
        self._inner = executor
        self._file = _create(config.record)
        self._write(b"", msgspec.msgpack.encode(RecordingHeader(VERSION, settings, context["files"], **shape)))

    def _write(self, kind: bytes, data: bytes) -> None:
        self._file.write(frame(kind + data))

    def submit(self, plan: StepPlan) -> Any:
        self._write(b"P", encode(plan))
        self._file.flush()  # before the step runs: if it crashes the process, its plan is the one to look at
        return self._inner.submit(plan)

    def supply(self, handle: Any, masks: StepMasks) -> None:
        self._write(b"M", encode(masks))
        self._inner.supply(handle, masks)

    def collect(self, handle: Any) -> StepResult:
        result = self._inner.collect(handle)
        self._write(b"R", encode(result))
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()
        self._file.close()

    @property
    def balance(self) -> ExpertBalance | None:
        return self._inner.balance

    @property
    def lockstep(self) -> Lockstep | None:
        return self._inner.lockstep

    def expert_counts(self) -> Mapping[int, Sequence[int]]:
        return self._inner.expert_counts()

    def memory_use(self) -> MemoryUse | None:
        return self._inner.memory_use()

    def rebalance_experts(self) -> Rebalanced | None:
        return self._inner.rebalance_experts()

    def check(self) -> float | None:
        return self._inner.check()

    def give_up(self, message: str) -> None:
        self._inner.give_up(message)


class Recording:
    """A recorded run, read from its file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.header = msgspec.msgpack.decode(next(self._frames()), type=RecordingHeader)
        except OSError as error:
            raise ConfigError(f"cannot read the recording {self.path}: {error.strerror}", "recording", path) from error
        except (StopIteration, ValueError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{self.path} is not a recording made with --record", "recording", path) from error
        if self.header.version != VERSION:
            raise ConfigError(
                f"{self.path} is a recording of version {self.header.version}, this quire reads version {VERSION}: "
                "record the run again",
                "recording",
                path,
            )

    def _frames(self) -> Iterator[bytes]:
        """Whole frames; what was being written when the process ended is left out."""
        frames = FrameSplitter()
        with self.path.open("rb") as file:
            while data := file.read(_READ_BYTES):
                yield from frames.feed(data)

    def messages(self) -> Iterator[RecordedMessage]:
        """Plans, masks and results, in the order in which they were recorded."""
        frames = self._frames()
        next(frames)
        for data in frames:
            yield _DECODERS[data[:1]](data[1:])

    def plans(self) -> Iterator[StepPlan]:
        return (message for message in self.messages() if isinstance(message, StepPlan))


@dataclasses.dataclass
class Divergence:
    """A sampled token that is not the recorded one."""

    step: int
    row: int
    request: str
    recorded: int
    sampled: int


class Comparison:
    """Compares results with recorded ones. A request that has diverged once is not compared again."""

    def __init__(self) -> None:
        self.compared = 0
        self.divergences: list[Divergence] = []
        self._requests: dict[int, str] = {}
        self._diverged: set[int] = set()
        self._rows: dict[int, list[int]] = {}

    def note(self, plan: StepPlan) -> None:
        """Remember which request each row of the plan belongs to, and which rows it samples for."""
        if plan.reset:
            self._requests.clear()
        for new in plan.add:
            self._requests[new.row] = new.request
            self._diverged.discard(new.row)
        for fork in (*plan.branches, *plan.forks):
            self._requests[fork.row] = fork.request
            if fork.source in self._diverged:
                self._diverged.add(fork.row)
            else:
                self._diverged.discard(fork.row)
        self._rows[plan.step] = plan.sample_rows.tolist()

    def compare(self, recorded: StepResult, sampled: StepResult) -> None:
        """Count the sampled tokens of a step, and note the first difference of each request."""
        rows = self._rows.pop(recorded.step)
        at = 0
        for row, count in zip(rows, recorded.counts.tolist(), strict=True):
            old_tokens, new_tokens = recorded.tokens[at : at + count], sampled.tokens[at : at + count]
            at += count
            if row in self._diverged:
                continue
            for old, new in zip(old_tokens.tolist(), new_tokens.tolist(), strict=True):
                self.compared += 1
                if old != new:
                    self._diverged.add(row)
                    self.divergences.append(Divergence(recorded.step, row, self._requests.get(row, "?"), old, new))
                    break


def _create(path: str) -> IO[bytes]:
    """The new file. A recording that is there is kept as `PATH.old`: a restarted engine must not overwrite the run that
    ended the last one. It holds the prompts' tokens: other users may not read it."""
    file = Path(path)
    try:
        if file.is_file():
            file.replace(file.with_name(file.name + ".old"))
        return os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb")
    except OSError as error:
        raise ConfigError(f"cannot write the recording {path}: {error.strerror}", "record", path) from error
