"""Parallel reading: the same tensors as one at a time, with any slices, arrangement and conversion; errors; Ctrl-C."""

from __future__ import annotations

import json
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.errors import CheckpointError
from quire.loading import load, readers
from quire.loading.files import local_files
from quire.loading.load import load_weights, open_checkpoint
from quire.loading.weights import Checkpoint, StoredWeight, Target

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else ["cpu"]
STORED = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8)
Arrange = Callable[[torch.Tensor], torch.Tensor]


def never(name: str) -> bool:
    return False


@pytest.fixture
def tiny_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split tensors of a few hundred bytes into pieces, as large ones are."""
    monkeypatch.setattr(readers, "PIECE_BYTES", 256)
    monkeypatch.setattr(readers, "SLOT_BYTES", 96)
    monkeypatch.setattr(readers, "LARGE_ROWS_BYTES", 1024)


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(local_files("m", folder))


def save(folder: Path, tensors: dict[str, torch.Tensor], files: int = 3) -> None:
    """Save into several files, without an index."""
    names = list(tensors)
    for number in range(files):
        part = {name: tensors[name].contiguous() for name in names[number::files]}
        save_file(part, folder / f"part{number}.safetensors")


class OneAtATime:
    """A weight without `stored`, which can be read only with `StoredWeight.read`."""

    def __init__(self, weight: StoredWeight) -> None:
        self.name, self.shape, self.read = weight.name, weight.shape, weight.read


class Case:
    """A random tensor, and random targets that take parts of it."""

    def __init__(self, rng: random.Random, device: str) -> None:
        self.rng, self.device = rng, device
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        shape = tuple(rng.choice((1, 2, 7, 16, 33)) for _ in range(rng.choice((0, 1, 2, 2, 2, 3))))
        self.tensor = (torch.randn(shape, generator=generator) * 50).to(rng.choice(STORED))
        self.targets = [self.target() for _ in range(rng.choice((1, 1, 2, 4)))]

    def target(self) -> Target:
        keep = tuple(self.slice(size) for size in self.tensor.shape[: self.rng.randint(0, self.tensor.dim())])
        part = self.tensor[keep]
        choices: list[Arrange | None] = [None, None, torch.ravel, lambda x: x.flip(-1) if x.dim() else x]
        if part.dim() == 2:
            choices += [torch.t, torch.t]
        arrange = self.rng.choice(choices)
        shape = (arrange(part) if arrange else part).shape
        others = (torch.float32, torch.bfloat16) if self.tensor.is_floating_point() else ()
        dtype = self.rng.choice((self.tensor.dtype, *others))
        return Target(self.place(shape, dtype), tuple(self.tensor.shape), keep, arrange)

    def slice(self, size: int) -> slice:
        first = self.rng.randint(0, size)
        kept = slice(first, self.rng.randint(first, size))
        return self.rng.choice((slice(None), kept, kept, kept, slice(first, None, 2), slice(-size, None)))

    def place(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Its own memory, or a part of a larger parameter, contiguous or not."""
        around = [size + self.rng.choice((0, 0, 3)) for size in shape]
        memory = torch.full(around, 77, dtype=dtype, device=self.device)
        return memory[tuple(slice(size) for size in shape)]

    def expected(self, target: Target) -> torch.Tensor:
        part = self.tensor[target.keep]
        return (target.arrange(part) if target.arrange else part).to(self.device).to(target.into.dtype)


@pytest.mark.usefixtures("tiny_pieces")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(25))
def test_random_checkpoints_load_as_they_do_one_tensor_at_a_time(tmp_path: Path, seed: int, device: str) -> None:
    rng = random.Random(seed)
    cases = {f"tensor.{n}": Case(rng, device) for n in range(30)}
    save(tmp_path, {name: case.tensor for name, case in cases.items()})
    targets = {name: case.targets for name, case in cases.items()}

    def after(checkpoint: object) -> list[torch.Tensor]:
        for each in targets.values():
            for target in each:
                target.into.fill_(77)
        load_weights(targets, never, checkpoint)  # type: ignore[arg-type]
        return [target.into.clone() for each in targets.values() for target in each]

    together = after(opened(tmp_path))
    alone = after([OneAtATime(weight) for weight in opened(tmp_path)])
    expected = [case.expected(target) for case in cases.values() for target in case.targets]
    for parallel, single, wanted in zip(together, alone, expected, strict=True):
        assert torch.equal(parallel, wanted)
        assert torch.equal(single, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_of_many_pieces_of_real_size_load(tmp_path: Path, device: str) -> None:
    tensors = {name: torch.randn(5000, 3000).bfloat16() for name in "abc"}  # 30 MB each
    save(tmp_path, tensors)
    shape = (5000, 3000)
    whole = Target(torch.zeros(shape, dtype=torch.bfloat16, device=device), shape)
    columns = Target(torch.zeros(5000, 1000, device=device), shape, (slice(None), slice(1000, 2000)))
    turned = Target(torch.zeros(3000, 2000, dtype=torch.bfloat16, device=device), shape, (slice(3000, 5000),), torch.t)
    load_weights({"a": [whole], "b": [columns], "c": [turned]}, never, opened(tmp_path))
    assert torch.equal(whole.into.cpu(), tensors["a"])
    assert torch.equal(columns.into.cpu(), tensors["b"][:, 1000:2000].float())
    assert torch.equal(turned.into.cpu(), tensors["c"][3000:].t())


def test_every_dtype_of_the_format_is_read(tmp_path: Path) -> None:
    dtypes = (
        *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64),
        *(torch.int64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32),
        *(torch.float64, torch.complex64),
    )
    tensors = {str(dtype): torch.arange(24).reshape(4, 6).to(dtype) for dtype in dtypes}
    save(tmp_path, tensors)
    targets = {name: [Target(torch.empty_like(tensor), (4, 6))] for name, tensor in tensors.items()}
    load_weights(targets, never, opened(tmp_path))
    for name, tensor in tensors.items():
        assert targets[name][0].into.view(torch.uint8).equal(tensor.view(torch.uint8)), name


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_codes_are_not_converted_to_a_plain_weight(dtype: torch.dtype, kind: str, tmp_path: Path) -> None:
    tensors = {"layers.0.up.weight": torch.ones(4, 6).to(dtype), "norm.weight": torch.ones(4)}
    if kind == "safetensors":
        save(tmp_path, tensors, 1)
    else:
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    wanted = {name: [Target(torch.empty(tensor.shape), tuple(tensor.shape))] for name, tensor in tensors.items()}
    name = str(dtype).removeprefix("torch.")
    said = rf"1 tensor of another type than config\.json says:\n  - layers\.0\.up\.weight: {name} in the checkpoint"
    with pytest.raises(CheckpointError, match=said):
        load_weights(wanted, never, opened(tmp_path))


