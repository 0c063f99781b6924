"""Random blocks in GGUF's encodings."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
"""Where the half-precision numbers of a block are."""


def random_blocks(name: str, rows: int, width: int, seed: int = 0, size: float | None = None) -> np.ndarray:
    """Codes and scales of the full range, uint8 [rows, bytes]; `size`: of d and m, about (None: values are about 1)."""
    rng = np.random.default_rng(seed)
    block, nbytes = gguf.GGML_QUANT_SIZES[Kind[name]]
    raw = rng.integers(0, 256, (rows, width // block, nbytes), dtype=np.uint8)
    largest = {"Q4_0": 8, "Q4_1": 15, "Q5_0": 16, "Q5_1": 31, "Q8_0": 128, "Q2_K": 45, "Q3_K": 128, "Q4_K": 945,
               "Q5_K": 1953, "Q6_K": 4096, "TQ1_0": 1, "TQ2_0": 2}[name]  # fmt: skip
    for at in HALVES[name]:
        # Of both signs, and of all sizes up to the largest: none a power of two.
        value = rng.standard_normal((rows, width // block, 1)) * (2.0 / largest if size is None else size)
        raw[..., at : at + 2] = value.astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)
