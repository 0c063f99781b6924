"""Puts the engine's layers in the places of the library's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from quire.errors import ConfigError, UnsupportedModelError
from quire.layers.build_context import BuildContext
from quire.models.transformers_backend.layers import (
    Experts,
    GatedMLP,
    GateUp,
    Head,
    JoinedLinear,
    JoinedPart,
    LibraryMatrix,
    Norm,
    TokenEmbedding,
    gate_of,
    make_matrix_layer,
    rms_norm_eps,
)
from quire.models.transformers_backend.names import CheckpointNames
from quire.models.transformers_backend.parallel import Cut, ParallelPlan
from quire.models.transformers_backend.trial import Trial


class Replacement:
    """The layers of one model: which of the engine's take the place of which of the library's."""

    def __init__(self, build: BuildContext, library: Any) -> None:
        self.build = build
        self.plan = _parallel_plan(build, library)
        self.names = CheckpointNames(library)
        self.tied: set[str] = set()
        """Tensors that a checkpoint may have a second time."""

    def run(self, library: Any, base: nn.Module, trial: Trial, joins: bool) -> None:
        """Put the engine's layers in the places of the library's. `joins`: matrices that read the same input become
        one."""
        build = self.build
        plan, names = self.plan, self.names
        modules = dict(library.named_modules())
        paths = {id(module): path for path, module in modules.items()}
        for path in trial.experts:
            _put(library, path, _experts(build, path, modules[path], names, plan))
        mixtures = {path.rpartition(".")[0]: modules[path].num_experts for path in trial.experts}
        matrices: dict[str, LibraryMatrix] = {}
        head = library.get_output_embeddings()
        for path, module in modules.items():
            owner, _, name = path.rpartition(".")
            if module is head or type(module) not in (nn.Linear, Conv1D):
                continue
            transposed = type(module) is Conv1D
            outputs, inputs = reversed(module.weight.shape) if transposed else module.weight.shape
            if any(path.startswith(f"{mixture}.") and outputs == count for mixture, count in mixtures.items()):
                continue  # a router is small, and never in few bits
            stored = names.stored(f"{path}.weight").removesuffix(".weight")
            cut = plan.cut(path)
            has_bias = module.bias is not None
            matrices[path] = LibraryMatrix(
                name, inputs, outputs, has_bias, transposed, cut, "" if stored == path else stored
            )
        groups = _groups(trial.siblings, matrices) if joins else [[path] for path in matrices]
        owned: dict[str, list[str]] = {}
        for path in matrices:
            owned.setdefault(path.rpartition(".")[0], []).append(path)
        for owner, own in owned.items():
            self._replace_mlp(library, owner, modules[owner], own, groups, matrices)
        for group in groups:
            owner = group[0].rpartition(".")[0]
            if len(group) == 1:
                _put(library, group[0], make_matrix_layer(build, matrices[group[0]]))
                continue
            joined = JoinedLinear(build, [matrices[path] for path in group])
            modules[owner].add_module("_".join(matrices[path].name for path in group), joined)
            for index, path in enumerate(group):
                _put(library, path, JoinedPart(joined, index))
        for path, module in modules.items():
            name = path.rpartition(".")[2]
            eps = rms_norm_eps(module)
            if eps is not None and names.stored(f"{path}.weight") == f"{path}.weight":
                _put(library, path, Norm(build, name, module.weight.shape[0], eps))
        self._replace_ends(library, base, names, paths)

    def _replace_mlp(
        self,
        library: Any,
        owner: str,
        module: nn.Module,
        own: list[str],
        groups: list[list[str]],
        matrices: dict[str, LibraryMatrix],
    ) -> None:
        """If a module with the matrices `own` is a gated MLP, put the engine's in its place; its groups are removed."""
        inner = next((group for group in groups if group[0] in own and len(group) == len(own) - 1), None)
        if inner is None or len(own) not in (2, 3):
            return
        (outer,) = set(own) - {*inner}
        first, down = [matrices[path] for path in inner], matrices[outer]
        halves = sum(matrix.outputs for matrix in first) == 2 * down.inputs and first[0].inputs == down.outputs
        if not halves or len({matrix.outputs for matrix in first}) > 1:
            return
        if not all(matrix.is_plain for matrix in (*first, down)):
            return
        # One matrix that is cut must be cut in both halves, two matrices each.
        if first[0].cut not in (Cut.WHOLE, Cut.PACKED_OUTPUTS if len(first) == 1 else Cut.OUTPUTS):
            return
        for order in (first, first[::-1])[: len(first)]:
            kind = gate_of(module, [matrix.name for matrix in order], down.name)
            if kind is not None:
                layer = GatedMLP(GateUp(self.build, order, kind), make_matrix_layer(self.build, down), down.name)
                _put(library, owner, layer)
                groups.remove(inner)
                groups.remove([outer])
                return

    def _replace_ends(self, library: Any, base: Any, names: CheckpointNames, paths: dict[int, str]) -> None:
        """Embedding and head."""
        build = self.build
        config = build.config
        embedding, head = base.get_input_embeddings(), library.get_output_embeddings()
        own_embedding = None
        if type(embedding) is nn.Embedding and embedding.weight.shape == (config.vocab_size, config.hidden_size):
            path = paths[id(embedding)]
            if names.stored(f"{path}.weight") == f"{path}.weight":
                own_embedding = TokenEmbedding(build, path.rpartition(".")[2])
                _put(library, path, own_embedding)
        is_plain = type(head) is nn.Linear and head.weight.shape == (config.vocab_size, config.hidden_size)
        if head is None or not is_plain or head.bias is not None:
            if head is not None and head.weight is embedding.weight:
                raise UnsupportedModelError(
                    f"{config.architecture}: a head of this kind with tied weights is not implemented"
                )
            return  # the library's own
        path = paths[id(head)]
        name = path.rpartition(".")[2]
        tied: Any = None
        if head.weight is embedding.weight:
            self.tied.add(f"{path}.weight")
            tied = embedding if own_embedding is None else own_embedding
            if own_embedding is None and build.ranks.tp_size > 1:
                # The library's embedding is whole on every rank, and the head is split: it has a copy.
                tied, name = None, paths[id(embedding)]
        _put(library, path, Head(build, name, tied))


