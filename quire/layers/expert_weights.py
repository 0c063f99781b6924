"""Names of a sparse MLP's tensors in a checkpoint, and the part of them that a rank keeps.

Checkpoints hold the experts stacked in two tensors, or one by one in thousands, under names that differ from family to
family; an `ExpertNaming` is one way to name them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from quire.distributed.groups import Ranks
from quire.kernels.weights.base import QuantizedWeight, Weight
from quire.layers.build_context import BuildContext
from quire.layers.matrices import MatrixPart, assembly_targets, formats_of, one_format, rounded_target
from quire.loading.weights import AnyTarget, AssemblyPart, Target, TensorLayout
from quire.quantization.formats.base import Format
from quire.quantization.formats.on_load import OnLoadFormat


@dataclass(frozen=True)
class ExpertShare:
    """The experts of this rank, by their numbers in the whole model, and the features it keeps of each."""

    total: int
    """Experts in the whole model."""
    total_width: int
    """Features of a whole expert."""
    experts: Sequence[int]
    features: slice

    @classmethod
    def of_rank(cls, ranks: Ranks, total: int, width: int) -> ExpertShare:
        """Every expert, an equal share of each one's features."""
        return cls(total, width, range(total), ranks.slice(width, "expert features"))

    @property
    def runs(self) -> list[tuple[int, range]]:
        """The experts as ranges of consecutive numbers, each with the index of its first."""
        runs: list[tuple[int, range]] = []
        for place, expert in enumerate(self.experts):
            if runs and expert == runs[-1][1].stop:
                begin, run = runs[-1]
                runs[-1] = (begin, range(run.start, expert + 1))
            else:
                runs.append((place, range(expert, expert + 1)))
        return runs

    @property
    def is_whole(self) -> bool:
        """Whether it is all experts, whole and in order."""
        return self.width == self.total_width and list(self.experts) == list(range(self.total))

    @property
    def width(self) -> int:
        """Features kept of each expert."""
        return self.features.stop - self.features.start


@dataclass(frozen=True)
class ExpertNaming:
    """Names of a sparse MLP's tensors, relative to the decoder layer.

    `{}` is an expert's number; a name without it is one tensor with all experts. If it is the same for gate and up,
    the tensor has the gate rows of each expert, then its up rows.
    """

    router: str
    gate: str
    up: str
    down: str

    def of(self, matrix: str) -> str:
        """The tensor name of a matrix: "gate", "up" or "down"."""
        return {"gate": self.gate, "up": self.up, "down": self.down}[matrix]


STACKED_APART = ExpertNaming(
    "mlp.gate.weight", "mlp.experts.gate_proj.weight", "mlp.experts.up_proj.weight", "mlp.experts.down_proj.weight"
)
"""GGUF files, by the names that loading/gguf_names.py gives their tensors."""
ONE_BY_ONE = ExpertNaming(
    "mlp.gate.weight",
    "mlp.experts.{}.gate_proj.weight",
    "mlp.experts.{}.up_proj.weight",
    "mlp.experts.{}.down_proj.weight",
)
# How transformers 5 holds every mixture in memory, and may save it.
ROUTER, GATE_UP, DOWN = "mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


@dataclass(frozen=True)
class _Matrix:
    """One matrix of every expert, and this rank's part of it."""

    into: torch.Tensor
    """[experts kept, rows kept, columns kept]"""
    shape: tuple[int, int]
    """Shape of one expert's whole matrix."""
    keep: tuple[slice, slice]

    def names(self, name: str, share: ExpertShare) -> list[str]:
        """The tensors that a name or a pattern of names matches."""
        return [name.format(expert) for expert in range(share.total)] if "{}" in name else [name]

    def targets(self, name: str, share: ExpertShare) -> dict[str, list[Target]]:
        """The targets of those tensors; none for experts that other ranks keep."""
        if "{}" not in name:
            return {name: self.stacked(share)}
        keep = _unless_whole(self.keep, self.shape)
        kept = dict(zip(share.experts, self.into, strict=True))
        return {
            name.format(expert): [Target(kept[expert], self.shape, keep)] if expert in kept else []
            for expert in range(share.total)
        }

    def stacked(self, share: ExpertShare, before: int = 0, after: int = 0) -> list[Target]:
        """All experts in one tensor, where each has `before` and `after` rows of another matrix around its own."""
        shape = (share.total, before + self.shape[0] + after, self.shape[1])
        rows, columns = self.keep
        inside = (slice(before + rows.start, before + rows.stop), columns)
        return [
            Target(
                self.into[place : place + len(run)],
                shape,
                _unless_whole((slice(run.start, run.stop), *inside), shape),
            )
            for place, run in share.runs
        ]


