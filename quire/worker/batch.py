"""The device-resident batch: one row per running request, changed by differences, never rebuilt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from quire.kernels.philox import uniform
from quire.kernels.states import StateReplay
from quire.layers.attention.base import AttentionInputs, LastTokens
from quire.messages.plan import MAX_WIDTH, Drafts, Fork, NewRow, StepPlan
from quire.messages.sampling import ACCEPT_STREAM, SCALARS
from quire.worker.adapter_rows import AdapterRows
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
    features: torch.Tensor | None = None
    """What a proposer reads of the forward pass: the streams that entered some layers, joined; set once it has run."""


def as_siblings(groups: Sequence[AttentionInputs]) -> tuple[AttentionInputs, ...]:
    """A step as each cache group sees it, told to each of them."""
    found = tuple(groups)
    for inputs in found:
        inputs.siblings = found if len(found) > 1 else ()
    return found


class Drawn(NamedTuple):
    """What a step drew, on the host."""

    tokens: np.ndarray
    """A token for each place."""
    stopped: np.ndarray
    """For each draw: its last token is a stop id."""
    invalid: np.ndarray
    """For each draw: the row's logits were NaN or all infinite."""
    counts: np.ndarray | None = None
    """Tokens each draw yielded; None: one each."""
    drafts: np.ndarray | None = None
    """[draws, MAX_WIDTH - 1]: what was proposed for the next step, and how much of it; None: nothing was…"""
    num_drafts: np.ndarray | None = None


class StepDraws(Protocol):
    """The tokens a step drew, being copied to the host."""

    def ready(self) -> bool:
        """Whether the step is done."""
        ...

    def wait(self) -> Drawn:
        """What it drew; waits until it is done."""
        ...


