"""Activations of gated products: what becomes of gate and up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_LIMIT, _SLOPE = 7.0, 1.702


def _clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gpt-oss: both sides are clamped, gate from above only."""
    gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
    return gate * torch.sigmoid(_SLOPE * gate) * (up + 1)


GATES: dict[str, Gate] = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "relu": lambda gate, up: F.relu(gate) * up,
    "relu2": lambda gate, up: F.relu(gate).square() * up,
    "clamped_swiglu": _clamped_swiglu,
}
"""By name; in float32."""


UNGATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"relu2_alone": lambda up: F.relu(up).square()}
"""Of MLPs without a gate, whose first product is as wide as its result; in float32."""


def has_gate(activation: str) -> bool:
    """Whether the first product of an MLP with this activation has a gate beside each output."""
    return activation not in UNGATED


def gate_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """The activation of gate_up [tokens, 2 * width]: gate first, then up; of [tokens, width] without a gate. Computed
    in float32, rounded once."""
    if not has_gate(activation):
        return UNGATED[activation](gate_up.float()).to(gate_up.dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    return GATES[activation](gate, up).to(gate_up.dtype)


@dataclass(frozen=True, eq=False)
class ExpertVariant:
    """How a mixture differs from experts with silu gates and without biases."""

    activation: str = "silu"
    gate_up_bias: torch.Tensor | None = None
    """[experts, 2 * width]; [experts, width] without gates"""
    down_bias: torch.Tensor | None = None
    """[experts, hidden]"""
    router_bias: torch.Tensor | None = None
    """[experts]: added to the router's logits."""

    @property
    def is_biased(self) -> bool:
        """Whether the experts' products have biases."""
        return self.gate_up_bias is not None or self.down_bias is not None

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for mixtures that the same kernels serve."""
        return self.activation, self.gate_up_bias is None, self.down_bias is None, self.router_bias is None

    def biases(self, expert: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """One expert's biases of gate and up, and of down."""
        first, second = self.gate_up_bias, self.down_bias
        return None if first is None else first[expert], None if second is None else second[expert]


PLAIN_EXPERTS = ExpertVariant()