@dataclass(frozen=True)
class _RoundedMatrix:
    """The same for experts that are rounded to few bits while loading."""

    into: QuantizedWeight
    """[experts kept, rows kept, columns kept], with other rows around them: this matrix is `rows`."""
    rows: slice
    shape: tuple[int, int]
    keep: tuple[slice, slice]
    format: OnLoadFormat

    def names(self, name: str, share: ExpertShare) -> list[str]:
        return [name.format(expert) for expert in range(share.total)] if "{}" in name else [name]

    def targets(self, name: str, share: ExpertShare) -> dict[str, list[AssemblyPart]]:
        if "{}" not in name:
            return {name: self.stacked(share)}
        kept = {expert: place for place, expert in enumerate(share.experts)}
        whole = _unless_whole((self.keep[0], slice(0, self.shape[1])), self.shape)
        return {
            name.format(expert): [self._part(kept[expert], self.shape, whole)] if expert in kept else []
            for expert in range(share.total)
        }

    def stacked(self, share: ExpertShare, before: int = 0, after: int = 0) -> list[AssemblyPart]:
        shape = (share.total, before + self.shape[0] + after, self.shape[1])
        rows = slice(before + self.keep[0].start, before + self.keep[0].stop)
        return [
            self._part(place, shape, (slice(expert, expert + 1), rows)) for place, expert in enumerate(share.experts)
        ]

    def _part(self, place: int, shape: tuple[int, ...], keep: tuple[slice, ...]) -> AssemblyPart:
        part = MatrixPart("", self.shape, *self.keep)
        return rounded_target(self.into[place], part, self.format, self.rows, shape, keep)