class HostDraws:
    """The tokens a step drew, already in host memory: the tensors of `Drawn`."""

    def __init__(self, *tensors: torch.Tensor | None) -> None:
        self.tensors = tensors

    def ready(self) -> bool:
        return True

    def wait(self) -> Drawn:
        return Drawn(*(tensor if tensor is None else tensor.cpu().numpy() for tensor in self.tensors))  # type: ignore[arg-type]


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
        self._placed: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Tokens drawn at places of a step that verifies drafts, and whether each is invalid."""
        self._verified: HostDraws | None = None
        self._picks = self._draw_rows = self._sample_rows = torch.empty(0)
        self._offsets: torch.Tensor | None = None
        self.adapters: AdapterRows | None = None
        """The rows' LoRA adapters, if the engine serves any."""
        self.speculates = False
        """Whether rows may have drafts."""
        self.proposer_error: Exception | None = None
        """What the proposer on the device has raised: it is not run again."""
        self.checks_drafts = False
        """Whether drafts may be no tokens of the vocabulary: they come from a class of the user's own."""
        self.synthetic_rates: torch.Tensor | None = None
        """[MAX_WIDTH - 1] float64: for each draft the probability that it is accepted if all before it are, whatever
        the tokens; None: it is accepted if it is the token that was drawn."""
        self.draft_probs: torch.Tensor | None = None
        """[rows + 1, drafts, vocabulary]: the probabilities that drafts were drawn with, if they are accepted by the
        ratio of the target's to these (`rejection_sample_method`)…"""
        self.is_sampled = torch.zeros(max_rows + 1, dtype=torch.bool, device=device)
        """…and whether the row's drafts were drawn with any."""

        def column(dtype: torch.dtype, *width: int) -> torch.Tensor:
            # One row more than requests can have: it is never active, and fills up steps that are padded.
            return torch.zeros(max_rows + 1, *width, dtype=dtype, device=device)

        self.position_delta: torch.Tensor | None = None
        """[rows]: what is added to a token's index to have its position, in models that have three of each."""
        self.last_token = column(torch.int64)
        self.num_tokens = column(torch.int64)
        self.num_computed = column(torch.int64)
        self.prompt_len = column(torch.int64)
        self.limit = column(torch.int64)
        self.active = column(torch.bool)
        blocks = max_tokens_per_row // kv.block_size + 1
        self.cache_groups = groups = kv.geometry.groups
        self._has_states = any(group.pages for group in groups)
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
        self.drafts = column(torch.int32, MAX_WIDTH - 1)
        """Tokens that the row may draw next, the first of them at position `num_tokens`…"""
        self.num_drafts = column(torch.int32)
        """…and how many there are."""
        # Host side: what kind of work each row's sampling is, and the parameters that are lists.
        self.kinds = np.zeros(max_rows, np.int32)
        self.extras: dict[int, RowExtras] = {}

    def speculate(self, rates: Sequence[float] | None = None, sampled: int = 0, checked: bool = False) -> None:
        """Rows may have drafts from now on. `rates`: accept them with these probabilities, to measure speed. `sampled`:
        drafts of a row that are drawn, and accepted by the ratio of both probabilities. `checked`: what the proposer
        on the device makes may be no tokens of the vocabulary."""
        self.speculates = True
        self.checks_drafts = checked
        if rates is not None:
            padded = [*rates, *[0.0] * (MAX_WIDTH - 1 - len(rates))]
            self.synthetic_rates = torch.tensor(padded, dtype=torch.float64, device=self._device)
        if sampled:
            self.draft_probs = torch.zeros(self.max_rows + 1, sampled, self.vocab_size, device=self._device)

    def use_deltas(self) -> None:
        """Positions may differ from indices, and prompts may have three a token (M-RoPE)."""
        self.position_delta = torch.zeros_like(self.num_tokens)

    def _add_deltas(self, added: list[NewRow]) -> None:
        if self.position_delta is not None and added:
            rows, deltas = self.upload([new.row for new in added], [new.position_delta for new in added])
            self.position_delta[rows] = deltas

    def _prompt_positions(self, plan: StepPlan, positions: torch.Tensor) -> torch.Tensor:
        """[3, tokens] if the plan has positions of prompts; else `positions` [tokens]."""
        if self.position_delta is None or not len(plan.positions):
            return positions
        (flat,) = self.upload(plan.positions)
        given = flat.view(3, -1)
        before = len(positions) - given.shape[1]
        prompts = torch.where(given >= 0, given, positions[before:])
        return torch.cat([positions[:before].expand(3, -1), prompts], dim=1)

    def apply(self, plan: StepPlan, padded_rows: int = 0) -> None:
        """Apply the plan's changes to the rows; `padded_rows`: rows of the step if it is padded, else 0."""
        self._begin(plan)
        drop, block_rows, block_indices, blocks, self._picks, self._draw_rows, self._sample_rows = self.upload(
            plan.drop, self._table_rows(plan), plan.block_indices, plan.blocks, plan.picks, plan.place_rows,
            plan.sample_rows if plan.proposals else (),
        )  # fmt: skip
        if len(drop):
            self.active[drop] = False
        self._add(plan.add)
        if len(blocks):
            self.block_tables.flatten(0, 1)[block_rows, block_indices] = blocks.to(torch.int32)
        self.kv.copy(plan.copies)
        self._offsets = self.upload(plan.place_offsets)[0] if plan.num_drafts else None
        if plan.rewound:
            rows, computed = self.upload(*zip(*plan.rewound, strict=True))
            self.num_computed[rows] = computed
        self._place_drafts(plan.drafts)

    def _place_drafts(self, runs: list[Drafts]) -> None:
        """Make runs from the host the rows' drafts, less what the rows have drawn since."""
        if not runs:
            return
        longest = max(len(run.tokens) for run in runs)
        padded = [run.tokens + [0] * (longest - len(run.tokens)) for run in runs]
        rows, starts, lengths, flat = self.upload(
            [run.row for run in runs], [run.start for run in runs], [len(run.tokens) for run in runs], np.ravel(padded)
        )
        # All tokens of a decode but its last are computed. Only the last pipeline stage knows `num_tokens`.
        tokens, last = flat.view(len(runs), longest), self.num_computed[rows, None]
        positions = starts[:, None] + torch.arange(longest, device=self._device)
        drawn = torch.where(positions == last, self.last_token[rows, None], self.tokens_at(rows[:, None], positions))
        differs = ((positions <= last) & (drawn != tokens)).any(-1)
        passed = last[:, 0] + 1 - starts
        left = torch.where(differs, 0, lengths - passed).clamp(0, MAX_WIDTH - 1)
        index = (passed[:, None] + torch.arange(MAX_WIDTH - 1, device=self._device)).clamp(0, longest - 1)
        self.drafts[rows] = tokens.gather(1, index).to(torch.int32)
        self.num_drafts[rows] = left.to(torch.int32)
        self._given_by_host(rows)

    def _given_by_host(self, rows: torch.Tensor) -> None:
        if self.draft_probs is not None:
            self.is_sampled[rows] = False

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
        self._drawn, self._placed, self._verified = [], [], None
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
        self.num_drafts[rows] = 0
        self._set_stop_ids(rows, [new.stop_ids for new in added])
        self._add_token_ids(added)
        self._add_deltas(added)
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
        if plan.num_drafts:
            decoding = total - len(fresh)
            tokens = torch.cat([self._last_and_drafts(owners[:decoding], positions[:decoding]), fresh])
        else:
            tokens = torch.cat([self.last_token[rows[: plan.num_decodes]], fresh])
        is_active = self.active[owners]
        slots = [self._slots(table, owners, positions, is_active) for table in self._slot_tables()]
        if self.kv.has_tokens:
            self.kv.tokens.view(-1)[slots[0]] = tokens.to(torch.int32)
        else:
            columns = positions.clamp(max=self.token_ids.shape[1] - 1)
            self.token_ids[torch.where(is_active, owners, self.max_rows), columns] = tokens.to(torch.int32)
        if self.position_delta is not None:
            moved = (positions + self.position_delta[owners]).clamp(min=0)
            positions = self._prompt_positions(plan, moved)
        context = starts + counts
        self.num_computed[rows] = context
        step = AttentionInputs(
            slots=slots[0],
            query_starts=torch.nn.functional.pad(ends, (1, 0)).to(torch.int32),
            context_lens=context.to(torch.int32),
            block_tables=self._tables_of(0, rows, plan.max_context),
            num_rows=len(plan.rows),
            num_tokens=total,
            num_decodes=0 if plan.num_drafts else plan.num_decodes,
            max_query_len=int(plan.counts.max()),
            max_context_len=plan.max_context,
        )
        if plan.num_drafts:
            step.num_verifying, step.num_verified = plan.num_decodes, plan.num_decodes + plan.num_drafts
            step.width = int(plan.counts[: plan.num_decodes].max())
            step.replay = StateReplay() if self._has_states else None
        groups = [step]
        for group in range(1, len(self.block_tables)):
            tables = self._tables_of(group, rows, plan.max_context)
            groups.append(replace(step, slots=slots[min(group, len(slots) - 1)], block_tables=tables, plans={}))
        return StepInputs(tokens, positions, as_siblings(groups), self._previous_hidden(total))

    def _last_and_drafts(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The tokens of decodes: each row's last one, then its drafts; any token where it has no more."""
        ahead = positions - self.num_computed[rows]
        drafts = self.drafts[rows, (ahead - 1).clamp(0, MAX_WIDTH - 2)].long()
        drafts = torch.where(ahead <= self.num_drafts[rows], drafts, 0)
        return torch.where(ahead == 0, self.last_token[rows], drafts)

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
        return self._single_tokens(rows, self.num_computed[rows], step.slots[:0], step.max_context_len)[0]

    def _single_tokens(
        self, rows: torch.Tensor, context: torch.Tensor, slots: torch.Tensor, longest: int
    ) -> tuple[AttentionInputs, ...]:
        """A step of one token of each of these rows, the last of `context` [rows] tokens."""
        found = AttentionInputs(
            slots=slots,
            query_starts=torch.arange(len(rows) + 1, dtype=torch.int32, device=self._device),
            context_lens=context.to(torch.int32),
            block_tables=self._tables_of(0, rows, longest),
            num_rows=len(rows),
            num_tokens=len(rows),
            num_decodes=len(rows),
            max_query_len=1,
            max_context_len=longest,
        )
        others = range(1, len(self.block_tables))
        tables = [self._tables_of(group, rows, longest) for group in others]
        return as_siblings([found, *(replace(found, block_tables=table, plans={}) for table in tables)])

    def ahead(
        self, rows: torch.Tensor, distance: int, longest: int
    ) -> tuple[torch.Tensor, tuple[AttentionInputs, ...]]:
        """Positions of the tokens `distance` after these rows' last ones, and a step of these tokens. What lies behind
        a row's limit is written to the null block. `longest`: bound on the context of any of them."""
        positions = self.num_tokens[rows] - 1 + distance
        is_inside = self.active[rows] & (positions < self.limit[rows])
        slots = [self._slots(table, rows, positions, is_inside) for table in self._slot_tables()]
        # Tables of rotations end at the longest context.
        positions = torch.minimum(positions, self.limit[rows] - 1).clamp(min=0)
        groups = self._single_tokens(rows, positions + 1, slots[0], longest)
        for group, inputs in enumerate(groups):
            inputs.slots = slots[min(group, len(slots) - 1)]
        if self.position_delta is not None:
            positions = (positions + self.position_delta[rows]).clamp(min=0)
        return positions, groups

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
        if self.position_delta is not None:
            self.position_delta[rows] = self.position_delta[sources]
        for column in (
            self.last_token, self.num_tokens, self.num_computed, self.prompt_len, self.limit, self.active,
            *self.block_tables, self.seed, self.scalars, self.stop_ids, self.token_ids,
        ):  # fmt: skip
            column[rows] = column[sources]
        self.sequence[rows] = sequences
        self.num_drafts[rows] = 0
        for fork in forks:
            self.kinds[fork.row] = self.kinds[fork.source]
            self.extras[fork.row] = self.extras[fork.source]

    def picks(self, plan: StepPlan) -> torch.Tensor:
        """For each place of the step's draws, the token of the step whose hidden state it is sampled from."""
        return self._picks

    def draw_rows(self, plan: StepPlan) -> torch.Tensor:
        """For each place of the step's draws, the row that gets the token."""
        return self._draw_rows

    def lengths(self, plan: StepPlan, part: slice, rows: torch.Tensor) -> torch.Tensor:
        """Tokens before each of the places in `part`, whose rows these are: drafts before a place count."""
        length = self.num_tokens[rows]
        return length if self._offsets is None else length + self._offsets[part]

    def mask(self, logits: torch.Tensor, indices: np.ndarray, bits: np.ndarray) -> None:
        """Set the logits of tokens whose bit is not set to -inf in these rows, in place."""
        flags = np.unpackbits(np.invert(bits).view(np.uint8), axis=1, count=logits.shape[-1], bitorder="little")
        nothing = logits.new_full((), float("-inf"))
        for i, banned in zip(indices.tolist(), torch.from_numpy(flags.view(np.bool_)), strict=True):
            torch.where(banned, nothing, logits[i], out=logits[i])  # masked_fill_ is slower: it branches on each flag

    def draw(self, plan: StepPlan | None, logits: torch.Tensor, rows: torch.Tensor, start: int, filtered: bool) -> bool:
        """Draw and commit in one kernel, or draw and keep the tokens if the plan verifies drafts; False if the device
        has none. `start`: as in `commit`."""
        return False

    def commit(self, tokens: torch.Tensor, invalid: torch.Tensor, rows: torch.Tensor, start: int) -> None:
        """Write drawn tokens back and deactivate finished rows; `start`: the first token's index among the draws."""
        stopped = (self.stop_ids[rows] == tokens[:, None]).any(-1)
        length = self.num_tokens[rows] + 1
        self.last_token[rows] = tokens
        self.num_tokens[rows] = length
        self.active[rows] &= ~(stopped | (length >= self.limit[rows]))
        if self.speculates:
            self.num_drafts[rows] = 0
        self._drawn.append((tokens, stopped, invalid))

    def place(self, tokens: torch.Tensor, invalid: torch.Tensor, start: int) -> None:
        """Keep the tokens drawn at places of a step that verifies drafts, for `verify`; `start`: as in `commit`."""
        self._placed.append((tokens, invalid))

    def drawn_at(self, rows: torch.Tensor, start: int) -> torch.Tensor:
        """The tokens that were just drawn at places of these rows, the first of which is `start`."""
        return self._placed[-1][0] if self._placed else self.last_token[rows]

    def drawn(self, plan: StepPlan) -> torch.Tensor:
        """The tokens drawn at all places of the step."""
        if self._placed:
            return torch.cat([tokens for tokens, _ in self._placed])
        return self.last_token[self.draw_rows(plan).long()]

    def verify(self, plan: StepPlan) -> torch.Tensor:
        """Compare the tokens drawn at all places with the drafts there, and write back what each draw yields: tokens up
        to the first that is not the next draft, a stop id, or the row's last. Returns how many [draws]."""
        rows, widths = self.upload(plan.sample_rows, plan.widths)
        drawn, invalid = (torch.cat(parts) for parts in zip(*self._placed, strict=True))
        place = torch.arange(MAX_WIDTH, device=self._device)
        index = (widths.cumsum(0) - widths)[:, None] + place
        index = index.clamp(max=len(drawn) - 1)
        tokens, is_invalid = drawn[index], invalid[index]
        is_stop = (self.stop_ids[rows][:, None] == tokens[:, :, None]).any(-1)
        length = self.num_tokens[rows, None] + place + 1
        is_end = is_stop | is_invalid | (length >= self.limit[rows, None])
        if self.synthetic_rates is None:
            matches = tokens[:, :-1] == self.drafts[rows]
        else:
            index = length[:, :-1] - 1 - self.prompt_len[rows, None]
            stream = self.sequence[rows, None] + ACCEPT_STREAM
            matches = uniform(self.seed[rows, None], index, stream) < self.synthetic_rates
        goes_on = matches & ~is_end[:, :-1]
        goes_on &= place[1:] < torch.minimum(widths, self.num_drafts[rows] + 1)[:, None]
        accepted = goes_on.long().cumprod(-1).sum(-1)
        last = accepted[:, None]
        stopped, is_over = is_stop.gather(1, last)[:, 0], is_end.gather(1, last)[:, 0]
        self.last_token[rows] = tokens.gather(1, last)[:, 0]
        self.num_tokens[rows] += accepted + 1
        self.num_computed[rows] += accepted + 1 - widths
        self.num_drafts[rows] = 0
        self.active[rows] &= ~is_over
        counts = accepted + 1
        self._verified = HostDraws(drawn, stopped, is_invalid.gather(1, last)[:, 0], counts)
        return counts

    def result(self, draws: int, proposed: bool = False) -> StepDraws:
        """The step's draws; the caller waits for them. `proposed`: with the drafts that their rows have now."""
        if self._verified is not None:
            tensors = self._verified.tensors
        elif self._drawn:
            tensors = (*(torch.cat(parts) for parts in zip(*self._drawn, strict=True)), None)
        else:
            return self.nothing_drawn()
        if not proposed:
            return HostDraws(*tensors)
        rows = self._sample_rows
        return HostDraws(*tensors, self.drafts[rows], self.num_drafts[rows])

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
