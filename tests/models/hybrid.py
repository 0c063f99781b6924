"""Steps of hybrid models over pages made by hand: attention layers and recurrent states in one pool each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from quire.layers.attention.base import AttentionInputs
from quire.layers.caches import AttentionCache, StateCache, StateView
from quire.layers.recurrent import DeltaNetRecurrence, Mamba2Recurrence


def state_views(caches: Sequence[StateCache], memory: torch.Tensor) -> tuple[list[StateView], int]:
    """Views of layers whose pieces fill the pages [pages, bytes] one after the other; pages of a state."""
    page, used, views = 0, 0, []
    for cache in caches:
        pages: list[torch.Tensor] = []
        offsets: list[torch.Tensor] = []
        for part in cache.parts:
            places = []
            for _ in range(part.count):
                size = -(-part.piece_bytes // 16) * 16
                if used + size > memory.shape[1]:
                    page, used = page + 1, 0
                places.append((page, used))
                used += size
            numbers = torch.tensor(places, dtype=torch.int32, device=memory.device)
            pages.append(numbers[:, 0].contiguous())
            offsets.append(numbers[:, 1].contiguous())
        views.append(StateView(memory, cache.parts, tuple(pages), tuple(offsets)))
    return views, page + 1


class HybridRun:
    """As `PagedRun`, with a second table for each row: the pages of its states, in random order, full of NaN."""

    def __init__(
        self, stages: Any, block_size: int = 4, blocks: int = 64, page_bytes: int = 1008, queries: int = 1
    ) -> None:
        self.stages = stages if isinstance(stages, list) else [stages]
        self.block_size = block_size
        generator = torch.Generator().manual_seed(0)
        self.free = (torch.randperm(blocks - 1, generator=generator) + 1).tolist()
        self.device = next(self.stages[0].parameters()).device
        caches = self.stages[0].caches
        states = [cache for cache in caches if isinstance(cache, StateCache)]
        probe = torch.empty(0, page_bytes)
        count = state_views(states, probe)[1]
        self.pages = count
        total = 8 * count + 1
        memory = torch.full((total, page_bytes // 4), torch.nan, device=self.device).view(torch.uint8)
        self.memory = memory
        self.free_pages = (torch.randperm(total - 1, generator=generator) + 1).tolist()
        views = iter(state_views(states, memory)[0])
        all_caches = []
        for cache in caches:
            if isinstance(cache, AttentionCache):
                shape = (blocks, 2, cache.kv_heads, block_size, cache.head_dim)
                all_caches.append(torch.full(shape, torch.nan, device=self.device))
            else:
                all_caches.append(next(views))
        held = [len(stage_caches(stage)) for stage in self.stages]
        self.caches = [all_caches[sum(held[:i]) : sum(held[: i + 1])] for i in range(len(held))]
        for stage in self.stages:
            for module in stage.modules():
                if isinstance(module, (DeltaNetRecurrence, Mamba2Recurrence)):
                    module.group = 1
        self.tables: dict[str, list[int]] = {}
        self.state_tables: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}

    def fork(self, row: str, new: str) -> None:
        """A row with a copy of another's blocks and states."""
        self.computed[new] = self.computed[row]
        self.tables[new] = [self.free.pop() for _ in self.tables[row]]
        for caches in self.caches:
            for cache in caches:
                if isinstance(cache, torch.Tensor):
                    cache[self.tables[new]] = cache[self.tables[row]]
        self.state_tables[new] = self._pages()
        self.memory[self.state_tables[new]] = self.memory[self.state_tables[row]]

    def release(self, row: str) -> None:
        """Give back a row's blocks and pages, as they are."""
        self.free += self.tables.pop(row)
        self.free_pages += self.state_tables.pop(row)
        del self.computed[row]

    def _pages(self) -> list[int]:
        return [self.free_pages.pop() for _ in range(self.pages)]

    @torch.no_grad()
    def step(self, scheduled: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        """Compute each row's next tokens; logits of all of them, by row."""
        rows = sorted(scheduled, key=lambda row: len(scheduled[row]) > 1)
        tokens, positions, slots, starts, lengths = [], [], [], [0], []
        for row in rows:
            table, done = self.tables.setdefault(row, []), self.computed.get(row, 0)
            if row not in self.state_tables:
                self.state_tables[row] = self._pages()
            end = done + len(scheduled[row])
            while len(table) * self.block_size < end:
                table.append(self.free.pop())
            tokens += scheduled[row]
            positions += range(done, end)
            slots += [table[p // self.block_size] * self.block_size + p % self.block_size for p in range(done, end)]
            starts.append(starts[-1] + end - done)
            lengths.append(end)
            self.computed[row] = end
        width = max(len(self.tables[row]) for row in rows) + 1
        tables = [self.tables[row] + [0] * (width - len(self.tables[row])) for row in rows]

        def inputs_of(block_tables: list[list[int]]) -> AttentionInputs:
            return AttentionInputs(
                slots=self._ints(slots, torch.int64),
                query_starts=self._ints(starts),
                context_lens=self._ints(lengths),
                block_tables=self._ints(block_tables),
                num_rows=len(rows),
                num_tokens=len(tokens),
                num_decodes=sum(len(scheduled[row]) == 1 for row in rows),
                max_query_len=max(len(scheduled[row]) for row in rows),
                max_context_len=max(lengths),
            )

        inputs = inputs_of(tables)
        inputs.siblings = (inputs, inputs_of([self.state_tables[row] for row in rows]))
        hidden = None
        ids, places = self._ints(tokens, torch.int64), self._ints(positions, torch.int64)
        for stage, cache in zip(self.stages, self.caches, strict=True):
            hidden = stage(ids, places, cache, inputs, hidden)
        logits = self.stages[-1].logits(hidden)
        return {row: logits[starts[i] : starts[i + 1]] for i, row in enumerate(rows)}

    def _ints(self, values: list[Any], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def stage_caches(stage: Any) -> list[Any]:
    """The caches of the layers on a stage."""
    layers = stage.build.ranks.layers(stage.build.config.num_layers)
    return [stage.caches[i] for i in layers] if len(stage.caches) == stage.build.config.num_layers else stage.caches


def in_chunks(stages: Any, tokens: Sequence[int], sizes: Callable[[int], int]) -> torch.Tensor:
    """Logits of every token; step i takes `sizes(i)` of them."""
    run, parts, done = HybridRun(stages), [], 0
    while done < len(tokens):
        size = sizes(len(parts))
        parts.append(run.step({"row": tokens[done : done + size]})["row"])
        done += size
    return torch.cat(parts)