def test_a_dtype_that_torch_lacks_is_an_error_when_it_is_read(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0")
    load_weights({}, lambda name: True, opened(tmp_path))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the tensor 'w' cannot be read: its dtype F4"):
        load_weights({"w": [Target(torch.empty(4), (4,))]}, never, opened(tmp_path))


def test_a_file_that_shrinks_or_disappears_after_its_header_was_read_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.ones(100, 100)}, files=1)
    path = tmp_path / "part0.safetensors"
    checkpoint = opened(tmp_path)
    path.write_bytes(path.read_bytes()[:-1000])
    targets = {"w": [Target(torch.empty(100, 100), (100, 100))]}
    with pytest.raises(CheckpointError, match=r"part0.* the tensor 'w' cannot be read: the file ends 1000 bytes too"):
        load_weights(targets, never, checkpoint)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"part0.* the tensor 'w' cannot be read: .*No such file"):
        load_weights(targets, never, checkpoint)


@pytest.mark.parametrize("arrange", [None, torch.t])
def test_a_part_that_does_not_fit_its_target_is_an_error(tmp_path: Path, arrange: Arrange | None) -> None:
    save(tmp_path, {"w": torch.ones(4, 6)}, files=1)
    target = Target(torch.empty(5, 5), (4, 6), (slice(0, 3),), arrange)
    shape = r"\(3, 6\)" if arrange is None else r"\(6, 3\)"
    with pytest.raises(CheckpointError, match=rf"kept part of 'w' has shape {shape}, its target \(5, 5\)"):
        load_weights({"w": [target]}, never, opened(tmp_path))


def test_the_first_error_stops_the_other_threads(tmp_path: Path) -> None:
    names = [f"{number:03}" for number in range(200)]
    save(tmp_path, {name: torch.ones(4, 4) for name in names}, files=1)
    begun = []

    def slow(part: torch.Tensor) -> torch.Tensor:
        begun.append(part)
        time.sleep(0.02)
        return part

    def broken(part: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        raise ZeroDivisionError("on purpose")

    targets = {name: [Target(torch.empty(4, 4), (4, 4), (), slow)] for name in names}
    targets[names[10]] = [Target(torch.empty(4, 4), (4, 4), (), broken)]
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        load_weights(targets, never, opened(tmp_path))
    assert len(begun) < 100
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("load")]


INTERRUPTED = r"""
import os, sys, time, torch
from pathlib import Path
from quire.loading.files import local_files
from quire.loading.load import load_weights, open_checkpoint
from quire.loading.weights import Target
def slow(part):
    os.write(1, b"reading\n")  # one write: lines of threads do not mix
    time.sleep(0.1)
    return part
checkpoint = open_checkpoint(local_files("m", Path(sys.argv[1])))
targets = {w.name: [Target(torch.empty(4, 4), (4, 4), (), slow)] for w in checkpoint}
load_weights(targets, lambda name: False, checkpoint)
"""


def test_ctrl_c_ends_a_load(tmp_path: Path) -> None:
    save(tmp_path, {f"{number}": torch.ones(4, 4) for number in range(3000)}, files=1)
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        out, told = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in told
    assert out.count("reading") < 300, "the whole load takes at least 20 s"
    assert time.monotonic() - begin < 15


@pytest.mark.usefixtures("tiny_pieces")
@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_progress_counts_every_byte_once(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, totals = [], []

    @contextmanager
    def bar(label: str, total: int, progress: bool) -> Iterator[Callable[[int], None]]:
        totals.append(total)
        yield shown.append

    monkeypatch.setattr(load, "bytes_bar", bar)
    tensors = {name: torch.randn(40, 30) for name in "abc"}
    if kind == "pt":
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    else:
        save(tmp_path, tensors)
    both = [Target(torch.empty(40, 30), (40, 30)), Target(torch.empty(30, 40), (40, 30), (), torch.t)]
    half = Target(torch.empty(40, 15, dtype=torch.bfloat16), (40, 30), (slice(None), slice(15)))
    load_weights({"a": both, "b": [half]}, lambda name: name == "c", opened(tmp_path))
    assert totals == [2 * 4800 + 1200]
    assert shown == sorted(shown) and shown[-1] == totals[0]
    assert len(shown) > 20 if kind == "safetensors" else len(shown) == 3
