"""From what a pooled row yields to the vector its caller asked for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.messages.pooling import PoolingParams


def finished_vector(data: bytes, params: PoolingParams) -> NDArray[np.float32]:
    """Cut to the dimensions asked for, then scaled to length 1 unless that is not wanted. Zeros stay zeros."""
    vector = np.frombuffer(data, np.float32)[: params.dimensions]
    length = np.linalg.norm(vector.astype(np.float64)) if params.is_normalized else 0.0
    return (vector / length).astype(np.float32) if length else vector.copy()
