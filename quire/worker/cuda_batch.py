"""The batch on a GPU: a plan is one packed buffer in pinned memory, unpacked by one kernel; results come back the same
way. No copies, no synchronization."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from quire.kernels.states import StateReplay
from quire.kernels.triton.batch import NEW_ROW_HEAD, NEW_ROW_INTS, apply_plan, expand_rows, lay_out_ahead
from quire.kernels.triton.elementwise import mask_logits
from quire.kernels.triton.sampling import BatchColumns, DrawPlaces, commit, draw_and_commit, workspace
from quire.kernels.triton.verify import RESULT_INTS, RUN_INTS, place_runs, report_drafts, verify_drafts
from quire.layers.attention.base import AttentionInputs, GroupInputs, LastTokens
from quire.messages.plan import MAX_WIDTH, Drafts, NewRow, PrefixGroup, StepPlan
from quire.worker.batch import DeviceBatch, Drawn, StepInputs, as_siblings
from quire.worker.extras import pack_scalars
from quire.worker.kv import KVCache

IN_FLIGHT = 8
"""Buffers for plans and results: more than are ever in flight, unless there are many pipeline stages."""
STOP_IDS = 8


@dataclass
class StepBuffers:
    """A step's rows, tokens and draws at fixed addresses: written by `apply_plan`, read by the step's kernels."""

    rows: torch.Tensor
    query_starts: torch.Tensor
    tokens: torch.Tensor
    picks: torch.Tensor
    """For each place of each draw the token at which it draws…"""
    draw_rows: torch.Tensor
    """…and its row."""
    offsets: torch.Tensor
    """In a step that verifies drafts: how far each place is behind the first of its draw…"""
    place_starts: torch.Tensor
    """…and where the places of each draw begin."""
    following: torch.Tensor
    """For each row after the decodes the token after its chunk, if the plan has them."""
    slot: torch.Tensor
    live_rows: torch.Tensor
    """As `rows`, with the padding row for those that have ended on the device: written when a step is laid out, if the
    model has recurrent states."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        return [getattr(self, field.name) for field in fields(self)]


