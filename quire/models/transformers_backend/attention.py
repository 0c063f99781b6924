"""The functions that attention layers of transformers call, and the arguments they understand.

The library hands queries, keys and values, already rotated, to a function chosen by name. `TRIAL` describes the call
(`trial.py`), `PAGED` computes it over the paged cache. An argument that is not understood is refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from quire.errors import UnsupportedModelError
from quire.kernels.kv import LayerKV
from quire.layers.attention.base import AttentionInputs
from quire.layers.attention.layer import Attention

PAGED = "quire"
TRIAL = "quire_trial"

_DESCRIBE = frozenset({"position_ids", "cache_position", "position_embeddings"})
"""Arguments that only describe the step, which the engine knows itself."""


@dataclass(frozen=True)
class AttentionArguments:
    """What a layer asks of attention, besides queries, keys and values."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None = field(compare=False)

    @classmethod
    def read(cls, module: nn.Module, head_dim: int, arguments: dict[str, Any]) -> AttentionArguments:
        """From the keyword arguments of a call. Raises for any other that is set."""
        left = dict(arguments)
        scale = left.pop("scaling", None)
        window, softcap, sinks = (left.pop(name, None) for name in ("sliding_window", "softcap", "s_aux"))
        causal = left.pop("is_causal", None)
        if not (getattr(module, "is_causal", True) if causal is None else causal):
            raise _refused(module, "is_causal", False)
        for name, value in left.items():
            is_neutral = value is None or (isinstance(value, (bool, int, float)) and not value)
            if not is_neutral and name not in _DESCRIBE:
                raise _refused(module, name, value)
        return cls(head_dim**-0.5 if scale is None else float(scale), window or None, softcap or None, sinks)


def _refused(module: nn.Module, name: str, value: object) -> UnsupportedModelError:
    shown = f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return UnsupportedModelError(
        f"{type(module).__name__} calls attention with {name} = {shown}, which is not implemented"
    )


@dataclass
class Step:
    """The step that is being computed, for all attention layers of a model."""

    positions: torch.Tensor | None = None
    kv: Sequence[LayerKV] = ()
    inputs: AttentionInputs | None = None
    is_local: bool = False
    """Each token sees only itself: to check that tokens meet nowhere else (`model.py`)."""


@dataclass
class PagedLayer:
    """What an attention layer of the library needs to call ours; its attribute `quire`."""

    attention: Attention
    arguments: AttentionArguments
    index: int
    step: Step

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Heads' outputs [1, tokens, heads, head_dim] of q [1, heads, tokens, head_dim], k and v."""
        step = self.step
        if step.is_local:
            groups = q.shape[1] // k.shape[1]
            return (q + (k + v).repeat_interleave(groups, dim=1)).transpose(1, 2)
        assert step.inputs is not None and step.positions is not None
        qkv = torch.cat([q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1)], dim=1)
        out = self.attention(qkv.flatten(1), step.positions, step.kv[self.index], step.inputs)
        return out.view(1, q.shape[2], q.shape[1], q.shape[3])


def _paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    layer: PagedLayer = module.quire  # type: ignore[assignment]
    if attention_mask is not None:
        raise _refused(module, "attention_mask", attention_mask)
    asked = AttentionArguments.read(module, query.shape[-1], arguments)
    expected = layer.arguments
    # The window may come from the mask alone, which is not made here: the trial has seen both.
    if (asked.scale, asked.softcap) != (expected.scale, expected.softcap) or asked.window not in (None, expected.window):
        raise UnsupportedModelError(f"{type(module).__name__} calls attention with {asked}, and before with {expected}")
    return layer.attend(query, key, value), None


AttentionInterface.register(PAGED, _paged_attention)
