"""Activations of gated products, inside a kernel: those of `kernels/gates.py`."""

# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gate_mul(gate, up, ACTIVATION: tl.constexpr):
    """The activation, one of `gates.GATES` or `gates.UNGATED`, of float32 values; the latter do not read `up`."""
    if ACTIVATION == "silu":
        out = gate / (1 + tl.exp(-gate)) * up
    elif ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        out = gate / (1 + tl.exp(-1.702 * gate)) * (up + 1)
    elif ACTIVATION == "gelu":
        out = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == "gelu_tanh":
        # 0.5 (1 + tanh(z)) is sigmoid(2 z).
        out = gate / (1 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))) * up
    elif ACTIVATION == "relu2_alone":
        positive = tl.maximum(gate, 0.0)
        out = positive * positive
    elif ACTIVATION == "relu2":
        positive = tl.maximum(gate, 0.0)
        out = positive * positive * up
    else:
        tl.static_assert(ACTIVATION == "relu")
        out = tl.maximum(gate, 0.0) * up
    return out
