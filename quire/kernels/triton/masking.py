# ruff: noqa: N803
"""Logits under a mask of one bit a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048


def mask_logits(logits: torch.Tensor, indices: torch.Tensor, bits: torch.Tensor) -> None:
    """Row indices[i] of logits [S, vocab] becomes -inf, in place, where its token's bit in bits [n, words] is not set.

    Token t has bit t % 32 of word t // 32. For n rows 4·n·words bytes are read and at most all their logits written;
    logits that stay are neither read nor written.
    """
    if len(indices) == 0:
        return
    vocab = logits.shape[1]
    _mask_kernel[(triton.cdiv(vocab, BLOCK), len(indices))](
        logits, logits.stride(0), indices, bits, bits.stride(0), vocab, BLOCK=BLOCK
    )


@triton.jit(do_not_specialize=["row_stride", "word_stride", "vocab"])
def _mask_kernel(logits, row_stride, indices, bits, word_stride, vocab, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.program_id(1).to(tl.int64)
    row = tl.load(indices + entry).to(tl.int64)
    inside = token < vocab
    word = tl.load(bits + entry * word_stride + token // 32, mask=inside, other=-1)
    banned = ((word >> (token % 32)) & 1) == 0
    tl.store(logits + row * row_stride + token, float("-inf"), mask=inside & banned)
