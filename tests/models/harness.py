"""A tiny random transformers model beside ours, and a paged cache to run ours with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from quire.distributed.experts import ExpertRanks
from quire.distributed.groups import Ranks
from quire.kernels.base import Ops
from quire.kernels.reference import TorchOps
from quire.layers.attention.base import AttentionBackend, AttentionInputs
from quire.layers.attention.torch_paged import TorchPagedAttention
from quire.layers.build_context import BuildContext, collect_targets, create_weights
from quire.loading.model_config import ModelConfig
from quire.loading.weights import match_layouts
from quire.models.registry import model_class
from quire.quantization.formats.base import Scheme
from quire.worker.batch import as_siblings
from quire.worker.geometry import assign_groups, model_geometry
from quire.worker.kv import KVCache


def random_reference(config: PretrainedConfig, seed: int = 0, kind: Any = AutoModelForCausalLM) -> Any:
    """A transformers model whose weights are large enough that logits are not flat and every part matters."""
    config.architectures = None
    model = kind.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.data = 0.3 * noise + (1.0 if name.endswith("weight") else 0.0)
        else:
            parameter.data = noise * (1.5 * min(parameter.shape) ** -0.5)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.7)
    model.tie_weights()
    if config.model_type == "falcon" and config.alibi:  # transformers' eager attention adds the bias of ALiBi twice
        model.config._attn_implementation = "sdpa"
    return model


def model_config(reference: Any) -> ModelConfig:
    """The reference's config.json."""
    raw = json.loads(json.dumps(reference.config.to_dict()))
    return ModelConfig.from_dict(raw | {"architectures": [type(reference).__name__]})


@dataclass(frozen=True)
class Target:
    """Where our model runs, and with which kernels."""

    device: str = "cpu"
    ops: Callable[[], Ops] = TorchOps
    attention: Callable[[], AttentionBackend] = TorchPagedAttention


PLAIN = Target()


def empty_model(
    config: ModelConfig,
    ranks: Ranks | None = None,
    max_model_len: int = 64,
    target: Target = PLAIN,
    experts: ExpertRanks | None = None,
    scheme: Scheme | None = None,
    impl: str = "auto",
) -> Any:
    """Our model of that shape, weights unset."""
    build = BuildContext(
        config=config,
        ranks=ranks or Ranks(),
        dtype=torch.float32,
        device=torch.device(target.device),
        ops=target.ops(),
        attention=target.attention(),
        max_model_len=max_model_len,
        experts=experts,
        scheme=scheme,
    )
    model = model_class(config.architecture, impl)(build)
    create_weights(model, build)
    if build.ranks.tp_size == 1:  # otherwise a padded vocabulary has rows that no tensor fills
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    return model


def checkpoint_tensors(reference: Any) -> dict[str, torch.Tensor]:
    """The reference's weights under the names in its files."""
    tensors = dict(reference.state_dict())
    if type(reference).__name__ == "NemotronHForCausalLM":
        tensors = {name.replace("model.", "backbone.", 1): tensor for name, tensor in tensors.items()}
    if type(reference).__name__ == "GPTNeoXForCausalLM" and "lm_head.weight" in tensors:
        tensors["embed_out.weight"] = tensors.pop("lm_head.weight")
    if type(reference).__name__ == "MiniMaxM2ForCausalLM":  # loading renames the rest of the mixture too
        tensors = {name.replace("mlp.e_score", "block_sparse_moe.e_score"): tensor for name, tensor in tensors.items()}
    return tensors


