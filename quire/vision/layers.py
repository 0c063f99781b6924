"""Parts of vision transformers. Tokens of all pictures of a call are packed one after another, without padding.

Weights are whole on each tensor-parallel rank, in the model's dtype: encoders are small beside their models, and
quantized checkpoints leave them in 16 bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from quire.errors import UnsupportedModelError
from quire.kernels.segments import Segments, upload
from quire.layers.build_context import BuildContext
from quire.loading.weights import Target
from quire.messages.media import DIGEST_BYTES, IMAGE, MediaItem

_PAD = 64
"""Widths inside an MLP are padded to this many on a GPU, where others are slow."""
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
}
_GATES = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
"""The names of gated activations in `kernels/gates.py`."""


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """An MLP's activation, by its name in configs."""
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"a vision encoder with hidden_act {name!r} is not implemented; known: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def padding(width: int, device: torch.device) -> int:
    """Zeros that are added to an MLP's inner width."""
    return -width % _PAD if device.type == "cuda" else 0


class VisionLinear(nn.Module):
    """x @ weight.T + bias. Several matrices of the checkpoint with the same input are one here."""

    def __init__(
        self,
        build: BuildContext,
        names: str | Sequence[str],
        inputs: int | Sequence[int],
        outputs: int,
        bias: bool = True,
        pad_outputs: int = 0,
        pad_inputs: int = 0,
    ) -> None:
        """`inputs`: several numbers for a convolution's kernel whose strides are its size. `outputs`: of each matrix.
        `pad_...`: so many zeros are added."""
        super().__init__()
        self.names = (names,) if isinstance(names, str) else tuple(names)
        self.kernel = (inputs,) if isinstance(inputs, int) else tuple(inputs)
        self.outputs = outputs
        self.rows = outputs + pad_outputs
        size = int(np.prod(self.kernel))
        self.weight = build.parameter(len(self.names) * self.rows, size + pad_inputs)
        self.bias = build.parameter(len(self.names) * self.rows) if bias else None

    def targets(self) -> dict[str, list[Target]]:
        """A matrix, and a bias, for each name."""
        found: dict[str, list[Target]] = {}
        size = int(np.prod(self.kernel))
        for index, name in enumerate(self.names):
            rows = slice(index * self.rows, index * self.rows + self.outputs)
            flatten = _flatten if len(self.kernel) > 1 else None
            into = self.weight[rows, :size]
            found[f"{name}.weight"] = [Target(into, (self.outputs, *self.kernel), arrange=flatten)]
            if self.bias is not None:
                found[f"{name}.bias"] = [Target(self.bias[rows], (self.outputs,))]
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


def _flatten(weight: torch.Tensor) -> torch.Tensor:
    return weight.flatten(1)


