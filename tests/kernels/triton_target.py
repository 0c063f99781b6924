"""Where the Triton tests run: on the GPU if there is one, in Triton's interpreter on the CPU otherwise."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# The interpreter keeps bfloat16 as raw bits and cannot multiply matrices of it; float16 walks the same lines there.
HALF = torch.bfloat16 if ON_GPU else torch.float16