def load(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy a checkpoint's tensors into our model; every name must be wanted or ignored, and every want answered."""
    targets = match_layouts(collect_targets(model), tensors)
    missing = set(targets)
    for name, tensor in tensors.items():
        if name not in targets:
            assert model.ignores(name), f"unexpected {name}"
            continue
        missing.discard(name)
        for target in targets[name]:
            assert tuple(tensor.shape) == target.shape, name
            part = tensor[target.keep]
            part = target.arrange(part) if target.arrange else part
            assert part.shape == target.into.shape, name
            target.into.copy_(part)
    assert not missing
    assert not any(parameter.isnan().any() for parameter in model.parameters())


def loaded_model(
    reference: Any, ranks: Ranks | None = None, max_model_len: int = 64, target: Target = PLAIN, impl: str = "auto"
) -> Any:
    """Our model with the reference's weights."""
    model = empty_model(model_config(reference), ranks, max_model_len, target, impl=impl)
    load(model, checkpoint_tensors(reference))
    return model


@torch.no_grad()
def reference_logits(reference: Any, tokens: Sequence[int]) -> torch.Tensor:
    """[len(tokens), vocab]: the reference's logits, in one pass."""
    return reference(torch.tensor([tokens]), use_cache=False).logits[0]


class PagedRun:
    """Rows of tokens in a paged cache whose physical blocks are in random order, with a table for each cache group.
    Unwritten slots hold NaN, and so do blocks behind a window, which are given back: reading one shows."""

    def __init__(self, stages: Any, block_size: int = 4, blocks: int = 64, seed: int = 0) -> None:
        self.stages = stages if isinstance(stages, list) else [stages]
        self.block_size = block_size
        self.device = next(self.stages[0].parameters()).device
        geometries = [model_geometry(stage, block_size) for stage in self.stages]
        self.groups = geometries[0].groups
        blocks = max(blocks, 1 + 4 * geometries[0].most_pages(40))
        self.free = (torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1).tolist()
        self.tables: dict[str, list[list[int]]] = {}
        self.computed: dict[str, int] = {}
        self.pools = []
        for stage, geometry in zip(self.stages, geometries, strict=True):
            assert geometry.groups == self.groups
            assign_groups(stage, geometry)
            self.pools.append(KVCache.of(geometry, blocks, self.device))
            self.pools[-1].data.view(torch.uint8).fill_(0xFF)  # NaN in every floating-point format
        self.caches = [pool.layers for pool in self.pools]

    @torch.no_grad()
    def step(self, scheduled: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        """Compute each row's next tokens; logits of all of them, by row."""
        rows = sorted(scheduled, key=lambda row: len(scheduled[row]) > 1)
        tokens: list[int] = []
        positions: list[int] = []
        starts, lengths = [0], []
        for row in rows:
            done = self.computed.get(row, 0)
            end = done + len(scheduled[row])
            for table, group in zip(self.tables.setdefault(row, [[] for _ in self.groups]), self.groups, strict=True):
                while len(table) < (group.pages or -(-end // self.block_size)):
                    table.append(self.free.pop())
            tokens += scheduled[row]
            positions += range(done, end)
            starts.append(starts[-1] + end - done)
            lengths.append(end)
            self.computed[row] = end
        owners = [row for row in rows for _ in scheduled[row]]
        inputs = as_siblings(
            [
                AttentionInputs(
                    slots=self._slots(group, owners, positions),
                    query_starts=self._ints(starts),
                    context_lens=self._ints(lengths),
                    block_tables=self._tables(group, rows),
                    num_rows=len(rows),
                    num_tokens=len(tokens),
                    num_decodes=sum(len(scheduled[row]) == 1 for row in rows),
                    max_query_len=max(len(scheduled[row]) for row in rows),
                    max_context_len=max(lengths),
                )
                for group in range(len(self.groups))
            ]
        )
        hidden = None
        ids, places = self._ints(tokens, torch.int64), self._ints(positions, torch.int64)
        for stage, cache in zip(self.stages, self.caches, strict=True):
            hidden = stage(ids, places, cache, inputs[0], hidden)
        for row in rows:
            self._give_back(row)
        logits = self.stages[-1].logits(hidden)
        return {row: logits[starts[i] : starts[i + 1]] for i, row in enumerate(rows)}

    def _slots(self, group: int, owners: list[str], positions: list[int]) -> torch.Tensor:
        size, is_state = self.block_size, self.groups[group].pages > 0
        blocks = [
            self.tables[row][group][0 if is_state else p // size] for row, p in zip(owners, positions, strict=True)
        ]
        return self._ints([block * size + p % size for block, p in zip(blocks, positions, strict=True)], torch.int64)

    def _tables(self, group: int, rows: list[str]) -> torch.Tensor:
        tables = [self.tables[row][group] for row in rows]
        width = max(map(len, tables)) + (not self.groups[group].pages)
        return self._ints([table + [0] * (width - len(table)) for table in tables])

    def _give_back(self, row: str) -> None:
        """Blocks behind a window are given back; a real table keeps their numbers."""
        for table, group in zip(self.tables[row], self.groups, strict=True):
            if group.kind == "window":
                for index in range(max(0, self.computed[row] - group.window + 1) // self.block_size):
                    if table[index]:
                        self.free.insert(0, table[index])
                        for pool in self.pools:
                            pool.data[table[index]].view(torch.uint8).fill_(0xFF)
                        table[index] = 0

    def _ints(self, values: list[Any], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def in_chunks(stages: Any, tokens: Sequence[int], size: int) -> torch.Tensor:
    """Logits of every token, computed `size` tokens per step."""
    run = PagedRun(stages)
    return torch.cat([run.step({"row": tokens[i : i + size]})["row"] for i in range(0, len(tokens), size)])


def mixed(stages: Any, prompts: Mapping[str, Sequence[int]], budget: Callable[[int, str], int]) -> dict[str, Any]:
    """Logits of every token of several rows that share steps; `budget` gives how many tokens of a row a step takes."""
    run = PagedRun(stages)
    logits: dict[str, list[torch.Tensor]] = {row: [] for row in prompts}
    step = 0
    while True:
        scheduled = {
            row: tokens[(done := run.computed.get(row, 0)) : done + budget(step, row)]
            for row, tokens in prompts.items()
        }
        scheduled = {row: tokens for row, tokens in scheduled.items() if tokens}
        if not scheduled and all(run.computed.get(row, 0) == len(tokens) for row, tokens in prompts.items()):
            return {row: torch.cat(parts) for row, parts in logits.items()}
        for row, part in run.step(scheduled).items() if scheduled else ():
            logits[row].append(part)
        step += 1


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal up to rounding, relative to the size of the logits; and the logits are not flat."""
    assert theirs.std() > 0.3, "a flat reference proves nothing"
    torch.testing.assert_close(ours.to(theirs.device), theirs, rtol=0, atol=1e-4 * theirs.abs().max().item())
