"""The device-resident batch: one row per running request, changed by differences, never rebuilt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from quire.layers.attention.base import AttentionInputs, LastTokens
from quire.messages.plan import Fork, NewRow, StepPlan
from quire.messages.sampling import SCALARS
from quire.worker.extras import RowExtras, RowKind, ScalarColumns, pack_scalars
from quire.worker.kv import KVCache


class Upload:
    """Several small integer arrays in one transfer: packed on the host, split again on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"

    def __call__(self, *arrays: Sequence[int] | np.ndarray) -> list[torch.Tensor]:
        parts = [np.asarray(array, dtype=np.int64) for array in arrays]
        packed = torch.from_numpy(np.concatenate(parts))
        if self._pinned:
            packed = packed.pin_memory()
        return list(packed.to(self._device, non_blocking=True).split([len(part) for part in parts]))


@dataclass
class StepInputs:
    """A step as the model sees it, on the device."""

    tokens: torch.Tensor
    positions: torch.Tensor
    attention: tuple[AttentionInputs, ...]
    """One for each cache group, each other's `siblings`: its block tables and slots. A model is given the first."""
    hidden: torch.Tensor | None = None
    """Hidden states from the previous pipeline stage; None on the first."""
    slots: torch.Tensor | None = None
    """[cache groups, tokens]: the slots of all groups, where they are one tensor."""


def as_siblings(groups: Sequence[AttentionInputs]) -> tuple[AttentionInputs, ...]:
    """A step as each cache group sees it, told to each of them."""
    found = tuple(groups)
    for inputs in found:
        inputs.siblings = found if len(found) > 1 else ()
    return found


class StepDraws(Protocol):
    """The tokens a step drew, being copied to the host."""

    def ready(self) -> bool:
        """Whether the step is done."""
        ...

    def wait(self) -> list[np.ndarray]:
        """Tokens, whether each was a stop id, and whether the row's logits were NaN or all infinite."""
        ...


class HostDraws:
    """The tokens a step drew, already in host memory."""

    def __init__(self, tokens: torch.Tensor, stopped: torch.Tensor, invalid: torch.Tensor) -> None:
        self._tensors = (tokens, stopped, invalid)

    def ready(self) -> bool:
        return True

    def wait(self) -> list[np.ndarray]:
        return [tensor.cpu().numpy() for tensor in self._tensors]


