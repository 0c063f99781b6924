"""Makes the matrices of layers in the formats that a checkpoint has them in, and says which tensors fill them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from quire.errors import CheckpointError, ConfigError, UnsupportedModelError
from quire.kernels.weights.base import QuantizedWeight, SplitWeight, Weight
from quire.layers.build_context import BuildContext
from quire.loading.weights import AnyTarget, Assembly, AssemblyPart, Target
from quire.quantization.formats.base import Format, StoredPart
from quire.quantization.formats.on_load import DTYPES, OnLoadFormat


@dataclass(frozen=True)
class MatrixPart:
    """Outputs of a fused weight: the checkpoint matrix they come from, and what this rank keeps of it."""

    name: str
    """The matrix, relative to the module that owns the layer: `q_proj` for `q_proj.weight`."""
    shape: tuple[int, int]
    """Of the whole matrix [out, in]."""
    rows: slice
    """The outputs this rank keeps."""
    columns: slice
    """The inputs this rank keeps."""
    arrange: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Reorders the kept outputs."""
    transposed: bool = False
    """The checkpoint holds [in, out], as GPT-2's does."""

    @property
    def height(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def width(self) -> int:
        return self.columns.stop - self.columns.start


def formats_of(build: BuildContext, owner: str, parts: Sequence[MatrixPart]) -> list[Format | None]:
    """The format of every part; None: the activations' dtype."""
    return [_format_of(build, f"{owner}.{part.name}" if owner else part.name, part) for part in parts]


def _format_of(build: BuildContext, module: str, part: MatrixPart) -> Format | None:
    found = None if build.scheme is None else build.scheme.format_of(module)
    if found is None:
        return None
    if (part.transposed or part.arrange is not None) and not isinstance(found, OnLoadFormat):
        raise UnsupportedModelError(
            f"{module} is {found.describe()}: quantized weights of {build.config.architecture} are not implemented, "
            "because its checkpoints store this matrix in another order"
        )
    try:
        found.check_cut(part.shape, part.rows, part.columns)
    except ValueError as error:
        if build.ranks.tp_size == 1:
            raise UnsupportedModelError(f"{module} ({found.describe()}): {error}") from error
        raise ConfigError(
            f"{module} ({found.describe()}) cannot be split over {build.ranks.tp_size} tensor-parallel ranks: {error}",
            "tensor_parallel_size",
            build.ranks.tp_size,
        ) from error
    return found


def make_matrix(
    build: BuildContext, parts: Sequence[MatrixPart], formats: Sequence[Format | None], height: int
) -> Weight:
    """A weight [height, in] for these parts, one above the other, without values.

    `height`: at least the sum of the parts'; the rest is padding.
    """
    if all(each is None for each in formats):
        return build.parameter(height, parts[0].width)
    if len(set(formats)) == 1:
        assert formats[0] is not None
        return formats[0].allocate((height, parts[0].width), build.dtype, build.memory.zeros, _starts(parts))
    made = [
        make_matrix(build, parts[run], formats[run], sum(part.height for part in parts[run])) for run in _runs(formats)
    ]
    return SplitWeight(made)


def _runs(formats: Sequence[Format | None]) -> list[slice]:
    """Adjacent parts of one format: one product each."""
    ends = [i for i in range(1, len(formats) + 1) if i == len(formats) or formats[i] != formats[i - 1]]
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def matrix_targets(
    weight: Weight, parts: Sequence[MatrixPart], formats: Sequence[Format | None]
) -> dict[str, list[AnyTarget]]:
    """The checkpoint tensors that fill a weight made by `make_matrix`."""
    collected: dict[str, list[AnyTarget]] = {}
    if isinstance(weight, SplitWeight):
        for own, run in zip(weight.parts, _runs(formats), strict=True):
            for name, targets in matrix_targets(own, parts[run], formats[run]).items():
                collected.setdefault(name, []).extend(targets)
        return collected
    for part, found, start in zip(parts, formats, _starts(parts), strict=True):
        rows = slice(start, start + part.height)
        if isinstance(weight, QuantizedWeight):
            assert found is not None
            named = assembly_targets(weight, part, found, rows)
        else:
            named = {f"{part.name}.weight": _copy_target(weight[rows], part)}
        for name, target in named.items():
            collected.setdefault(name, []).append(target)
    return collected


def assembly_targets(weight: QuantizedWeight, part: MatrixPart, found: Format, rows: slice) -> dict[str, AnyTarget]:
    """The tensors of one matrix in few bits, by name."""
    if isinstance(found, OnLoadFormat):
        whole = slice(0, part.shape[1])
        keep = _unless_whole((whole, part.rows) if part.transposed else (part.rows, whole), _stored_shape(part))
        return {f"{part.name}.weight": rounded_target(weight, part, found, rows, _stored_shape(part), keep)}
    parts = found.stored(part.shape, part.rows, part.columns)
    direct = {stored.direct for stored in parts.values()}
    assembly = _assembly(lambda read: found.place(read, weight, rows), weight, part, found, direct)

    def target(key: str, stored: StoredPart) -> AnyTarget:
        if stored.direct is not None:
            keep = _unless_whole((part.rows, part.columns), part.shape)
            return Target(weight.tensors[stored.direct][rows], stored.shape, keep, part_of=assembly)
        return AssemblyPart(
            assembly, key, stored.shape, stored.dtypes, stored.keep, stored.optional, stored.sample, stored.also,
            stored.exact,
        )  # fmt: skip

    return {f"{part.name}.{key}": target(key, stored) for key, stored in parts.items()}


def rounded_target(
    weight: QuantizedWeight,
    part: MatrixPart,
    found: OnLoadFormat,
    rows: slice,
    shape: tuple[int, ...],
    keep: tuple[slice, ...],
) -> AssemblyPart:
    """A matrix that is rounded while loading, from a tensor of `shape` of which `keep` is its outputs, whole."""

    def place(read: Mapping[str, torch.Tensor]) -> None:
        values = read["weight"].flatten(0, -2)
        values = values.t() if part.transposed else values
        found.round(part.arrange(values) if part.arrange else values, weight, rows, part.columns)

    return AssemblyPart(_assembly(place, weight, part, found), "weight", shape, DTYPES, keep)


def _assembly(
    place: Callable[[Mapping[str, torch.Tensor]], None],
    weight: QuantizedWeight,
    part: MatrixPart,
    found: Format,
    direct: Collection[str | None] = (),
) -> Assembly:
    """`direct`: tensors of the weight that it does not fill."""
    filled = sum(tensor.nbytes for name, tensor in weight.tensors.items() if name not in direct)
    share = filled * part.height // weight.shape[0]
    return Assembly(place, weight.device, share, found.describe(), type(weight).__name__)


def _copy_target(into: torch.Tensor, part: MatrixPart) -> Target:
    keep = (part.columns, part.rows) if part.transposed else (part.rows, part.columns)
    arrange = torch.t if part.transposed else part.arrange
    return Target(into, _stored_shape(part), _unless_whole(keep, _stored_shape(part)), arrange)


def _stored_shape(part: MatrixPart) -> tuple[int, int]:
    out, width = part.shape
    return (width, out) if part.transposed else (out, width)


def _unless_whole(keep: tuple[slice, slice], shape: tuple[int, int]) -> tuple[slice, ...]:
    """`keep` without trailing dimensions that are kept whole, so that bytes are copied from the file unchanged."""
    rows, columns = keep
    if columns != slice(0, shape[1]):
        return (slice(None) if rows == slice(0, shape[0]) else rows, columns)
    return () if rows == slice(0, shape[0]) else (rows,)


def _starts(parts: Sequence[MatrixPart]) -> list[int]:
    starts = [0]
    for part in parts[:-1]:
        starts.append(starts[-1] + part.height)
    return starts


def one_format(owner: str, names: Sequence[str], formats: Sequence[Format | None]) -> Format | None:
    """The format that all these matrices have; raises if they differ."""
    if len(set(formats)) > 1:
        first = formats[0]
        other, name = next((each, name) for each, name in zip(formats, names, strict=True) if each != first)
        raise CheckpointError(
            f"{owner}: {names[0]} is {_words(first)} and {name} is {_words(other)}; experts of one layer must have "
            "one format"
        )
    return formats[0]


def _words(found: Format | None) -> str:
    return "unquantized" if found is None else found.describe()
