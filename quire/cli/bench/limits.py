"""Roofline limits of a step: the bytes it must move and the operations it must do, by kind of kernel.

To add a kind of kernel to the profile, add a line to `KINDS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.engine.engine_info import EngineInfo


@dataclass(frozen=True)
class Work:
    """What a step computed, on average."""

    tokens: float
    rows: float
    draws: float
    context: float
    """Tokens that all rows attend to, in sum."""
    pairs: float
    """Query and key pairs: each token with everything up to itself."""


@dataclass(frozen=True)
class StepShape:
    """The model's dimensions."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    itemsize: int
    body_bytes: int
    """All weights except the embeddings'."""

    @classmethod
    def of(cls, info: EngineInfo) -> StepShape:
        model = info.model
        itemsize = 4 if info.dtype == "float32" else 2
        embedding = model.vocab_size * model.hidden_size * itemsize
        return cls(
            layers=model.num_layers,
            hidden=model.hidden_size,
            intermediate=model.intermediate_size,
            heads=model.num_heads,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            vocabulary=model.vocab_size,
            itemsize=itemsize,
            body_bytes=info.weight_bytes - embedding * (1 if model.tie_embeddings else 2),
        )


Cost = tuple[float, float]
"""Bytes and operations per step."""


def _gemms(shape: StepShape, work: Work) -> Cost:
    """Every weight read once, every activation read and written once; two operations per weight and token."""
    head = shape.vocabulary * shape.hidden
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    a_token = shape.layers * (qkv + shape.heads * shape.head_dim + 4 * shape.hidden + 3 * shape.intermediate)
    moved = shape.body_bytes + shape.itemsize * (head + work.tokens * a_token + work.draws * shape.vocabulary)
    return moved, 2 * (work.tokens * shape.body_bytes / shape.itemsize + work.draws * head)


def _attention(shape: StepShape, work: Work) -> Cost:
    """Keys and values of every context read once; two products per pair and head."""
    a_token = shape.layers * 2 * shape.kv_heads * shape.head_dim * shape.itemsize
    queries = shape.layers * 2 * shape.heads * shape.head_dim * shape.itemsize
    operations = 4 * shape.layers * shape.heads * shape.head_dim * work.pairs
    return work.context * a_token + work.tokens * queries, operations


def _norms(shape: StepShape, work: Work) -> Cost:
    """Two per layer and one at the end: input and residual read, residual and output written."""
    return (2 * shape.layers + 1) * 4 * work.tokens * shape.hidden * shape.itemsize, 0


def _activation(shape: StepShape, work: Work) -> Cost:
    """Gate and up read, their product written."""
    return shape.layers * 3 * work.tokens * shape.intermediate * shape.itemsize, 0


def _qkv(shape: StepShape, work: Work) -> Cost:
    """Q, K and V read and written."""
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return shape.layers * 2 * work.tokens * width * shape.itemsize, 0


def _draws(shape: StepShape, work: Work) -> Cost:
    """A row of logits read once."""
    return work.draws * shape.vocabulary * shape.itemsize, 0


@dataclass(frozen=True)
class KernelKind:
    """Kernels that do the same kind of work, recognized by name."""

    name: str
    pattern: str
    cost: Callable[[StepShape, Work], Cost] | None = None

    def fits(self, kernel: str) -> bool:
        return re.search(self.pattern, kernel, re.IGNORECASE) is not None


KINDS = (
    KernelKind("attention", r"^_?(decode|prefill|prefix|plan|merge)|attention|attn|flash|fmha", _attention),
    KernelKind("QKV", r"qkv|rope|rotary", _qkv),
    KernelKind("GEMMs", r"^_(dot|tile|vector|linear)|gemm|gemv|cutlass|nvjet|xmma|cublas|splitk", _gemms),
    KernelKind("norms", r"norm", _norms),
    KernelKind("activation", r"silu|gelu", _activation),
    KernelKind("sampling", r"^_(measure|draw|filter|mask)|softmax|arg_?max|top_?k|sort|scan|sampl|philox", _draws),
    KernelKind("copies", r"memcpy|memset|copy"),
    KernelKind("batch", r"^_(apply|expand|commit)|index|gather|scatter|arange|fill"),
)
OTHER = KernelKind("other", "")


def kind_of(kernel: str) -> KernelKind:
    """The first kind whose pattern matches the kernel's name."""
    return next((kind for kind in KINDS if kind.fits(kernel)), OTHER)


@dataclass(frozen=True)
class DeviceSpeed:
    """The device's measured bandwidth and throughput."""

    bytes_per_second: float
    operations_per_second: float

    def seconds(self, cost: Cost) -> float:
        """A lower bound on the time of this work."""
        return max(cost[0] / self.bytes_per_second, cost[1] / self.operations_per_second)


def measure_speed(repeats: int = 10) -> DeviceSpeed | None:
    """How fast the current GPU copies memory and multiplies large bfloat16 matrices; None without a GPU or memory."""
    import torch

    if not torch.cuda.is_initialized():
        return None
    try:
        source = torch.empty(2**28, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        left = torch.randn(8192, 8192, device="cuda").bfloat16()
        moved = 2 * source.numel() / _best_seconds(lambda: target.copy_(source), repeats)
        operations = 2 * 8192**3 / _best_seconds(lambda: left @ left, repeats)
    except torch.OutOfMemoryError:
        return None
    return DeviceSpeed(moved, operations)


def _best_seconds(run: Callable[[], object], repeats: int) -> float:
    import torch

    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return min(times)
