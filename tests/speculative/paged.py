"""Steps of a model and a proposer's layers over one paged cache, laid out as the device batch lays them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.layers.attention.base import AttentionInputs, FeatureRequest
from quire.messages.plan import MAX_WIDTH
from quire.speculative.device import ProposalStep
from quire.worker.batch import as_siblings
from quire.worker.geometry import assign_groups, model_geometry
from quire.worker.kv import KVCache


@dataclass
class Chunk:
    """What a row computes in a step: tokens at its next positions, of which the last `len(drawn)` that count drew."""

    row: int
    tokens: Sequence[int]
    drawn: Sequence[int] = ()
    """What was drawn: of a prompt's last chunk one token, of a decode those that it yields. None of other chunks."""
    next: int = 0
    """The prompt's next token, if nothing is drawn."""
    is_decode: bool = False


class Scalars(dict[str, torch.Tensor]):
    """Sampling parameters of some rows."""


class NoHostCopies(TorchDispatchMode):
    """Refuses operations that copy a number from or to the host, which a captured graph cannot."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(("aten.lift_fresh", "aten._local_scalar_dense", "aten.nonzero")):
            raise AssertionError(f"a proposer copies from or to the host: {func}")  # as `column[rows] = 1` does
        return func(*args, **(kwargs or {}))


class Batch(SimpleNamespace):
    """The columns of the device batch that proposers read."""

    def scalars_of(self, rows: torch.Tensor) -> Scalars:
        return Scalars({name: column[rows] for name, column in self.scalars.items()})


@dataclass
class DraftRun:
    """Rows in a paged cache whose blocks are in random order; unwritten slots hold NaN."""

    model: Any
    proposer: Any
    rows: int = 3
    block_size: int = 4
    length: int = 40
    scalars: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        geometry = model_geometry(self.model, self.block_size, drafts=self.proposer.caches)
        assign_groups(self.model, geometry, self.proposer)
        self.groups = geometry.groups
        per_row = geometry.most_pages(self.length + MAX_WIDTH)
        blocks = 1 + self.rows * per_row
        free = iter((torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(0)) + 1).tolist())
        self.kv = KVCache.of(geometry, blocks, torch.device("cpu"))
        self.kv.data.view(torch.uint8).fill_(0xFF)
        width = -(-(self.length + MAX_WIDTH) // self.block_size)
        self.tables = [
            torch.tensor([[next(free) for _ in range(group.pages or width)] for _ in range(self.rows)]).int()
            for group in self.groups
        ]
        self.computed = [0] * self.rows
        ones = torch.ones(self.rows)
        known = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | self.scalars
        self.batch = Batch(
            drafts=torch.full((self.rows, MAX_WIDTH - 1), -1, dtype=torch.int32),
            num_drafts=torch.zeros(self.rows, dtype=torch.int32),
            draft_probs=None,
            num_tokens=torch.zeros(self.rows, dtype=torch.int64),
            prompt_len=torch.zeros(self.rows, dtype=torch.int64),
            last_token=torch.zeros(self.rows, dtype=torch.int64),
            seed=torch.arange(self.rows) + 7,
            sequence=torch.zeros(self.rows, dtype=torch.int64),
            scalars={name: ones * value for name, value in known.items()},
        )

    def inputs(self, rows: list[int], starts: list[int], counts: list[int]) -> tuple[AttentionInputs, ...]:
        """A step of these rows as attention sees it."""
        positions = [(row, p) for row, s, n in zip(rows, starts, counts, strict=True) for p in range(s, s + n)]
        firsts = torch.tensor([0, *counts]).cumsum(0).int()
        ends = [s + n for s, n in zip(starts, counts, strict=True)]
        found = []
        for group, table in zip(self.groups, self.tables, strict=True):
            slots = [
                int(table[row, 0 if group.pages else p // self.block_size]) * self.block_size + p % self.block_size
                for row, p in positions
            ]
            found.append(
                AttentionInputs(
                    slots=torch.tensor(slots, dtype=torch.int64), query_starts=firsts,
                    context_lens=torch.tensor(ends, dtype=torch.int32), block_tables=table[rows], num_rows=len(rows),
                    num_tokens=len(positions), num_decodes=len(rows) if max(counts) == 1 else 0,
                    max_query_len=max(counts), max_context_len=max(ends),
                )
            )  # fmt: skip
        return as_siblings(found)

    @torch.inference_mode()
    def step(self, chunks: Sequence[Chunk], count: int) -> dict[int, list[int]]:
        """Compute, and let the proposer make `count` drafts: those of each row that draws."""
        rows, counts = [chunk.row for chunk in chunks], [len(chunk.tokens) for chunk in chunks]
        starts = [self.computed[row] for row in rows]
        inputs = self.inputs(rows, starts, counts)
        if self.proposer.feature_layers:
            inputs[0].features = FeatureRequest(self.proposer.feature_layers)
        tokens = torch.tensor([token for chunk in chunks for token in chunk.tokens])
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        hidden = self.model(tokens, positions, self.kv.layers, inputs[0])
        following, ends, drawing, first = [], [], [], 0
        for chunk, start, number in zip(chunks, starts, counts, strict=True):
            after = [*chunk.tokens[1:], chunk.next]
            accepted = number
            if chunk.drawn:
                places = number if chunk.is_decode else 1
                accepted = number - places + len(chunk.drawn)
                after[number - places : accepted] = chunk.drawn
                after[accepted:] = [0] * (number - accepted)
                drawing.append(chunk.row)
                ends.append(first + accepted - 1)
                if not chunk.is_decode:
                    self.batch.prompt_len[chunk.row] = start + number
                self.batch.num_tokens[chunk.row] = start + accepted + 1
                self.batch.last_token[chunk.row] = chunk.drawn[-1]
            following += after
            self.computed[chunk.row] = start + accepted
            first += number

        def lay_out(i: int) -> tuple[torch.Tensor, tuple[AttentionInputs, ...]]:
            places = [int(self.batch.num_tokens[row]) - 1 + i for row in drawing]
            return torch.tensor(places), self.inputs(drawing, places, [1] * len(places))

        laid_out = {i: lay_out(i) for i in range(-1, count)} if drawing else {}
        step = ProposalStep(
            tokens=tokens, positions=positions, following=torch.tensor(following), attention=inputs,
            hidden=hidden if self.proposer.needs_hidden else None,
            features=None if inputs[0].features is None else inputs[0].features.joined,
            rows=torch.tensor(drawing, dtype=torch.int64), ends=torch.tensor(ends, dtype=torch.int64), count=count,
            batch=self.batch, kv=self.kv.proposer_layers, lay_out=laid_out.__getitem__,
        )  # fmt: skip
        with NoHostCopies():
            self.proposer.propose(step)
        made = {row: self.batch.drafts[row, : int(self.batch.num_drafts[row])].tolist() for row in drawing}
        self.batch.num_drafts.zero_()
        return made
