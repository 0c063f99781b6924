"""Memory peaks near the model's size while loading, in every format. Measured in a separate process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

PROGRAM = r"""
import re, sys, torch
from pathlib import Path
from quire.loading import gguf, readers, torch_bin
from quire.loading.files import local_files
from quire.loading.load import load_weights, open_checkpoint
from quire.loading.weights import Target
limit = 32 << 20  # Scaled down with the model: pages are released as often, in proportion, as with a large one.
for module in (gguf, torch_bin):
    module.REOPEN_AFTER = limit
readers.LARGE_ROWS_BYTES, readers.SLOT_BYTES, readers.PIECE_BYTES = limit, 1 << 20, 1 << 20
def status(key):
    return int(re.search(key + r":\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
checkpoint = open_checkpoint(local_files("m", Path(sys.argv[1])))
Path("/proc/self/clear_refs").write_text("5")  # Reset the peak, which was that of importing torch.
before = status("VmRSS")
arrange = torch.t if "turned" in sys.argv else None
def place(shape):
    return torch.empty(shape[::-1] if arrange else shape, dtype=torch.float32)
targets = {w.name: [Target(place(w.shape), w.shape, (), arrange)] for w in checkpoint}
load_weights(targets, lambda name: False, checkpoint)
print(sum(t[0].into.nbytes for t in targets.values()) // 1024, status("VmHWM") - before)
"""


def peak_of(path: Path, *how: str) -> tuple[float, float]:
    """MiB of the model, and MiB by which loading it raised the process's peak."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), *how], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    size, peak = map(int, done.stdout.split())
    return size / 1024, peak / 1024


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_a_folders_load_peaks_near_the_models_size(tmp_path: Path, kind: str) -> None:
    tensors = {f"layer.{n}.weight": torch.ones(1024, 2048) for n in range(20)}  # 160 MiB
    if kind == "safetensors":
        save_file(tensors, tmp_path / "model.safetensors")
    else:
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    del tensors
    size, peak = peak_of(tmp_path)
    assert peak < 1.3 * size + 32, f"{peak:.0f} MiB for a model of {size:.0f} MiB"


@pytest.mark.parametrize("how", ["turned", "halves"])
def test_converted_or_arranged_tensors_are_never_all_in_memory(tmp_path: Path, how: str) -> None:
    """Such tensors pass through buffers, whose total size is limited over all threads."""
    dtype = torch.bfloat16 if how == "halves" else torch.float32
    save_file({f"{n}": torch.ones(1024, 2048, dtype=dtype) for n in range(20)}, tmp_path / "model.safetensors")
    size, peak = peak_of(tmp_path, how)
    assert peak < 1.3 * size + 32, f"{peak:.0f} MiB for a model of {size:.0f} MiB"


def test_the_default_models_load_peaks_near_its_size(default_model: Path) -> None:
    size, peak = peak_of(default_model)
    assert peak < 1.3 * size + 32, f"{peak:.0f} MiB for a model of {size:.0f} MiB"
