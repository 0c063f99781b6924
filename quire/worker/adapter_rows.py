"""Which adapter slot each row of the batch has, and each token of a step. The host knows all of it."""

from __future__ import annotations

import numpy as np
import torch

from quire.adapters.device import DeviceAdapters
from quire.kernels.adapters import NO_SLOT, SlotTokens
from quire.messages.plan import StepPlan


class AdapterRows:
    """The slots of rows, by differences of plans; and of the tokens of the step that runs."""

    def __init__(self, slots: DeviceAdapters, max_rows: int, max_tokens: int, is_captured: bool = False) -> None:
        """`is_captured`: steps may be CUDA graphs, which find the slots of tokens in a buffer."""
        self.slots = slots
        self.tokens: SlotTokens | None = None
        """Of the step that is launched; None: none of its rows has an adapter."""
        self.is_active = False
        """Whether the step that is being launched has rows with adapters."""
        self._rows = np.full(max_rows + 1, NO_SLOT, np.int32)  # the last one is the padding row
        self._starts = np.zeros(max_rows + 1, np.int64)
        self._computed = np.zeros(max_rows + 1, np.int64)
        """Of rows whose adapter does not act from the first token on: tokens computed so far of the prompt."""
        self._device = slots.space.device
        self._is_captured = is_captured
        self._uploaded = np.empty(0, np.int32)
        """What the buffer holds, without the rest, which is NO_SLOT."""
        # Graphs have its address in them: steps are padded, perhaps beyond what they were planned with.
        self.buffer = torch.full((max_tokens + 2 * max_rows + 512,), NO_SLOT, dtype=torch.int32, device=self._device)

    def begin(self, plan: StepPlan) -> None:
        """Apply the plan's changes of rows, and see whether rows of the step have adapters."""
        self.leave()  # a step before this one may have failed
        if plan.reset:
            self._rows.fill(NO_SLOT)
        rows = self._rows
        for fork in plan.branches:
            rows[fork.row], self._starts[fork.row] = rows[fork.source], self._starts[fork.source]
        for row in plan.drop:
            rows[row] = NO_SLOT
        for new in plan.add:
            rows[new.row], self._starts[new.row] = new.adapter, new.adapter_start
            self._computed[new.row] = new.num_computed
        for fork in plan.forks:
            rows[fork.row], self._starts[fork.row] = rows[fork.source], self._starts[fork.source]
        self.tokens = None
        self.is_active = len(plan.rows) > 0 and bool(rows[plan.rows].max() != NO_SLOT)

    def present(self, plan: StepPlan) -> list[int]:
        """The slots of the step's rows."""
        return [slot for slot in np.unique(self._rows[plan.rows]).tolist() if slot != NO_SLOT]

    def is_special(self, plan: StepPlan) -> bool:
        """Whether the step has a row whose adapter changes more than matrices: it cannot be captured."""
        return not self.slots.special.isdisjoint(self.present(plan))

    def lay_out(self, plan: StepPlan) -> None:
        """Find the slot of each token of a step, padded or not."""
        of_rows = self._rows[plan.rows]
        slots = np.repeat(of_rows, plan.counts)
        late = np.flatnonzero(self._starts[plan.rows[plan.num_decodes :]]) + plan.num_decodes
        if len(late):  # decodes are behind the invocation, which is in the prompt
            ends = np.cumsum(plan.counts)
            for index in late.tolist():
                row, count = plan.rows[index], int(plan.counts[index])
                before = int(np.clip(self._starts[row] - self._computed[row], 0, count))
                slots[ends[index] - count : ends[index] - count + before] = NO_SLOT
                self._computed[row] += count
        found = self._upload(slots) if self._is_captured else torch.from_numpy(slots)
        self.tokens = SlotTokens(found, self.present(plan))

    def _upload(self, slots: np.ndarray) -> torch.Tensor:
        """The slots in the buffer that graphs read; behind them no token has one. Decodes mostly have the same slots as
        the step before."""
        count = max(len(slots), len(self._uploaded))
        padded = np.full(count, NO_SLOT, np.int32)
        padded[: len(slots)] = slots
        if not np.array_equal(padded, self._uploaded):
            packed = torch.from_numpy(padded)
            packed = packed.pin_memory() if self._device.type == "cuda" else packed
            self.buffer[:count].copy_(packed, non_blocking=True)
            self._uploaded = slots.copy()
        return self.buffer[: len(slots)]

    def own_buffer(self) -> torch.Tensor | None:
        """The slots of the step's tokens in memory that later steps do not use, for a pass that is recorded."""
        if self.tokens is None:
            return None
        self.tokens = SlotTokens(self.tokens.slots.clone(), self.tokens.present)
        return self.tokens.slots

    def use_buffer(self, tokens: int) -> None:
        """A pass over the first `tokens` tokens of the step's buffer is captured; 0: one without adapters."""
        present = () if self.tokens is None else self.tokens.present
        self.tokens = SlotTokens(self.buffer[:tokens], present) if tokens else None

    def enter(self) -> None:
        """The next pass computes the step's tokens."""
        self.slots.scope.tokens = self.tokens

    def enter_rows(self, rows: np.ndarray) -> None:
        """The next pass computes a token of each of these rows, for the step that was laid out."""
        if self.tokens is not None:
            slots = torch.from_numpy(self._rows[rows]).to(self._device, non_blocking=True)
            self.slots.scope.tokens = SlotTokens(slots, self.tokens.present)

    def leave(self) -> None:
        """The next passes compute without adapters."""
        self.slots.scope.tokens = None
