"""A LoRA adapter in memory, whatever file format it came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to one matrix: y += scale * b(a(x)) + bias."""

    a: Tensor
    """[rank, in]"""
    b: Tensor
    """[out, rank], whichever way round the checkpoint stores the matrix (`fan_in_fan_out`)."""
    scale: float
    bias: Tensor | None = None
    """[out]; `scale` is already in it."""
    magnitude: Tensor | None = None
    """[out], DoRA: row o of the adapted matrix, W + scale * b a, is rescaled to the norm magnitude[o]. A bias of the
    matrix is not."""

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of the matrix it is for."""
        return self.b.shape[0], self.a.shape[1]


@dataclass(frozen=True)
class ExpertLowRank:
    """The same for one matrix of each expert: y[e] += scale * b[e](a[e](x)). Experts after the last one here, and those
    whose rows are zero, are not adapted."""

    a: Tensor
    """[experts, rank, in]"""
    b: Tensor
    """[experts, out, rank]. Rows of gate_up_proj are in the checkpoint's order: the gate's, then those of up (gpt-oss:
    alternating)."""
    scale: float

    @property
    def rank(self) -> int:
        """Where a folder has gate and up apart, this is the sum of their ranks: `b` is then block-diagonal."""
        return self.a.shape[1]


@dataclass(frozen=True)
class Adapter:
    """One adapter, read and checked: shapes agree, values are finite. Names are those of the model's modules, as
    transformers has them."""

    digest: bytes
    """blake3 of the settings that matter and of every tensor."""
    rank: int
    """The largest rank of a matrix in the folder."""
    matrices: Mapping[str, LowRank]
    """By module: model.layers.0.self_attn.q_proj, lm_head."""
    experts: Mapping[str, ExpertLowRank]
    """By parameter: model.layers.0.mlp.experts.gate_up_proj and …down_proj, whatever the folder's layout."""
    embeddings: Mapping[str, LowRank]
    """By module (model.embed_tokens): `a` is [rank, vocabulary], `b` is [hidden, rank]. Only looking up is changed: a
    head that shares the table's weights keeps them."""
    replaced: Mapping[str, Tensor]
    """Full tensors in place of the model's, by parameter (lm_head.weight, model.norm.weight), before any low-rank
    change of the same module. A copy of an unchanged embedding is here too, where PEFT has saved one."""
    token_rows: Mapping[str, tuple[list[int], Tensor]]
    """Rows in place of some tokens' rows, by module: tokens and [tokens, hidden]. A head that shares the table's
    weights changes with it."""
    invocation: list[int] | None
    """The tokens after whose last occurrence in the prompt, them included, the adapter acts (aLoRA); None: always."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> Iterable[Tensor]:
        for low in (*self.matrices.values(), *self.embeddings.values()):
            yield from (tensor for tensor in (low.a, low.b, low.bias, low.magnitude) if tensor is not None)
        for stack in self.experts.values():
            yield from (stack.a, stack.b)
        yield from self.replaced.values()
        yield from (rows for _, rows in self.token_rows.values())