class VisionNorm(nn.Module):
    """A layer norm, or an RMS norm."""

    def __init__(self, build: BuildContext, name: str, size: int, eps: float, rms: bool = False) -> None:
        super().__init__()
        self.ops = build.ops
        self.name, self.size, self.eps, self.rms = name, size, eps, rms
        self.weight = build.parameter(size)
        self.bias = None if rms else build.parameter(size)

    def targets(self) -> dict[str, list[Target]]:
        """Its weight and bias."""
        found = {f"{self.name}.weight": [Target(self.weight, (self.size,))]}
        if self.bias is not None:
            found[f"{self.name}.bias"] = [Target(self.bias, (self.size,))]
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.add(x, None)[0]

    def add(self, x: torch.Tensor, stream: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(The norm of stream + x, that sum); the stream [tokens, size] is overwritten. None: there is only x, which
        becomes the stream."""
        if self.bias is not None:
            return self.ops.layer_norm(x, stream, self.weight, self.bias, self.eps)
        if stream is not None:
            return self.ops.add_rms_norm(x, stream, self.weight, self.eps)
        return self.ops.rms_norm(x, self.weight, self.eps), x


class VisionParameter(nn.Module):
    """A tensor of the checkpoint that is no matrix of a product: position embeddings, a class token."""

    def __init__(self, build: BuildContext, name: str, *shape: int) -> None:
        super().__init__()
        self.name, self.shape = name, shape
        self.weight = build.parameter(*shape)

    def targets(self) -> dict[str, list[Target]]:
        """The tensor as it is."""
        return {self.name: [Target(self.weight, self.shape)]}


class VisionMLP(nn.Module):
    """Two products with an activation between them."""

    def __init__(
        self, build: BuildContext, size: int, width: int, act: str, names: tuple[str, str] = ("fc1", "fc2")
    ) -> None:
        super().__init__()
        self.act = activation(act)
        pad = padding(width, build.device)
        self.up = VisionLinear(build, names[0], size, width, pad_outputs=pad)
        self.down = VisionLinear(build, names[1], width, size, pad_inputs=pad)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class GatedVisionMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, build: BuildContext, size: int, width: int, act: str, bias: bool) -> None:
        super().__init__()
        self.act = activation(act)
        self.ops, self.gate = build.ops, _GATES.get(act)
        pad = padding(width, build.device)
        self.gate_up = VisionLinear(build, ("gate_proj", "up_proj"), size, width, bias, pad_outputs=pad)
        self.down = VisionLinear(build, "down_proj", width, size, bias, pad_inputs=pad)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up(x)
        if self.gate is not None:
            return self.down(self.ops.gate_mul(gate_up, self.gate))
        gate, up = gate_up.chunk(2, dim=-1)
        return self.down(self.act(gate) * up)


Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines [T, dim / 2], float32."""


def rotation_2d(places: np.ndarray, dim: int, theta: float, device: torch.device, alternate: bool = False) -> Rotation:
    """Rotation of heads of `dim` by the rows and columns `places` [T, 2]: half of the pairs turn by each.

    Rows and columns have the same frequencies, or (`alternate`) every other one of those of a whole head."""
    if alternate:
        every = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        frequencies = torch.stack((every[0::2], every[1::2]))
    else:
        frequencies = 1.0 / theta ** (torch.arange(0, dim // 2, 2, dtype=torch.float32) / (dim // 2))
    angles = (torch.from_numpy(places).float()[..., None] * frequencies).flatten(1)
    return upload(angles.cos().numpy(), device), upload(angles.sin().numpy(), device)


class VisionAttention(nn.Module):
    """Attention in both directions."""

    def __init__(
        self,
        build: BuildContext,
        size: int,
        heads: int,
        names: str | Sequence[str] = ("q_proj", "k_proj", "v_proj"),
        out: str = "out_proj",
        bias: bool = True,
        out_bias: bool | None = None,
        head_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.ops = build.ops
        self.heads, self.dim = heads, head_dim or size // heads
        width = heads * self.dim
        outputs = 3 * width if isinstance(names, str) else width
        self.qkv = VisionLinear(build, names, size, outputs, bias)
        self.out = VisionLinear(build, out, width, size, bias if out_bias is None else out_bias)
        self.scale = self.dim**-0.5

    def forward(self, x: torch.Tensor, segments: Segments, rotation: Rotation | None = None) -> torch.Tensor:
        qkv = self.qkv(x).unflatten(-1, (3 * self.heads, self.dim))
        if rotation is not None:
            self.ops.rotate(qkv[:, : 2 * self.heads], *rotation)
        q, k, v = qkv.chunk(3, dim=1)
        return self.out(self.ops.attend_segments(q, k, v, segments, self.scale))


def normalized(pixels: np.ndarray, norm: np.ndarray, device: torch.device) -> torch.Tensor:
    """float32 pixels [..., 3] with the mean `norm[0]` taken off and divided by `norm[1]`, both in units of pixels."""
    mean, deviation = _norm_on(norm.astype(np.float32).tobytes(), device)
    return (upload(pixels, device).float() - mean) / deviation


@functools.lru_cache(64)
def _norm_on(norm: bytes, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation on the device; models have one or two of them."""
    mean, deviation = np.frombuffer(norm, np.float32).reshape(2, -1)
    return upload(mean.copy(), device), upload(deviation.copy(), device)


def blank_item(shape: tuple[int, int, int], rows: int, **arrays: np.ndarray) -> MediaItem:
    """An image of zeros, of this many tiles (or frames), height and width."""
    known: dict[str, np.ndarray] = {"pixels": np.zeros((*shape, 3), np.uint8), "norm": np.ones((2, 3), np.float32)}
    return MediaItem(digest=bytes(DIGEST_BYTES), kind=IMAGE, rows=rows, arrays=known | arrays)


def blank_square(rows: int, cell: int) -> MediaItem:
    """An image of zeros of at most `rows` rows, as square as it can be; `cell`: pixels of a side of each row."""
    height = max(1, math.isqrt(max(rows, 1)))
    width = max(1, rows // height)
    return blank_item((1, height * cell, width * cell), height * width)


def vision_fields(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `vision_config`, those that it leaves out by their defaults."""
    given = raw.get("vision_config") or {}
    return {**defaults, **{name: value for name, value in given.items() if value is not None}}


def rope_theta(vision: Mapping[str, Any], default: float) -> float:
    """The base of a tower's rotary positions."""
    return float((vision.get("rope_parameters") or {}).get("rope_theta") or vision.get("rope_theta") or default)