def _parallel_plan(build: BuildContext, library: Any) -> ParallelPlan:
    """The library's plan; empty with one rank. Raises if it has none and there are several."""
    architecture, size = build.config.architecture, build.ranks.tp_size
    if size == 1:
        return ParallelPlan(architecture, {})
    if not getattr(library.config, "base_model_tp_plan", None):
        raise ConfigError(
            f"{architecture} runs through transformers, which has no plan to share it between ranks: set "
            "tensor_parallel_size to 1",
            "tensor_parallel_size",
            size,
        )
    return ParallelPlan(architecture, library.tp_plan)


def _experts(build: BuildContext, path: str, module: Any, names: CheckpointNames, plan: ParallelPlan) -> Experts:
    """The engine's experts for the library's. Raises for kinds that its kernels do not compute."""
    refused = [
        word
        for word, is_so in {
            "without a gate": not module.has_gate,
            "with biases": module.has_bias,
            "with transposed weights": module.is_transposed,
            "with interleaved gates": not getattr(module, "is_concatenated", True),
            "with a norm after each": getattr(module, "has_post_expert_norm", False),
        }.items()
        if is_so
    ]
    if not refused and not _is_silu_gate(module):
        refused = ["with another activation than silu"]
    if not refused and (extra := {name for name, _ in module.named_parameters()} - {"gate_up_proj", "down_proj"}):
        refused = [f"with {', '.join(sorted(extra))}"]
    if refused:
        raise UnsupportedModelError(
            f"{build.config.architecture}: experts {refused[0]} are not implemented through transformers"
        )
    count, hidden, width = module.down_proj.shape
    cuts = {plan.cut(f"{path}.gate_up_proj"), plan.cut(f"{path}.down_proj")}
    if cuts not in ({Cut.WHOLE}, {Cut.PACKED_OUTPUTS, Cut.INPUTS}):
        raise UnsupportedModelError(f"{build.config.architecture}: ranks cannot share {path} as its plan says")
    return Experts(build, path.rpartition(".")[2], count, hidden, width, names.experts(path), cuts != {Cut.WHOLE})


def _is_silu_gate(module: Any) -> bool:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    gate, up = x.chunk(2, dim=-1)
    try:
        return torch.allclose(module._apply_gate(x), F.silu(gate) * up, atol=1e-5)
    except Exception:
        return False


def _groups(siblings: Sequence[Sequence[str]], matrices: dict[str, LibraryMatrix]) -> list[list[str]]:
    """The matrices, those together that read one input in one module and are cut alike."""
    groups: list[list[str]] = []
    seen: set[str] = set()
    for group in siblings:
        run: list[str] = []
        for path in group:
            if path not in matrices or path in seen:
                run = []
                continue
            seen.add(path)
            previous = run[-1] if run else None
            joins = (
                previous is not None
                and previous.rpartition(".")[0] == path.rpartition(".")[0]
                and matrices[previous].fuses_with == matrices[path].fuses_with
                and matrices[path].cut is not Cut.INPUTS
            )
            if joins:
                run.append(path)
            else:
                groups.append(run := [path])
    return groups + [[path] for path in matrices if path not in seen]


def _put(root: nn.Module, path: str, module: nn.Module) -> None:
    owner, _, name = path.rpartition(".")
    root.get_submodule(owner)._modules[name] = module
