"""Prefix groups (rows whose first blocks are the same) in device memory at a fixed address, for captured graphs."""

from __future__ import annotations

import numpy as np
import torch

from quire.layers.attention.base import GroupInputs
from quire.messages.plan import PrefixGroup


class DeviceGroups:
    """The current prefix groups, in one fixed buffer. A change is one small copy out of pinned memory."""

    def __init__(self, max_rows: int, device: torch.device, in_flight: int) -> None:
        """`in_flight`: plans whose copies may still be running when the next plan comes."""
        self.exist = False
        self._sizes = [max_rows + 1, max_rows, max_rows // 2 + 1]
        total = sum(self._sizes)
        self._device_ints = torch.zeros(total, dtype=torch.int32, device=device)
        self._host_ints = torch.zeros(in_flight, total, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._next = 0
        self.inputs = GroupInputs(*self._device_ints.split(self._sizes))

    def apply(self, groups: list[PrefixGroup]) -> None:
        """Replace the groups."""
        self.exist = bool(groups)
        self._next = (self._next + 1) % len(self._host_ints)
        ints = self._host_ints[self._next]
        shared, members, starts = np.split(ints.numpy(), np.cumsum(self._sizes[:-1]))
        shared.fill(0)
        end = 0
        for i, group in enumerate(groups):
            shared[group.rows] = group.shared_tokens
            starts[i] = end
            members[end : end + len(group.rows)] = group.rows
            end += len(group.rows)
        starts[len(groups) :] = end
        self._device_ints.copy_(ints, non_blocking=True)
