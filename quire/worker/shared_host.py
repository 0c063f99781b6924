"""Host memory that all ranks of a machine share with the engine: a slot is a block's parts, one after another.

So the engine reads a whole block in one piece, to write it to disk, and each rank sees its part of every slot.
"""

from __future__ import annotations

import os

import torch

from quire.messages.shared_memory import map_shared

_PORTABLE = 1
"""Locked for every context there is, whichever was current."""


def open_part(
    descriptor: int, slots: int, slot_bytes: int, offset: int, part_bytes: int, device: torch.device
) -> torch.Tensor:
    """A rank's part of every slot, [slots, part_bytes], in the file behind an inherited descriptor.

    `slot_bytes`: of all parts together; `offset`: where the part begins; `device`: which copies to it and from it.
    """
    whole = torch.frombuffer(map_shared(os.dup(descriptor)), dtype=torch.uint8)
    if device.type == "cuda":
        with torch.cuda.device(device):
            _pin(whole)
    return whole[: slots * slot_bytes].view(slots, slot_bytes)[:, offset : offset + part_bytes]


def _pin(memory: torch.Tensor) -> None:
    """Lock the pages, so that the device copies by itself. Every rank does that, for its own device."""
    failed = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE)
    if int(failed):
        raise RuntimeError(f"the driver cannot lock {memory.numel() / 2**30:.1f} GiB of shared memory ({failed})")
