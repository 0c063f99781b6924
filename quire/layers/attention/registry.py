"""Attention backends by name."""

from __future__ import annotations

from quire.layers.attention.base import AttentionBackend
from quire.registry import resolve

_KNOWN = {
    "torch": "quire.layers.attention.torch_paged.TorchPagedAttention",
    "triton": "quire.layers.attention.triton.TritonPagedAttention",
    "cpu": "quire.layers.attention.cpu.CpuPagedAttention",
}


def attention_backend(name: str) -> type[AttentionBackend]:
    """The backend class called `name`, or found at that dotted path."""
    return resolve("attention backend", name, _KNOWN)