class PinnedResult:
    """The tokens a step drew, being copied into pinned memory."""

    def __init__(
        self, tokens: np.ndarray, flags: np.ndarray, on_gpu: bool, counts: np.ndarray | None = None,
        drafts: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        self._values = tokens, flags, counts, drafts
        self._event = torch.cuda.Event() if on_gpu else None
        if self._event is not None:
            self._event.record()

    def ready(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> Drawn:
        if self._event is not None:
            self._event.synchronize()
        tokens, flags, counts, drafts = self._values
        drawn = Drawn(tokens.copy(), (flags & 1).astype(bool), (flags & 2).astype(bool))
        if counts is not None:
            drawn = drawn._replace(counts=counts.copy())
        if drafts is not None:
            drawn = drawn._replace(drafts=drafts[:, :-1].copy(), num_drafts=drafts[:, -1].copy())
        return drawn


class CudaBatch(DeviceBatch):
    """`DeviceBatch` with its three operations in Triton."""

    def __init__(
        self, max_rows: int, max_tokens_per_row: int, vocab_size: int, kv: KVCache, device: torch.device,
        max_step_tokens: int, in_flight: int = IN_FLIGHT,
    ) -> None:  # fmt: skip
        """`in_flight`: number of plan and result buffers; more than plans are ever in flight."""
        super().__init__(max_rows, max_tokens_per_row, vocab_size, kv, device)
        self.pad_row = max_rows
        self._on_gpu = device.type == "cuda"
        self.stop_ids = torch.full((max_rows + 1, STOP_IDS), -1, dtype=torch.int64, device=device)

        def ints(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self.max_places = (max_rows + 1) * (MAX_WIDTH + 2)  # a row may draw at MAX_WIDTH; the rest is for padding
        self.buffers = StepBuffers(
            rows=torch.full((max_rows + 1,), self.pad_row, dtype=torch.int32, device=device),
            query_starts=ints(max_rows + 2),
            tokens=ints(max_step_tokens),
            picks=ints(self.max_places),
            draw_rows=ints(self.max_places),
            offsets=ints(self.max_places),
            place_starts=ints(max_rows + 2),
            following=ints(max_rows + 1),
            slot=ints(1),
            live_rows=torch.full((max_rows + 1,), self.pad_row, dtype=torch.int32, device=device),
        )
        self.groups = DeviceGroups(max_rows, device, in_flight)
        self._packed = [self._pinned(4 * max_step_tokens) for _ in range(in_flight)]
        self.results = self._pinned(in_flight, 2, max_rows)
        self._result_values = self.results.numpy()
        self._placed_draws = DrawPlaces(ints(self.max_places), ints(self.max_places), self.buffers.offsets)
        self._counts = torch.ones(max_rows + 1, dtype=torch.int64, device=device)
        self._verified_results = self._pinned(in_flight, max_rows * (MAX_WIDTH + 2))
        self._draft_results = self._pinned(in_flight, max_rows, RESULT_INTS)
        self._runs = [self._pinned(64 * max_rows) for _ in range(in_flight)]
        self._place_ends: np.ndarray | None = None
        """Where the places of each of the step's draws end, if it verifies drafts."""
        self._slot = 0
        self._prompts: dict[int, int] = {}
        self._contexts: list[int] | None = None
        self._workspace = workspace(max_rows, vocab_size, device)

    def _pinned(self, *size: int) -> torch.Tensor:
        """Host memory the device reads and writes; plain memory where kernels run in the interpreter."""
        return torch.zeros(size, dtype=torch.int32, pin_memory=self._on_gpu)

    # Applying a plan

    def apply(self, plan: StepPlan, padded_rows: int = 0) -> None:
        """Apply the plan's changes to the rows and fill the step's buffers, padded to `padded_rows` rows."""
        if plan.reset and self._on_gpu:
            torch.cuda.synchronize(self._device)  # a failed step may still be reading what the next one writes
        self._begin(plan)
        self._contexts = self._follow_prompts(plan)
        self._slot = (self._slot + 1) % len(self._packed)
        added = {new.row for new in plan.add}
        drop = [row for row in plan.drop if row not in added]
        ends = np.cumsum(plan.counts, dtype=np.int32)
        self._place_ends = np.cumsum(plan.widths, dtype=np.int32) if plan.num_drafts else None
        sections = [
            np.array(drop, np.int32), self._table_rows(plan), plan.block_indices, plan.blocks, plan.rows, _ZERO, ends,
            plan.tokens,
        ]  # fmt: skip
        if self._place_ends is None:
            sections += [ends[plan.samples] - 1, plan.sample_rows]
        else:
            sections += [plan.picks, plan.place_rows, plan.place_offsets, _ZERO, self._place_ends]
        sections.append(plan.following)
        if plan.add:
            sections += self._new_rows(plan.add)
        lengths = [len(section) for section in sections]
        packed = self._buffer(sum(lengths))
        np.concatenate(sections, out=packed.numpy()[: sum(lengths)], casting="same_kind")
        sizes = {
            "drops": len(drop), "blocks": len(plan.blocks), "rows": len(plan.rows), "fresh": len(plan.tokens),
            "draws": len(plan.samples) if self._place_ends is None else int(self._place_ends[-1]),
            "added": len(plan.add), "padded": max(padded_rows, len(plan.rows)), "slot_number": self._slot,
            "verified": 0 if self._place_ends is None else len(plan.samples), "follows": len(plan.following),
        }  # fmt: skip
        if plan.groups is not None:
            self.groups.apply(plan.groups)
        apply_plan(packed, sizes, max(*lengths, sizes["padded"]) + 1, self.buffers, self)
        self._add_token_ids(plan.add)
        self._add_deltas(plan.add)
        self.kv.copy(plan.copies)
        if plan.rewound:
            rows, computed = self.upload(*zip(*plan.rewound, strict=True))
            self.num_computed[rows] = computed
        self._place_drafts(plan.drafts)

    def _place_drafts(self, runs: list[Drafts]) -> None:
        if not runs:
            return
        lengths = np.array([len(run.tokens) for run in runs], np.int32)
        size = len(runs) * RUN_INTS + int(lengths.sum())
        if len(self._runs[self._slot]) < size:
            self._runs[self._slot] = self._pinned(2 * size)
        packed = self._runs[self._slot]
        heads = packed.numpy()[: len(runs) * RUN_INTS].reshape(-1, RUN_INTS)
        heads[:, 0] = [run.row for run in runs]
        heads[:, 1] = [run.start for run in runs]
        heads[:, 2] = lengths
        heads[:, 3] = np.cumsum(lengths) - lengths
        packed.numpy()[heads.size : size] = [token for run in runs for token in run.tokens]
        place_runs(packed, len(runs), int(lengths.max()), self)
        if self.draft_probs is not None:
            self._given_by_host(self.upload(heads[:, 0])[0])

    def _follow_prompts(self, plan: StepPlan) -> list[int] | None:
        """Tokens that the step's prompts have cached before it; None if the host does not know those of one of them.

        Rows are followed from their first chunk to their first draw: what they compute later, only the device counts.
        """
        if plan.reset:
            self._prompts.clear()
        for new in plan.add:
            self._prompts[new.row] = new.num_computed
        for fork in (*plan.branches, *plan.forks):
            self._prompts.pop(fork.row, None)
        if plan.num_decodes == len(plan.rows):
            return []
        rows = plan.rows[plan.num_decodes :].tolist()
        before = [self._prompts.get(row) for row in rows]
        for row, done, count in zip(rows, before, plan.counts[plan.num_decodes :].tolist(), strict=True):
            if done is not None:
                self._prompts[row] = done + count
        for row in plan.sample_rows.tolist():
            self._prompts.pop(row, None)
        known = [done for done in before if done is not None]
        return known if len(known) == len(before) else None

    def apply_nothing(self) -> None:
        """The kernel of `apply`, for a plan that holds nothing."""
        apply_plan(self._packed[0], dict.fromkeys(_SIZES, 0), 1, self.buffers, self)

    def verify_nothing(self) -> None:
        """The kernels of a step that verifies drafts, for the padding row."""
        apply_plan(self._packed[0], dict.fromkeys(_SIZES, 0) | {"verified": 1}, 1, self.buffers, self)
        self.buffers.draw_rows.fill_(self.pad_row)
        self.verify_draws(1)
        rows = self.buffers.draw_rows
        for starts in (None, self.buffers.place_starts):
            report_drafts(rows, starts, 1, self, self._draft_results, self.buffers.slot)
        self._runs[0][:RUN_INTS].copy_(torch.tensor([self.pad_row, 0, 0, 0]))
        place_runs(self._runs[0], 1, 1, self)
        lay_out_ahead(
            rows[:1], 0, self, self._counts.clone()[:1], self._counts.clone()[None, :1], self._draft_results[0, 0],
            self._draft_results[0, 1],
        )  # fmt: skip

    def _buffer(self, size: int) -> torch.Tensor:
        if len(self._packed[self._slot]) < size:  # long cached prefixes bring long tables; rare
            self._packed[self._slot] = self._pinned(2 * size)
        return self._packed[self._slot]

    def _new_rows(self, added: list[NewRow]) -> list[np.ndarray]:
        ints = np.empty((len(added), NEW_ROW_INTS), np.int32)
        ints[:, NEW_ROW_HEAD:] = pack_scalars([new.params for new in added])
        self._widen_stop_ids(max(len(new.stop_ids) for new in added))
        stops = np.full((len(added), self.stop_ids.shape[1]), -1, np.int32)
        for i, new in enumerate(added):
            seed = new.seed & (2**64 - 1)
            ints[i, :6] = new.row, new.num_tokens, new.num_computed, new.prompt_len, new.limit, new.sequence
            ints[i, 6:8] = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32).view(np.int32)
            stops[i, : len(new.stop_ids)] = new.stop_ids
            self._remember(new)
        return [ints.reshape(-1), stops.reshape(-1)]

    # Laying out a step

    def inputs(self, plan: StepPlan) -> StepInputs:
        """The step as the model sees it."""
        inputs = self.empty_inputs(
            len(plan.rows), plan.num_tokens, plan.num_decodes, int(plan.counts.max()), plan.max_context,
            self.groups.exist, plan.num_drafts, int(plan.counts[: plan.num_decodes].max()) if plan.num_drafts else 1,
        )  # fmt: skip
        for group in inputs.attention if not plan.num_drafts else ():
            group.contexts, group.query_lens = self._contexts, plan.counts[plan.num_decodes :].tolist()
        self.expand(inputs)
        inputs.positions = self._prompt_positions(plan, inputs.positions)
        return inputs

    def empty_inputs(
        self, rows: int, tokens: int, decodes: int, max_query: int, max_context: int, grouped: bool = False,
        drafts: int = 0, width: int = 1,
    ) -> StepInputs:  # fmt: skip
        """Buffers for a step of this size. `grouped`: attention gets the prefix groups, unless the decodes verify
        `drafts` drafts, each at most `width` tokens."""
        grouped = grouped and not drafts
        # Padded lengths: Triton compiles another kernel for a pointer that is not 16-byte aligned.
        longs = torch.empty(
            2 + len(self._slot_tables()), -(-tokens // 16) * 16, dtype=torch.int64, device=self._device
        )[:, :tokens]
        step = AttentionInputs(
            slots=longs[2],
            query_starts=self.buffers.query_starts[: rows + 1],
            context_lens=torch.empty(rows, dtype=torch.int32, device=self._device),
            block_tables=self._tables_of(0, self.buffers.rows, max_context),
            num_rows=rows,
            num_tokens=tokens,
            num_decodes=0 if drafts else decodes,
            num_verifying=decodes if drafts else 0,
            num_verified=decodes + drafts if drafts else 0,
            width=width,
            replay=StateReplay() if drafts and self._has_states else None,
            max_query_len=max_query,
            max_context_len=max_context,
            rows=self._rows_of(0)[:rows],
            groups=self.groups.inputs if grouped and self.cache_groups[0].kind == "full" else None,
        )
        groups = [step]
        for number, group in enumerate(self.cache_groups[1:], 1):
            groups.append(
                replace(
                    step,
                    slots=longs[min(2 + number, len(longs) - 1)],
                    block_tables=self._tables_of(number, self.buffers.rows, max_context),
                    rows=self._rows_of(number)[:rows],
                    groups=step.groups if group.kind == "full" else None,
                    plans={},
                )
            )
        return StepInputs(longs[0], longs[1], as_siblings(groups), self._previous_hidden(tokens), longs[2:])

    def _rows_of(self, group: int) -> torch.Tensor:
        """The step's rows, by which a cache group's tables are read."""
        return self.buffers.live_rows if self.cache_groups[group].pages else self.buffers.rows

    def captured_last_tokens(self, draws: int, inputs: StepInputs) -> LastTokens:
        rows = self.buffers.draw_rows[:draws]
        return LastTokens(self.buffers.picks[:draws], self._one_token_each(rows, inputs))

    def _one_token_each(self, rows: torch.Tensor, inputs: StepInputs) -> AttentionInputs:
        found = super()._one_token_each(rows, inputs)
        is_active = self.active[rows]
        found.context_lens *= is_active  # a finished row has no blocks any more; siblings have the same tensor
        for own, group in zip(found.siblings or (found,), self.cache_groups, strict=True):
            own.rows = (torch.where(is_active, rows, self.pad_row) if group.pages else rows).to(torch.int32)
        return found

    def _tables_of(self, group: int, rows: torch.Tensor, max_context: int) -> torch.Tensor:
        """The tables of all rows: kernels read them by the step's rows."""
        pages = self.cache_groups[group].pages
        return self.block_tables[group, :, :pages] if pages else self.block_tables[group]

    def expand(self, inputs: StepInputs) -> None:
        """Compute a step's tokens, positions and slots from the rows it schedules."""
        step = inputs.attention[0]
        assert inputs.slots is not None
        expand_rows(
            self.buffers, self, step.num_rows, step.num_verifying or step.num_decodes, inputs.tokens, inputs.positions,
            inputs.slots, step.context_lens, step.num_verified,
        )  # fmt: skip
        if self.position_delta is not None:
            rows = self.buffers.rows[: step.num_rows]
            if step.num_rows != step.num_tokens:
                tokens = torch.arange(step.num_tokens, dtype=torch.int32, device=self._device)
                owners = torch.bucketize(tokens, step.query_starts[1:], right=True)
                rows = rows[owners.clamp(max=step.num_rows - 1)]
            inputs.positions += self.position_delta[rows]
            inputs.positions.clamp_(min=0)  # rows that have ended are at 0, and prompts are given theirs

    def ahead(
        self, rows: torch.Tensor, distance: int, longest: int
    ) -> tuple[torch.Tensor, tuple[AttentionInputs, ...]]:
        count = len(rows)
        longs = torch.empty(
            1 + len(self._slot_tables()), -(-count // 16) * 16, dtype=torch.int64, device=self._device
        )[:, :count]  # fmt: skip
        context = torch.empty(count, dtype=torch.int32, device=self._device)
        live_rows = torch.empty(count, dtype=torch.int32, device=self._device)
        lay_out_ahead(rows, distance, self, longs[0], longs[1:], context, live_rows)
        groups = self._single_tokens(rows, context, longs[1], longest)
        for number, inputs in enumerate(groups):
            inputs.slots = longs[min(1 + number, len(longs) - 1)]
            inputs.rows = live_rows
        if self.position_delta is not None:
            longs[0] += self.position_delta[rows]
            longs[0].clamp_(min=0)
        return longs[0], groups

    # Drawing tokens

    @property
    def columns(self) -> BatchColumns:
        """What the sampling kernels read and write."""
        return BatchColumns(
            last_token=self.last_token, num_tokens=self.num_tokens, prompt_len=self.prompt_len, limit=self.limit,
            active=self.active, seed=self.seed, sequence=self.sequence, scalars=self.scalars, stop_ids=self.stop_ids,
            num_drafts=self.num_drafts if self.speculates else None,
        )  # fmt: skip

    def picks(self, plan: StepPlan) -> torch.Tensor:
        return self.buffers.picks[: self._num_places(len(plan.samples))]

    def draw_rows(self, plan: StepPlan) -> torch.Tensor:
        return self.buffers.draw_rows[: self._num_places(len(plan.samples))]

    def _num_places(self, draws: int) -> int:
        """The places of the step's first `draws` draws."""
        return draws if self._place_ends is None or not draws else int(self._place_ends[draws - 1])

    def lengths(self, plan: StepPlan, part: slice, rows: torch.Tensor) -> torch.Tensor:
        length = self.num_tokens[rows]
        return length if self._place_ends is None else length + self.buffers.offsets[part][: len(rows)]

    def mask(self, logits: torch.Tensor, indices: np.ndarray, bits: np.ndarray) -> None:
        packed = self._pinned(len(indices), bits.shape[1] + 1)
        packed.numpy()[:, 0] = indices
        packed.numpy()[:, 1:] = bits
        packed = packed.to(self._device, non_blocking=True)
        mask_logits(logits, packed[:, 0].contiguous(), packed[:, 1:])

    def draw(self, plan: StepPlan | None, logits: torch.Tensor, rows: torch.Tensor, start: int, filtered: bool) -> bool:
        if plan is not None and plan.num_drafts:
            self.draw_places(logits, rows, start, filtered)
        else:
            results = self.results[:, :, start:]
            draw_and_commit(logits, rows, self.columns, results, self.buffers.slot, filtered, self._workspace)
        return True

    def draw_places(self, logits: torch.Tensor, rows: torch.Tensor, start: int, filtered: bool = False) -> None:
        """Draw at places of a step that verifies drafts, the first of which is `start`, and keep the tokens."""
        most = len(self._workspace.thresholds)
        for at in range(0, len(rows), most):
            part = slice(at, at + most)
            draw_and_commit(
                logits[part], rows[part], self.columns, self.results, self.buffers.slot, filtered, self._workspace,
                self._placed_draws.after(start + at),
            )  # fmt: skip

    def commit(self, tokens: torch.Tensor, invalid: torch.Tensor, rows: torch.Tensor, start: int) -> None:
        commit(tokens, invalid, rows, self.columns, self.results[:, :, start:], self.buffers.slot)

    def place(self, tokens: torch.Tensor, invalid: torch.Tensor, start: int) -> None:
        part = slice(start, start + len(tokens))
        self._placed_draws.tokens[part] = tokens.to(torch.int32)
        self._placed_draws.invalid[part] = invalid.to(torch.int32)

    def drawn_at(self, rows: torch.Tensor, start: int) -> torch.Tensor:
        if self._place_ends is None:
            return self.last_token[rows]
        return self._placed_draws.tokens[start : start + len(rows)].long()

    def drawn(self, plan: StepPlan) -> torch.Tensor:
        if self._place_ends is None:
            return self.last_token[self.draw_rows(plan).long()]
        return self.drawn_places(len(self.draw_rows(plan)))

    def drawn_places(self, places: int) -> torch.Tensor:
        """The tokens drawn at the first `places` places of a step that verifies drafts."""
        return self._placed_draws.tokens[:places].long()

    def verify(self, plan: StepPlan) -> torch.Tensor:
        return self.verify_draws(len(plan.samples))

    def verify_draws(self, draws: int) -> torch.Tensor:
        """`verify` of the step's first `draws` draws."""
        buffers, counts = self.buffers, self._counts[:draws]
        verify_drafts(
            buffers.place_starts, buffers.draw_rows, draws, self._placed_draws, self.columns, self, counts,
            self._verified_results, buffers.slot,
        )  # fmt: skip
        return counts

    def result(self, draws: int, proposed: bool = False) -> PinnedResult:
        """The step's draws; the caller waits for them."""
        drafts = None
        if proposed and draws:
            buffers = self.buffers
            starts = None if self._place_ends is None else buffers.place_starts
            report_drafts(buffers.draw_rows, starts, draws, self, self._draft_results, buffers.slot)
            drafts = self._draft_results[self._slot, :draws].numpy()
        if self._place_ends is None or not draws:
            tokens, flags = self._result_values[self._slot, :, :draws]
            return PinnedResult(tokens, flags, self._on_gpu, None, drafts)
        values = self._verified_results[self._slot].numpy()
        tokens, flags, counts = np.split(values, (self.max_rows * MAX_WIDTH, self.max_rows * (MAX_WIDTH + 1)))
        places = self._num_places(draws)
        return PinnedResult(tokens[:places], flags[:draws], self._on_gpu, counts[:draws], drafts)


_ZERO = np.zeros(1, np.int32)
_SIZES = ("drops", "blocks", "rows", "fresh", "draws", "added", "padded", "slot_number", "verified", "follows")
"""Names of the sizes that `apply_plan` takes."""


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
