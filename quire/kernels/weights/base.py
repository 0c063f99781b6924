"""What every weight in few bits has: its shape, its tensors, what it means in plain numbers, and the reference product.

`Weight` is what `Ops` multiplies with: a tensor [out, in] in the activations' dtype, or a `QuantizedWeight`. Checkpoint
formats (`quire/quantization/formats`) are re-laid into these few layouts at load, so that a new format adds no kernel.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from typing_extensions import Self

Allocate: TypeAlias = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Makes a tensor of zeros: `MemoryArena.zeros`, or `torch.zeros` on a device."""


class QuantizedWeight(abc.ABC):
    """A matrix [out, in] in few bits, or a stack of them [experts, out, in].

    Its arithmetic is the same for any number of rows: activations that are quantized are quantized for one row too, and
    a dequantized value is rounded once, to `dtype`.
    """

    shape: torch.Size
    dtype: torch.dtype
    """Of activations and results."""
    copy: torch.Tensor | None = None
    """The same values in `dtype`, where memory is spent on them: for steps of many rows (`worker/weight_copies.py`)."""
    is_weight_only = True
    """Whether activations are left as they are, so that a 16-bit weight gives the same products."""

    @property
    @abc.abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """What it holds, by name. All have the leading dimensions [experts,] out, unless `shared` names them."""
        ...

    @abc.abstractmethod
    def with_tensors(self, tensors: dict[str, torch.Tensor], shape: Sequence[int]) -> Self:
        """A weight of the same kind over other tensors."""
        ...

    @abc.abstractmethod
    def dequantize(self) -> torch.Tensor:
        """The values, in `dtype`, each rounded once."""
        ...

    def quantize_input(self, x: torch.Tensor) -> torch.Tensor:
        """x as the product sees it, in float32: quantized and dequantized, where this kind quantizes activations."""
        return x.float()

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x @ weight.T (+ bias), in plain torch: what the kernels are tested against."""
        product = F.linear(self.quantize_input(x), self.dequantize().float())
        return (product if bias is None else product + bias.float()).to(x.dtype)

    def embedding(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows `tokens` of the matrix, dequantized."""
        return self.select(tokens).dequantize()

    def select(self, index: torch.Tensor | slice | int) -> Self:
        """Some of the outputs; of a stack, some of its matrices (an integer: one of them)."""
        chosen = {name: tensor[index] for name, tensor in self.tensors.items()}
        if isinstance(index, int):
            return self.with_tensors(chosen, self.shape[1:])
        kept = torch.empty(self.shape[0], device="meta")[index if isinstance(index, slice) else index.to("meta")]
        return self.with_tensors(chosen, (len(kept), *self.shape[1:]))

    def __getitem__(self, index: int | slice) -> Self:
        return self.select(index)

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    @property
    def nbytes(self) -> int:
        """Bytes it takes, scales included."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def numel(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    @property
    def layout(self) -> tuple[object, ...]:
        """What a kernel is compiled for besides the shape: equal for weights that the same kernels serve."""
        return (type(self).__name__, *((name, tensor.dtype) for name, tensor in self.tensors.items()))

    def __repr__(self) -> str:
        held = ", ".join(
            f"{name} {str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for name, t in self.tensors.items()
        )
        return f"{type(self).__name__}({'x'.join(map(str, self.shape))}: {held})"


Weight: TypeAlias = torch.Tensor | QuantizedWeight


class SplitWeight(QuantizedWeight):
    """Matrices of different kinds that read the same input, one above the other: a fused layer with mixed formats."""

    def __init__(self, parts: Sequence[Weight]) -> None:
        self.parts = tuple(parts)
        self.shape = torch.Size((sum(part.shape[0] for part in parts), parts[0].shape[1]))
        self.dtype = parts[0].dtype

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for index, part in enumerate(self.parts):
            held = {"weight": part} if isinstance(part, torch.Tensor) else part.tensors
            found |= {f"{index}.{name}": tensor for name, tensor in held.items()}
        return found

    def with_tensors(self, tensors: dict[str, torch.Tensor], shape: Sequence[int]) -> SplitWeight:
        raise NotImplementedError("parts of a mixed weight are not selected")

    def dequantize(self) -> torch.Tensor:
        return torch.cat([part if isinstance(part, torch.Tensor) else part.dequantize() for part in self.parts])

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        biases = [None] * len(self.parts) if bias is None else bias.split([part.shape[0] for part in self.parts])
        return torch.cat([reference_linear(x, part, own) for part, own in zip(self.parts, biases, strict=True)], dim=-1)

    @property
    def layout(self) -> tuple[object, ...]:
        return tuple((part.shape, part.dtype if isinstance(part, torch.Tensor) else part.layout) for part in self.parts)


def reference_linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T (+ bias) in plain torch, for any weight."""
    return F.linear(x, weight, bias) if isinstance(weight, torch.Tensor) else weight.linear(x, bias)