class DeviceBatch:
    """Columns on the device, indexed by row. The host keeps what it needs to choose a path (`kinds`, `extras`)."""

    def __init__(
        self, max_rows: int, max_tokens_per_row: int, vocab_size: int, kv: KVCache, device: torch.device
    ) -> None:
        self.kv = kv
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self._device = device
        self.upload = Upload(device)
        self._next_step = 0
        self.is_broken = False
        """A step failed: its plan may have been applied in part."""
        self.previous_hidden: torch.Tensor | None = None
        """Buffer of the previous pipeline stage's hidden states; None on the first."""
        self._drawn: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._picks = self._draw_rows = torch.empty(0)

        def column(dtype: torch.dtype, *width: int) -> torch.Tensor:
            # One row more than requests can have: it is never active, and fills up steps that are padded.
            return torch.zeros(max_rows + 1, *width, dtype=dtype, device=device)

        self.last_token = column(torch.int64)
        self.num_tokens = column(torch.int64)
        self.num_computed = column(torch.int64)
        self.prompt_len = column(torch.int64)
        self.limit = column(torch.int64)
        self.active = column(torch.bool)
        blocks = max_tokens_per_row // kv.block_size + 1
        self.cache_groups = groups = kv.geometry.groups
        width = max(group.pages or blocks for group in groups)
        width = -(-width // 16) * 16  # rows of tables on 64-byte lines
        self.block_tables = torch.zeros(len(groups), max_rows + 1, width, dtype=torch.int32, device=device)
        """[cache groups, rows, blocks]: the block tables of each group."""
        self.block_table = self.block_tables[0]
        """Those of the first group: with token ids, if it keeps every token."""
        self.token_ids = column(torch.int32, 0 if kv.has_tokens else max_tokens_per_row + 1)
        """[rows, tokens] if no group keeps every token, so that the token ids cannot be in its pages."""
        self.seed = column(torch.int64)
        self.sequence = column(torch.int64)
        self.scalars = column(torch.int32, len(SCALARS))
        """Scalar sampling parameters, in the order of `SCALARS`; floats by their bits (`ScalarColumns` reads them)."""
        self.stop_ids = column(torch.int64, 1)
        # Host side: what kind of work each row's sampling is, and the parameters that are lists.
        self.kinds = np.zeros(max_rows, np.int32)
        self.extras: dict[int, RowExtras] = {}

    def apply(self, plan: StepPlan, padded_rows: int = 0) -> None:
        """Apply the plan's changes to the rows; `padded_rows`: rows of the step if it is padded, else 0."""
        self._begin(plan)
        last = np.cumsum(plan.counts)[plan.samples] - 1
        drop, block_rows, block_indices, blocks, self._picks, self._draw_rows = self.upload(
            plan.drop, self._table_rows(plan), plan.block_indices, plan.blocks, last, plan.sample_rows
        )
        if len(drop):
            self.active[drop] = False
        self._add(plan.add)
        if len(blocks):
            self.block_tables.flatten(0, 1)[block_rows, block_indices] = blocks.to(torch.int32)
        self.kv.copy(plan.copies)

    def _table_rows(self, plan: StepPlan) -> np.ndarray:
        """Rows of the tables of all groups, one group's after another's, that the plan changes."""
        if not len(plan.block_groups):
            return plan.block_rows
        return plan.block_rows + plan.block_groups * np.int32(self.block_tables.shape[1])

    def _begin(self, plan: StepPlan) -> None:
        """Check that no plan is missing, which would leave rows wrong without an error."""
        if plan.reset:
            self.active.zero_()
            self.extras.clear()
            self.is_broken = False
        elif self.is_broken:
            raise RuntimeError(f"a step before plan {plan.step} failed: only a reset can follow")
        elif plan.step != self._next_step:
            raise RuntimeError(f"got plan {plan.step}, expected plan {self._next_step}")
        self._next_step = plan.step + 1
        self._drawn = []
        self.fork(plan.branches)  # before drops: a source may be dropped in this plan
        if plan.forced:
            rows, tokens = self.upload(*zip(*plan.forced, strict=True))
            self.last_token[rows] = tokens
        for row in plan.drop:
            self.extras.pop(row, None)

    def _add(self, added: list[NewRow]) -> None:
        if not added:
            return
        rows, num_tokens, num_computed, prompt_len, limit, seed, sequence, scalars = self.upload(
            [new.row for new in added],
            [new.num_tokens for new in added],
            [new.num_computed for new in added],
            [new.prompt_len for new in added],
            [new.limit for new in added],
            np.array([new.seed & (2**64 - 1) for new in added], np.uint64).view(np.int64),
            [new.sequence for new in added],
            pack_scalars([new.params for new in added]).reshape(-1),
        )
        self.num_tokens[rows] = num_tokens
        self.num_computed[rows] = num_computed
        self.prompt_len[rows] = prompt_len
        self.limit[rows] = limit
        self.seed[rows] = seed
        self.sequence[rows] = sequence
        self.scalars[rows] = scalars.view(len(added), -1).to(torch.int32)
        self.active[rows] = True
        self._set_stop_ids(rows, [new.stop_ids for new in added])
        self._add_token_ids(added)
        for new in added:
            self._remember(new)

    def _add_token_ids(self, added: list[NewRow]) -> None:
        """Token ids that new rows have computed already, if ids are kept by row."""
        added = [] if self.kv.has_tokens else [new for new in added if len(new.computed)]
        if not added:
            return
        lengths = [len(new.computed) for new in added]
        rows = np.repeat([new.row for new in added], lengths)
        columns = np.concatenate([np.arange(length) for length in lengths])
        places, positions, ids = self.upload(rows, columns, np.concatenate([new.computed for new in added]))
        self.token_ids[places, positions] = ids.to(torch.int32)

    def scalars_of(self, rows: torch.Tensor) -> ScalarColumns:
        """The scalar sampling parameters of these rows, by name."""
        return ScalarColumns(self.scalars[rows])

    def _set_stop_ids(self, rows: torch.Tensor, lists: list[list[int]]) -> None:
        width = max(map(len, lists))
        self._widen_stop_ids(width)
        padded = [ids + [-1] * (self.stop_ids.shape[1] - len(ids)) for ids in lists]
        self.stop_ids[rows] = torch.tensor(padded).to(self._device, non_blocking=True)

    def _widen_stop_ids(self, width: int) -> None:
        """Make room for `width` stop ids per row; a wider column is a new tensor."""
        if width > self.stop_ids.shape[1]:
            self.stop_ids = torch.nn.functional.pad(self.stop_ids, (0, width - self.stop_ids.shape[1]), value=-1)

    def _remember(self, new: NewRow) -> None:
        """Keep what the host needs of a row."""
        self.kinds[new.row] = RowKind.of(new)
        self.extras[new.row] = RowExtras(new, self.upload)

    def inputs(self, plan: StepPlan) -> StepInputs:
        """Token ids, positions, cache slots and query offsets of the step, computed from the rows it schedules."""
        rows, counts, fresh = self.upload(plan.rows, plan.counts, plan.tokens)
        total = plan.num_tokens
        starts = self.num_computed[rows]
        ends = counts.cumsum(0)
        if total == len(plan.rows):
            positions, owners = starts, rows
        else:
            # Token t of the step is the (t - first token of its row)-th of its row's chunk.
            offsets = torch.repeat_interleave(starts - (ends - counts), counts, output_size=total)
            positions = torch.arange(total, device=self._device) + offsets
            owners = torch.repeat_interleave(rows, counts, output_size=total)
        tokens = torch.cat([self.last_token[rows[: plan.num_decodes]], fresh])
        is_active = self.active[owners]
        slots = [self._slots(table, owners, positions, is_active) for table in self._slot_tables()]
        if self.kv.has_tokens:
            self.kv.tokens.view(-1)[slots[0]] = tokens.to(torch.int32)
        else:
            columns = positions.clamp(max=self.token_ids.shape[1] - 1)
            self.token_ids[torch.where(is_active, owners, self.max_rows), columns] = tokens.to(torch.int32)
        context = starts + counts
        self.num_computed[rows] = context
        step = AttentionInputs(
            slots=slots[0],
            query_starts=torch.nn.functional.pad(ends, (1, 0)).to(torch.int32),
            context_lens=context.to(torch.int32),
            block_tables=self._tables_of(0, rows, plan.max_context),
            num_rows=len(plan.rows),
            num_tokens=total,
            num_decodes=plan.num_decodes,
            max_query_len=int(plan.counts.max()),
            max_context_len=plan.max_context,
        )
        groups = [step]
        for group in range(1, len(self.block_tables)):
            tables = self._tables_of(group, rows, plan.max_context)
            groups.append(replace(step, slots=slots[min(group, len(slots) - 1)], block_tables=tables, plans={}))
        return StepInputs(tokens, positions, as_siblings(groups), self._previous_hidden(total))

    def _slot_tables(self) -> torch.Tensor:
        """Tables of the groups whose blocks hold tokens; of the first if none does: slots then only say which rows are
        active."""
        return self.block_tables[: max(1, self.kv.geometry.num_block_groups)]

    def _slots(
        self, table: torch.Tensor, owners: torch.Tensor, positions: torch.Tensor, is_active: torch.Tensor
    ) -> torch.Tensor:
        size = self.kv.block_size
        columns = (positions // size).clamp(max=table.shape[1] - 1)
        if not self.kv.geometry.num_block_groups:
            columns = torch.zeros_like(columns)  # any page of the state
        # A row that finished on the device, which the host has not seen yet, writes to the null block.
        return torch.where(is_active, table[owners, columns] * size, 0) + positions % size

    def _previous_hidden(self, tokens: int) -> torch.Tensor | None:
        return None if self.previous_hidden is None else self.previous_hidden[:tokens]

    def last_tokens(self, plan: StepPlan, inputs: StepInputs) -> LastTokens:
        """The tokens that are sampled from; any one token if none is."""
        if len(plan.samples):
            tokens, rows = self.picks(plan), self.draw_rows(plan)
        else:
            tokens, rows = self.upload([int(plan.counts[0]) - 1], [int(plan.rows[0])])
        return LastTokens(tokens, self._one_token_each(rows, inputs))

    def captured_last_tokens(self, draws: int, inputs: StepInputs) -> LastTokens:
        """The tokens that the step's first `draws` draws are sampled from, in a captured step."""
        raise NotImplementedError("only a batch whose steps are captured has buffers for draws")

    def _one_token_each(self, rows: torch.Tensor, inputs: StepInputs) -> AttentionInputs:
        """The step as if it had only the last token of each of these rows."""
        step = inputs.attention[0]
        found = AttentionInputs(
            slots=step.slots[:0],
            query_starts=torch.arange(len(rows) + 1, dtype=torch.int32, device=self._device),
            context_lens=self.num_computed[rows].to(torch.int32),
            block_tables=self._tables_of(0, rows, step.max_context_len),
            num_rows=len(rows),
            num_tokens=len(rows),
            num_decodes=len(rows),
            max_query_len=1,
            max_context_len=step.max_context_len,
        )
        others = range(1, len(self.block_tables))
        tables = [self._tables_of(group, rows, step.max_context_len) for group in others]
        return as_siblings([found, *(replace(found, block_tables=table, plans={}) for table in tables)])[0]

    def _tables_of(self, group: int, rows: torch.Tensor, max_context: int) -> torch.Tensor:
        """[rows, blocks]: these rows' tables of a cache group."""
        table, pages = self.block_tables[group], self.cache_groups[group].pages
        if not pages:
            return table[rows, : -(-max_context // self.kv.block_size)]
        # A row that finished on the device must not change its state, which may be kept.
        return table[rows, :pages] * self.active[rows, None]

    def fork(self, forks: list[Fork]) -> None:
        """Make rows copies of their source, each with its own random stream."""
        if not forks:
            return
        sources, rows, sequences = self.upload(
            [fork.source for fork in forks], [fork.row for fork in forks], [fork.sequence for fork in forks]
        )
        for column in (
            self.last_token, self.num_tokens, self.num_computed, self.prompt_len, self.limit, self.active,
            *self.block_tables, self.seed, self.scalars, self.stop_ids, self.token_ids,
        ):  # fmt: skip
            column[rows] = column[sources]
        self.sequence[rows] = sequences
        for fork in forks:
            self.kinds[fork.row] = self.kinds[fork.source]
            self.extras[fork.row] = self.extras[fork.source]

    def picks(self, plan: StepPlan) -> torch.Tensor:
        """For each of the step's draws, the token of the step whose hidden state it is sampled from."""
        return self._picks

    def draw_rows(self, plan: StepPlan) -> torch.Tensor:
        """For each of the step's draws, the row that gets the token."""
        return self._draw_rows

    def mask(self, logits: torch.Tensor, indices: np.ndarray, bits: np.ndarray) -> None:
        """Set the logits of tokens whose bit is not set to -inf in these rows, in place."""
        flags = np.unpackbits(np.invert(bits).view(np.uint8), axis=1, count=logits.shape[-1], bitorder="little")
        nothing = logits.new_full((), float("-inf"))
        for i, banned in zip(indices.tolist(), torch.from_numpy(flags.view(np.bool_)), strict=True):
            torch.where(banned, nothing, logits[i], out=logits[i])  # masked_fill_ is slower: it branches on each flag

    def draw(self, logits: torch.Tensor, rows: torch.Tensor, start: int, filtered: bool) -> bool:
        """Draw and commit in one kernel; False if the device has none. `start`: as in `commit`."""
        return False

    def commit(self, tokens: torch.Tensor, invalid: torch.Tensor, rows: torch.Tensor, start: int) -> None:
        """Write drawn tokens back and deactivate finished rows; `start`: the first token's index among the draws."""
        stopped = (self.stop_ids[rows] == tokens[:, None]).any(-1)
        length = self.num_tokens[rows] + 1
        self.last_token[rows] = tokens
        self.num_tokens[rows] = length
        self.active[rows] &= ~(stopped | (length >= self.limit[rows]))
        self._drawn.append((tokens, stopped, invalid))

    def result(self, draws: int) -> StepDraws:
        """The step's draws; the caller waits for them."""
        if not self._drawn:
            return self.nothing_drawn()
        return HostDraws(*(torch.cat(parts) for parts in zip(*self._drawn, strict=True)))

    def nothing_drawn(self) -> StepDraws:
        """The result of a step without draws."""
        nothing = torch.zeros(0, dtype=torch.int64)
        return HostDraws(nothing, nothing.bool(), nothing.bool())

    def row_tokens(self, rows: torch.Tensor, longest: int) -> torch.Tensor:
        """[len(rows), longest] token ids of the rows; garbage past a row's own length."""
        if not self.kv.has_tokens:
            return self.token_ids[rows, :longest].to(torch.int64)
        size = self.kv.block_size
        width = min(-(-longest // size), self.block_table.shape[1])
        pages = self.kv.tokens[self.block_table[rows, :width]]
        return pages.view(len(rows), -1)[:, :longest].to(torch.int64)

    def tokens_at(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The token ids at these positions of these rows; garbage outside of a row."""
        if not self.kv.has_tokens:
            return self.token_ids[rows, positions.clamp(0, self.token_ids.shape[1] - 1)].to(torch.int64)
        size = self.kv.block_size
        positions = positions.clamp(0, self.block_table.shape[1] * size - 1)
        return self.kv.tokens[self.block_table[rows, positions // size], positions % size].to(torch.int64)
