"""Where these tests run, and settings their engines share."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

DEVICE = "cuda"
ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
USUAL: dict[str, Any] = {"dtype": "float32", "device": DEVICE, "max_num_seqs": 16, "num_gpu_blocks_override": 512}
"""Few rows, so that few graphs are captured and an engine starts quickly."""
SMALL_GROUPS = {"quire.scheduler.prefix_groups.LEAST_TOKENS": 16, "quire.scheduler.prefix_groups.LEAST_SAVED": 16}
"""Tokens that rows must share to be read together, for prompts of a tiny model."""
MODEL = os.environ.get("QUIRE_TEST_MODEL", "")
"""Path to use instead of the default model's."""