def _unless_whole(keep: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """`keep`; empty if it is everything, so that bytes can be copied from the file unchanged."""
    return () if all(part == slice(0, size) for part, size in zip(keep, shape, strict=True)) else keep


_AnyMatrix: TypeAlias = "_Matrix | _RoundedMatrix"


@dataclass(frozen=True)
class ExpertWeights:
    """The parameters of a sparse MLP, and the names of their tensors."""

    router: torch.Tensor
    """[experts, hidden]"""
    gate_up: Weight
    """[experts kept, 2 * width kept, hidden]"""
    down: Weight
    """[experts kept, hidden, width kept]"""
    share: ExpertShare
    namings: Sequence[ExpertNaming]
    """The ways checkpoints may name them, besides the stacked one."""
    rounding: tuple[OnLoadFormat, OnLoadFormat] | None = None
    """Of gate and up, and of down, if they are rounded to few bits while loading."""

    def targets(self) -> dict[str, list[AnyTarget]]:
        """Router and experts, stacked; alternatively under other names or one by one, if the checkpoint has them so."""
        share, (gate, up, down) = self.share, self._matrices()
        width = share.total_width
        shape = (share.total, 2 * width, self.router.shape[1])
        gate_up: list[AnyTarget] = [*gate.stacked(share, after=width), *up.stacked(share, before=width)]
        if share.is_whole and isinstance(self.gate_up, torch.Tensor):
            gate_up = [Target(self.gate_up, shape)]
        router = Target(self.router, tuple(self.router.shape))
        return {
            ROUTER: [replace(router, layouts=self._router_layouts(router))],
            GATE_UP: [replace(target, layouts=self._layouts({"gate": gate, "up": up}, gate_up)) for target in gate_up],
            DOWN: [replace(target, layouts=self._layouts({"down": down})) for target in down.stacked(share)],
        }

    def _matrices(self) -> tuple[_AnyMatrix, _AnyMatrix, _AnyMatrix]:
        """Gate, up and down."""
        features, width, hidden = self.share.features, self.share.total_width, self.router.shape[1]
        tall, wide = ((width, hidden), (features, slice(0, hidden))), ((hidden, width), (slice(0, hidden), features))
        if self.rounding is not None:
            assert isinstance(self.gate_up, QuantizedWeight) and isinstance(self.down, QuantizedWeight)
            kept, (first, second) = self.share.width, self.rounding
            return (
                _RoundedMatrix(self.gate_up, slice(0, kept), *tall, first),
                _RoundedMatrix(self.gate_up, slice(kept, 2 * kept), *tall, first),
                _RoundedMatrix(self.down, slice(0, hidden), *wide, second),
            )
        assert isinstance(self.gate_up, torch.Tensor) and isinstance(self.down, torch.Tensor)
        gate, up = self.gate_up.split(self.share.width, dim=1)
        return _Matrix(gate, *tall), _Matrix(up, *tall), _Matrix(self.down, *wide)

    def _router_layouts(self, target: Target) -> tuple[TensorLayout, ...]:
        names = {naming.router for naming in self.namings} - {ROUTER}
        return tuple(TensorLayout((name,), lambda name=name: {name: [target]}) for name in names)  # type: ignore[misc]

    def _layouts(self, matrices: Mapping[str, _AnyMatrix], pair: Sequence[AnyTarget] = ()) -> tuple[TensorLayout, ...]:
        """For each naming, the tensors that together hold these matrices. `pair`: the targets of gate and up in one."""

        def layout(naming: ExpertNaming) -> TensorLayout:
            if pair and naming.gate == naming.up:
                return TensorLayout((naming.gate,), lambda: {naming.gate: pair})
            named = [(naming.of(kind), matrix) for kind, matrix in matrices.items()]
            return TensorLayout(
                tuple(full for name, matrix in named for full in matrix.names(name, self.share)),
                lambda: {k: t for name, matrix in named for k, t in matrix.targets(name, self.share).items()},
            )

        return tuple(map(layout, self.namings))


def ungated_targets(
    router: torch.Tensor, up: torch.Tensor, down: torch.Tensor, share: ExpertShare, owner: str
) -> dict[str, list[AnyTarget]]:
    """The tensors of a mixture whose experts have no gate: stacked, in two ways, or one by one. `owner`: the mixture's
    name, relative to the decoder layer; `up` and `down`: [experts kept, width kept, inputs] and its transpose."""
    width, inputs, features, every = share.total_width, up.shape[2], share.features, slice(0, up.shape[2])
    collected: dict[str, list[AnyTarget]] = {f"{owner}.gate.weight": [Target(router, tuple(router.shape))]}
    for name, matrix in (
        ("up_proj", _Matrix(up, (width, inputs), (features, every))),
        ("down_proj", _Matrix(down, (inputs, width), (every, features))),
    ):
        layouts = tuple(
            TensorLayout(
                tuple(matrix.names(pattern, share)),
                lambda matrix=matrix, pattern=pattern: matrix.targets(pattern, share),  # type: ignore[misc]
            )
            for pattern in (f"{owner}.experts.{{}}.{name}.weight", f"{owner}.experts.{name}.weight")
        )
        stack = matrix.stacked(share)
        collected[f"{owner}.experts.{name}"] = [replace(target, layouts=layouts) for target in stack]
    return collected


@dataclass(frozen=True)
class QuantizedExperts:
    """The experts of a sparse MLP in few bits: a checkpoint matrix for each expert and projection."""

    gate_up: QuantizedWeight
    """[experts kept, 2 * width kept, hidden]"""
    down: QuantizedWeight
    share: ExpertShare
    naming: ExpertNaming
    formats: tuple[Format, Format]
    """Of gate and up; of down."""

    @classmethod
    def find(
        cls, build: BuildContext, owner: str, share: ExpertShare, hidden: int, naming: ExpertNaming
    ) -> QuantizedExperts | None:
        """The experts of the layer `owner`; None if they are in the activations' dtype."""
        if build.scheme is None:
            return None
        tall = [part for expert in share.experts for part in _tall_parts(share, hidden, naming, expert)]
        wide = [_down_part(share, hidden, naming, expert) for expert in share.experts]
        first = one_format(owner, [part.name for part in tall], formats_of(build, owner, tall))
        second = one_format(owner, [part.name for part in wide], formats_of(build, owner, wide))
        if first is None and second is None:
            return None
        if first is None or second is None:
            one_format(owner, [tall[0].name, wide[0].name], [first, second])
        assert first is not None and second is not None
        count, width, zeros = len(share.experts), share.width, build.memory.zeros
        gate_up = first.allocate((count, 2 * width, hidden), build.dtype, zeros, (0, width))
        return cls(gate_up, second.allocate((count, hidden, width), build.dtype, zeros), share, naming, (first, second))

    def targets(self, router: torch.Tensor, namings: Sequence[ExpertNaming]) -> dict[str, list[AnyTarget]]:
        """The router, and the tensors of every expert. `namings`: the ways checkpoints may name them in 16 bits."""
        gate_up, down = self.formats
        if isinstance(gate_up, OnLoadFormat) and isinstance(down, OnLoadFormat):
            rounding = (gate_up, down)
            return ExpertWeights(router, self.gate_up, self.down, self.share, namings, rounding).targets()
        share, hidden, width = self.share, self.down.shape[1], self.share.width
        collected: dict[str, list[AnyTarget]] = {self.naming.router: [Target(router, tuple(router.shape))]}
        first, second = self.formats
        for place, expert in enumerate(share.experts):
            matrix = self.gate_up[place]
            for index, part in enumerate(_tall_parts(share, hidden, self.naming, expert)):
                rows = slice(index * width, (index + 1) * width)
                stacked = (STACKED_APART.gate, STACKED_APART.up)[index]
                collected |= _or_stacked(assembly_targets(matrix, part, first, rows), stacked, expert, share.total)
            part = _down_part(share, hidden, self.naming, expert)
            targets = assembly_targets(self.down[place], part, second, slice(0, hidden))
            collected |= _or_stacked(targets, STACKED_APART.down, expert, share.total)
        for expert in set(range(share.total)) - set(share.experts):  # on other ranks
            others = [*_tall_parts(share, hidden, self.naming, expert), _down_part(share, hidden, self.naming, expert)]
            for part, found in zip(others, (first, first, second), strict=True):
                collected |= {f"{part.name}.{key}": [] for key in found.stored(part.shape, part.rows, part.columns)}
        return collected


SHARED_EXPERTS = "mlp.shared_experts"
"""The module of shared experts in most checkpoints, relative to the decoder layer."""


def shared_names(owner: str = SHARED_EXPERTS) -> tuple[str, str, str]:
    """The tensors of shared experts: gate, up, down."""
    return f"{owner}.gate_proj.weight", f"{owner}.up_proj.weight", f"{owner}.down_proj.weight"


def shared_targets(
    gate_up: torch.Tensor, down: torch.Tensor, share: ExpertShare, owner: str = SHARED_EXPERTS
) -> dict[str, list[AnyTarget]]:
    """The tensors of shared experts, held as stacks [shared, 2 * width kept, hidden] and [shared, hidden, width kept].

    A checkpoint has one matrix for all of them, under `owner`: an expert is `total_width` adjacent features of it.
    """
    if not len(gate_up):
        return {}
    width, features, hidden = share.total_width, share.features, down.shape[1]
    tall, wide = (len(gate_up) * width, hidden), (hidden, len(gate_up) * width)
    halves = gate_up.split(share.width, dim=1)
    names = shared_names(owner)
    collected: dict[str, list[AnyTarget]] = {name: [] for name in names}
    for place in range(len(gate_up)):
        rows = slice(place * width + features.start, place * width + features.stop)
        for name, half in zip(names[:2], halves, strict=True):
            collected[name].append(Target(half[place], tall, _unless_whole((rows,), tall[:1])))
        keep = _unless_whole((slice(0, hidden), rows), wide)
        collected[names[2]].append(Target(down[place], wide, keep))
    return collected


def _or_stacked(targets: Mapping[str, AnyTarget], name: str, expert: int, total: int) -> dict[str, list[AnyTarget]]:
    """One expert's tensors; if it is only one, alternatively its part of the tensor `name` of all experts."""
    ((_, only), *more) = targets.items()
    if more or not isinstance(only, AssemblyPart):
        return {own: [target] for own, target in targets.items()}
    apart = only.assembly
    together = replace(apart, place=lambda read: apart.place({key: part[0] for key, part in read.items()}))
    keep = (slice(expert, expert + 1), *only.keep)
    stacked = replace(only, assembly=together, shape=(total, *only.shape), keep=keep)
    layout = TensorLayout((name,), lambda: {name: [stacked]})
    return {own: [replace(target, layouts=(layout,))] for own, target in targets.items()}


def _tall_parts(share: ExpertShare, hidden: int, naming: ExpertNaming, expert: int) -> list[MatrixPart]:
    """An expert's gate and up."""
    shape, columns = (share.total_width, hidden), slice(0, hidden)
    names = (naming.gate, naming.up)
    return [MatrixPart(_module(name, expert), shape, share.features, columns) for name in names]


def _down_part(share: ExpertShare, hidden: int, naming: ExpertNaming, expert: int) -> MatrixPart:
    shape, rows = (hidden, share.total_width), slice(0, hidden)
    return MatrixPart(_module(naming.down, expert), shape, rows, share.features)


def _module(name: str, expert: int) -> str:
    return name.format(expert).removesuffix(".weight")
