"""Scales of keys and values that a checkpoint has for an 8-bit KV cache, under the names different tools give them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from quire.errors import CheckpointError
from quire.layers.attention.layer import Attention
from quire.loading.weights import Checkpoint, StoredWeight

NAMES = (
    ("k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale"),
    ("v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale"),
)
"""Of keys, and of values: what follows the attention module's name. The first that is present counts."""

_UNUSED = (
    *("q_scale", "prob_scale", "q_proj.q_scale", "q_proj.output_scale"),
    *("q_zero_point", "k_zero_point", "v_zero_point", "k_proj.k_zero_point", "v_proj.v_zero_point"),
)
"""Of queries and probabilities, which are not quantized here, and zero points: e4m3 is symmetric, they are all 0."""
_SUFFIXES = tuple(f".{name}" for name in {*NAMES[0], *NAMES[1], *_UNUSED})


def is_attention_scale(name: str) -> bool:
    """Whether a checkpoint's tensor is a scale of attention: no weight, and not needed unless the KV cache is fp8."""
    return name.endswith(_SUFFIXES)


def load_kv_scales(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Fill the scales of layers that have some from the checkpoint; what is missing stays 1."""
    layers = {
        path.rpartition(".")[0]: module
        for path, module in model.named_modules()
        if isinstance(module, Attention) and module.kv_scales is not None
    }
    if not layers:
        return
    found = {weight.name: weight for weight in checkpoint if is_attention_scale(weight.name)}
    for owner, layer in layers.items():
        assert layer.kv_scales is not None
        for names, into in zip(NAMES, layer.kv_scales, strict=True):
            scale = _find(found, owner, names)
            if scale is not None:
                own = _of_heads(scale, layer.num_all_kv_heads, layer.kv_heads)
                layer.has_unit_scales &= bool((own == 1).all())
                into.copy_(own)


def _find(found: dict[str, StoredWeight], owner: str, names: Sequence[str]) -> StoredWeight | None:
    """The first of the names under `owner`. A checkpoint of the bare base model has `layers.0…` for
    `model.layers.0…`."""
    owners = (owner, owner.partition(".")[2])
    return next((found[f"{o}.{name}"] for name in names for o in owners if f"{o}.{name}" in found), None)


def _of_heads(weight: StoredWeight, total: int, heads: range) -> torch.Tensor:
    """A scale for each of this rank's heads: the tensor has one for all, or one for each."""
    read = weight.read().float().flatten()
    if read.numel() not in (1, total):
        raise CheckpointError(
            f"{weight.name} has shape {tuple(weight.shape)}; a scale of the KV cache is one number, or one for each of "
            f"the {total} KV heads"
        )
    if not (read.isfinite() & (read > 0)).all():
        raise CheckpointError(f"{weight.name} holds {read.tolist()}; scales of the KV cache must be above 0")
    return read.expand(total)[heads.start : heads.stop]
