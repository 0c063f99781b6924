"""Layers that take the place of the library's: the same weights under the same names, on this engine's kernels.

The library's layers work on [1, tokens, features], the engine's on [tokens, features]. On the meta device they only
give the shapes of their results, for `trial.py`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from quire.distributed.collectives import all_reduce
from quire.errors import UnsupportedModelError
from quire.kernels.gates import GATES
from quire.kernels.reference import TorchOps
from quire.kernels.weights.base import Weight
from quire.layers.build_context import BuildContext
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.expert_weights import (
    DOWN,
    GATE_UP,
    ROUTER,
    ExpertNaming,
    ExpertShare,
    ExpertWeights,
    QuantizedExperts,
)
from quire.layers.linear import FusedLinear, FusedPart, RowParallelLinear
from quire.loading.weights import AnyTarget, Target
from quire.models.transformers_backend.names import ExpertNames, FullyNamedLayout
from quire.models.transformers_backend.parallel import Cut
from quire.quantization.formats.on_load import OnLoadFormat


@dataclasses.dataclass(frozen=True)
class LibraryMatrix:
    """A matrix of the library's model."""

    name: str
    """Within its module: `q_proj`."""
    inputs: int
    outputs: int
    bias: bool
    transposed: bool
    cut: Cut
    stored: str
    """Its full name in a checkpoint, if that is not the name in the model; else empty."""

    @property
    def fuses_with(self) -> tuple[object, ...]:
        """Matrices for which this is equal can be one product."""
        return self.inputs, self.bias, self.transposed, self.cut

    @property
    def is_plain(self) -> bool:
        """Whether it has no other name in a checkpoint and is stored [out, in]."""
        return not self.stored and not self.transposed

    def parts(self, build: BuildContext) -> list[FusedPart]:
        """The outputs that this rank keeps."""
        if self.cut is Cut.WHOLE:
            return [FusedPart(self.name, self.outputs, slice(0, self.outputs))]
        if self.cut is Cut.OUTPUTS:
            return [FusedPart(self.name, self.outputs, build.ranks.slice(self.outputs, f"{self.name} outputs"))]
        half = self.outputs // 2
        kept = build.ranks.slice(half, f"{self.name} outputs")
        return [FusedPart(self.name, self.outputs, slice(s + kept.start, s + kept.stop)) for s in (0, half)]


def make_matrix_layer(build: BuildContext, matrix: LibraryMatrix) -> nn.Module:
    """The layer for a matrix."""
    return InputCutLinear(build, matrix) if matrix.cut is Cut.INPUTS else JoinedLinear(build, [matrix])


