"""Where the Triton tests run: on the GPU if there is one, in Triton's interpreter on the CPU otherwise."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
IS_SANITIZED = bool(os.environ.get("QUIRE_SANITIZED"))
"""Under compute-sanitizer a launch takes a thousand times as long: tests run fewer of them."""
# The interpreter keeps bfloat16 as raw bits and cannot multiply matrices of it; float16 walks the same lines there.
HALF = torch.bfloat16 if ON_GPU else torch.float16


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits on a GPU, where the order of sums is the kernel's; closeness in the interpreter.

    There `tl.dot` is numpy's matmul, and which bits BLAS gives a row depends on the CPU and on the row's position. So
    terms may be rounded once or twice differently: some units in the last place of the largest value.
    """
    if ON_GPU:
        assert torch.equal(actual, expected)
    else:
        limit = 8 * torch.finfo(actual.dtype).eps * expected.abs().max()
        assert (actual - expected).abs().max() <= limit
