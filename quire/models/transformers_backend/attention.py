"""The functions that attention layers of transformers call, and the arguments they understand.

The library hands queries, keys and values, already rotated, to a function chosen by name. `TRIAL` describes the call
(`trial.py`), `PAGED` computes it over the paged cache. An argument that is not understood is refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from quire.errors import UnsupportedModelError
from quire.kernels.kv import LayerKV
from quire.layers.attention.base import AttentionInputs
from quire.layers.attention.layer import Attention
from quire.models.transformers_backend.rotation import Rotation

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
class AttentionStep:
    """The step that is being computed, for all attention layers of a model."""

    positions: torch.Tensor | None = None
    kv: Sequence[LayerKV] = ()
    inputs: AttentionInputs | None = None
    check: LocalCheck | None = None
    """Set while tokens see only themselves."""
    rotation: Rotation | None = None
    """Left by the rotation of the layer that is being computed, for attention to do (`rotation.py`)."""

    def take_rotation(self) -> Rotation | None:
        taken, self.rotation = self.rotation, None
        return taken


@dataclass
class LocalCheck:
    """Attention in which each token sees only itself, with what it was given the first time.

    The result depends on queries and keys, so that a wrong rotation shows.
    """

    first: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """By layer: queries, keys, the result."""
    compares: bool = False
    error: float = 0.0
    """The largest difference of queries and keys from the first time, relative to the largest value."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not self.compares:
            groups = q.shape[1] // k.shape[1]
            out = (q + (k + v).repeat_interleave(groups, dim=1)).transpose(1, 2).contiguous()
            self.first[layer] = (q, k, out)
            return out
        for now, before in ((q, self.first[layer][0]), (k, self.first[layer][1])):
            difference = float((now.float() - before.float()).abs().max() / before.float().abs().max())
            self.error = max(self.error, difference if difference == difference else float("inf"))
        return self.first[layer][2]  # so that the next layer has the same inputs


@dataclass
class PagedLayer:
    """What an attention layer of the library needs to call ours; its attribute `quire`."""

    attention: Attention
    arguments: AttentionArguments
    index: int
    step: AttentionStep

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Heads' outputs [1, tokens, heads, value_dim] of q and k [1, heads, tokens, head_dim], and v."""
        missing = q.shape[3] - v.shape[3]
        if not missing:
            return self._attend(q, k, v)
        # The cache has one size for both: values are stored with zeros behind them.
        return self._attend(q, k, F.pad(v, (0, missing)))[..., : v.shape[3]].contiguous()

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        step = self.step
        rotation = step.take_rotation()
        if step.check is not None:
            if rotation is not None:
                q, k = rotation.apply(q), rotation.apply(k)
            return step.check.attend(self.index, q, k, v)
        assert step.inputs is not None and step.positions is not None
        positions = step.positions
        self.attention.cos_sin = None
        if rotation is not None:
            self.attention.cos_sin, positions = rotation.table, rotation.order
        out = self.attention(_joined(q, k, v), positions, step.kv[self.index], step.inputs)
        return out.view(1, q.shape[2], q.shape[1], q.shape[3])


def _joined(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[tokens, heads * head_dim] of q, k and v [1, heads, tokens, head_dim] together: a view if they lie side by side,
    as parts of one product do."""
    size, dim = q.element_size(), q.shape[3]
    place = q.data_ptr()
    for part in (q, k, v):
        _, heads, tokens, _ = part.shape
        side_by_side = (
            part.data_ptr() == place
            and part.stride(3) == 1
            and (heads == 1 or part.stride(1) == dim)
            and (tokens == 1 or part.stride(2) == q.stride(2))
            and part.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()
        )
        if not side_by_side:
            return torch.cat([each[0].transpose(0, 1) for each in (q, k, v)], dim=1).flatten(1)
        place += heads * dim * size
    width = (q.shape[1] + k.shape[1] + v.shape[1]) * dim
    return q.as_strided((q.shape[2], width), (max(q.stride(2), width), 1))


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
    given, known = ((each.scale, each.softcap, each.sinks is None) for each in (asked, expected))
    if given != known or asked.window not in (None, expected.window):
        raise UnsupportedModelError(f"{type(module).__name__} calls attention with {asked}, and before with {expected}")
    return layer.attend(query, key, value), None


AttentionInterface.register(PAGED, _paged_attention)