class JoinedLinear(FusedLinear):
    """One matrix; or several that read the same input, as one product (`JoinedPart` gives the result of each)."""

    normed = False

    def __init__(self, build: BuildContext, matrices: Sequence[LibraryMatrix]) -> None:
        parts = [matrix.parts(build) for matrix in matrices]
        first = matrices[0]
        super().__init__(build, first.inputs, [p for each in parts for p in each], first.bias, first.transposed)
        self.widths = [sum(p.keep.stop - p.keep.start for p in each) for each in parts]
        self.in_features, self.out_features = first.inputs, sum(self.widths)
        self._stored = {matrix.name: matrix.stored for matrix in matrices if matrix.stored}
        self._shared: tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_meta:
            return x.new_empty(*x.shape[:-1], self.out_features)
        return super().forward(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """The result of one matrix. The first that is asked for computes all; the trial has shown that the others
        are asked for next, with the same tensor."""
        if self._shared is None or self._shared[0] is not x:
            self._shared = (x, self(x).split(self.widths, dim=-1))
        result = self._shared[1][index]
        if index == len(self.widths) - 1:
            self._shared = None
        return result

    def create_weights(self, build: BuildContext, owner: str) -> None:
        super().create_weights(build, owner)
        _check_renamed(self._stored, self.parts, self.formats)

    def targets(self) -> dict[str, list[AnyTarget]]:
        return _also_stored(super().targets(), self._stored)


class JoinedPart(nn.Module):
    """One of the matrices of a `JoinedLinear`."""

    def __init__(self, whole: JoinedLinear, index: int) -> None:
        super().__init__()
        self._whole = (whole,)  # in a tuple: it is not a part of this module
        self._index = index
        self.in_features, self.out_features = whole.in_features, whole.widths[index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._whole[0].part(self._index, x)


class GateUp(JoinedLinear):
    """Gate and up of a gated MLP; yields the activation of the two."""

    gated = True

    def __init__(self, build: BuildContext, matrices: Sequence[LibraryMatrix], activation: str) -> None:
        super().__init__(build, matrices)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_meta:
            return x.new_empty(*x.shape[:-1], self.out_features // 2)
        flat = x.reshape(-1, x.shape[-1])
        return self.ops.gated_linear(flat, self.weight, self.bias, self.activation).view(*x.shape[:-1], -1)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), for an MLP of the library's that computes this."""

    def __init__(self, gate_up: GateUp, down: nn.Module, name: str) -> None:
        """`name`: of down, in the library's MLP."""
        super().__init__()
        self.gate_up = gate_up
        self.add_module(name, down)
        self._down = (down,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._down[0](self.gate_up(x))


def gate_of(module: nn.Module, inner: Sequence[str], outer: str) -> str | None:
    """The activation, one of `GATES`, of a gated MLP, found by trying it; None: it computes something else.

    `inner`: the names of gate and up, in this order, or of the matrix that has both; `outer`: that of down.
    """
    if any(list(child.parameters()) for name, child in module.named_children() if name not in (*inner, outer)):
        return None
    if next(module.parameters(recurse=False), None) is not None or next(module.buffers(), None) is not None:
        return None
    generator = torch.Generator().manual_seed(0)
    width = 12
    gate, up, down = (torch.randn(*s, generator=generator) / 3 for s in ((width, 8), (width, 8), (8, width)))
    weights = [gate, up] if len(inner) == 2 else [torch.cat([gate, up])]
    same = copy.copy(module)
    same._modules = dict(module._modules)
    for name, weight in zip((*inner, outer), (*weights, down), strict=True):
        same._modules[name] = tried = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        tried.weight = nn.Parameter(weight, requires_grad=False)
    kinds = set(GATES)
    with torch.no_grad():
        for scale in (1.0, 30.0):  # kinds of gelu differ near 0, limits far from it
            x = scale * torch.randn(5, 8, generator=generator)
            try:
                theirs = same(x[None])[0]
            except Exception:
                return None
            if not isinstance(theirs, torch.Tensor) or theirs.shape != x.shape:
                return None
            for kind in list(kinds):
                ours = GATES[kind](x @ gate.t(), x @ up.t()) @ down.t()
                if not torch.allclose(theirs, ours, rtol=0, atol=1e-6 * float(ours.abs().max())):
                    kinds.remove(kind)
    return kinds.pop() if len(kinds) == 1 else None


class InputCutLinear(RowParallelLinear):
    """A matrix of which each rank has some inputs; the results are summed."""

    def __init__(self, build: BuildContext, matrix: LibraryMatrix) -> None:
        super().__init__(build, matrix.name, matrix.inputs, matrix.outputs, matrix.bias, matrix.transposed)
        self.in_features, self.out_features = self.part.width, matrix.outputs
        self._stored = {matrix.name: matrix.stored} if matrix.stored else {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_meta:
            assert x.shape[-1] == self.in_features, f"{self.part.name} has {self.in_features} inputs, got {x.shape}"
            return x.new_empty(*x.shape[:-1], self.out_features)
        return super().forward(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    def create_weights(self, build: BuildContext, owner: str) -> None:
        super().create_weights(build, owner)
        _check_renamed(self._stored, [self.part], self.formats)

    def targets(self) -> dict[str, list[AnyTarget]]:
        return _also_stored(super().targets(), self._stored)


def _check_renamed(stored: Mapping[str, str], parts: Sequence[Any], formats: Sequence[Any]) -> None:
    for part, found in zip(parts, formats, strict=True):
        if part.name in stored and found is not None and not isinstance(found, OnLoadFormat):
            raise UnsupportedModelError(
                f"{stored[part.name]} is {found.describe()}, and the model has another name for it: quantized "
                "checkpoints of such models are not implemented"
            )


def _also_stored(targets: dict[str, list[AnyTarget]], stored: Mapping[str, str]) -> dict[str, list[AnyTarget]]:
    """The targets, which a checkpoint may also have under the names `stored` of their modules."""
    result = dict(targets)
    for name, wanted in targets.items():
        module, _, kind = name.rpartition(".")
        if module in stored:
            result[name] = renamed(wanted, f"{stored[module]}.{kind}")
    return result


def renamed(wanted: Sequence[AnyTarget], name: str) -> list[AnyTarget]:
    """Targets that a checkpoint may have under another name."""
    layout = FullyNamedLayout((name,), lambda: {name: list(wanted)})
    return [dataclasses.replace(target, layouts=(layout,)) for target in wanted]


class TokenEmbedding(VocabEmbedding):
    """The embedding of a step's tokens [1, tokens]."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.is_meta:
            return torch.empty(*tokens.shape, self.part.shape[1], device="meta", dtype=self.dtype)
        return super().forward(tokens.flatten()).view(*tokens.shape, -1)

    def __init__(self, build: BuildContext, name: str) -> None:
        super().__init__(build, name)
        self.dtype = build.dtype


class Head(LMHead):
    """The head, for hidden states [1, tokens, hidden]."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.is_meta:
            return hidden.new_empty(*hidden.shape[:-1], self.part.shape[0])
        return super().forward(hidden.flatten(0, -2)).view(*hidden.shape[:-1], -1)


class Norm(nn.Module):
    """x / rms(x) * weight, for a norm of the library's that computes this."""

    def __init__(self, build: BuildContext, name: str, size: int, eps: float) -> None:
        super().__init__()
        self.ops = build.ops
        self.name = name
        self.eps = self.variance_epsilon = eps
        self.weight = build.parameter(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_meta:
            return torch.empty_like(x)
        return self.ops.rms_norm(x.reshape(-1, x.shape[-1]), self.weight, self.eps).view(x.shape)

    def targets(self) -> dict[str, list[AnyTarget]]:
        """The weight, whole."""
        return {f"{self.name}.weight": [Target(self.weight, tuple(self.weight.shape))]}


def rms_norm_eps(module: nn.Module) -> float | None:
    """The eps of a module that is an RMS norm with a plain weight, found by trying it; None: it is not."""
    found = (getattr(module, name, None) for name in ("variance_epsilon", "eps", "epsilon"))
    eps = next((each for each in found if isinstance(each, float)), None)
    weights = dict(module.named_parameters())
    if eps is None or list(weights) != ["weight"] or weights["weight"].dim() != 1:
        return None
    if next(module.buffers(), None) is not None or next(module.children(), None) is not None:
        return None
    generator = torch.Generator().manual_seed(0)
    size = weights["weight"].shape[0]
    weight = nn.Parameter(torch.randn(size, generator=generator), requires_grad=False)
    same = copy.copy(module)
    same._parameters = {"weight": weight}
    with torch.no_grad():
        for scale in (1.0, eps**0.5):  # eps matters for small values only
            x = scale * torch.randn(3, size, generator=generator)
            try:
                theirs = same(x)
            except Exception:
                return None
            if not isinstance(theirs, torch.Tensor) or theirs.shape != x.shape:
                return None
            if not torch.allclose(theirs, TorchOps().rms_norm(x, weight, eps), rtol=1e-4, atol=1e-5):
                return None
    return eps


class Experts(nn.Module):
    """The experts of a sparse layer: the library routes, these compute."""

    gate_up: Weight
    down: Weight

    def __init__(
        self, build: BuildContext, name: str, count: int, hidden: int, width: int, names: ExpertNames | None, cut: bool
    ) -> None:
        """`name`: within its module. `names`: those of single matrices in a checkpoint. `cut`: ranks share experts."""
        super().__init__()
        self.ops, self.ranks = build.ops, build.ranks
        self.name, self.names, self.hidden, self.is_cut = name, names, hidden, cut
        self.num_experts = count
        self.share = ExpertShare.of_rank(build.ranks, count, width)
        if not cut:
            self.share = ExpertShare(count, width, range(count), slice(0, width))

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the results of each token's experts. Arguments as in the library."""
        if x.is_meta:
            return torch.empty_like(x)
        flat = x.reshape(-1, x.shape[-1])
        top_k = experts.shape[-1]
        out = self.ops.experts(
            flat, weights.reshape(-1, top_k).float(), experts.reshape(-1, top_k).int(), self.gate_up, self.down
        )
        return (all_reduce(out, self.ranks) if self.is_cut else out).view(x.shape)

    def create_weights(self, build: BuildContext, owner: str) -> None:
        """Make the stacks in the format that the checkpoint has them in."""
        self._owner = owner
        names = self.names
        self._namings = [] if names is None else [ExpertNaming("router", names.gate, names.up, names.down)]
        self._quantized = None
        if build.scheme is not None:
            if not self._namings:
                raise UnsupportedModelError(f"quantized experts of {owner}.{self.name} are not implemented")
            self._quantized = QuantizedExperts.find(build, "", self.share, self.hidden, self._namings[0])
        if self._quantized is not None:
            self.gate_up, self.down = self._quantized.gate_up, self._quantized.down
            return
        count, width = self.num_experts, self.share.width
        self.gate_up = build.parameter(count, 2 * width, self.hidden)
        self.down = build.parameter(count, self.hidden, width)

    def targets(self) -> dict[str, list[AnyTarget]]:
        """The rank's part of the experts, stacked or one by one."""
        router = torch.empty(self.num_experts, self.hidden, device="meta")
        if self._quantized is not None:
            found = self._quantized.targets(router, self._namings)
        else:
            found = ExpertWeights(router, self.gate_up, self.down, self.share, self._namings).targets()
        own = {GATE_UP: f"{self.name}.gate_up_proj", DOWN: f"{self.name}.down_proj"}
        return {
            own[name] if name in own else self._relative(name): [_fully_named(target) for target in wanted]
            for name, wanted in found.items()
            if name not in (ROUTER, "router")
        }

    def _relative(self, name: str) -> str:
        if not name.startswith(f"{self._owner}."):
            raise UnsupportedModelError(
                f"{name} is quantized, and the model has another name for it: quantized checkpoints of such models "
                "are not implemented"
            )
        return name.removeprefix(f"{self._owner}.")


def _fully_named(target: AnyTarget) -> AnyTarget:
    layouts = tuple(FullyNamedLayout(layout.names, layout.targets) for layout in target.layouts)
    return dataclasses.replace(target, layouts=layouts)


class OwnWeights(nn.Module):
    """Parameters and buffers of the layers that stay the library's, by their full names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], stored: Mapping[str, str]) -> None:
        """`stored`: names in a checkpoint, where they differ."""
        super().__init__()
        self._tensors = (dict(tensors),)
        self._stored = stored

    def targets(self) -> dict[str, list[AnyTarget]]:
        """Each tensor, whole."""
        found: dict[str, list[AnyTarget]] = {}
        for name, tensor in self._tensors[0].items():
            wanted: list[AnyTarget] = [Target(tensor, tuple(tensor.shape))]
            found[name] = renamed(wanted, self._stored[name]) if name in self._stored else wanted
        return found
