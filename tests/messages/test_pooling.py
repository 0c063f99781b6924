"""`PoolingParams`: values out of range raise when it is made; older names still work."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from quire.errors import ValidationError
from quire.messages.plan import StepResult, decode_result, encode
from quire.messages.pooling import PoolingParams
from quire.output.tracked import finished_vector


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": True}, "dimensions"),
        ({"dimensions": 2.0}, "dimensions"),
        ({"task": "score"}, "task"),
        ({"pooling": "cls"}, "pooling"),
        ({"use_activation": "yes"}, "use_activation"),
        ({"normalize": 1}, "normalize"),
        ({"normalize": True, "use_activation": False}, "normalize"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ],
)
def test_out_of_range(fields: dict[str, Any], parameter: str) -> None:
    with pytest.raises(ValidationError) as error:
        PoolingParams(**fields)
    assert error.value.parameter == parameter


def test_the_older_name() -> None:
    assert not PoolingParams(normalize=False).is_activated
    assert PoolingParams(normalize=True, use_activation=True).is_activated
    assert PoolingParams().is_activated


def test_a_round_trip_through_bytes() -> None:
    params = PoolingParams(dimensions=8, pooling="mean", use_activation=False)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=PoolingParams) == params
    none = np.empty(0, np.int32)
    vector = np.array([1.5, -2.0], np.float32)
    result = decode_result(encode(StepResult(3, none, none, none.astype(bool), none.astype(bool), vectors={4: vector})))
    assert list(result.vectors) == [4] and result.vectors[4].dtype == np.float32
    assert result.vectors[4].tolist() == [1.5, -2.0]


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_a_vector_is_truncated_then_normalized(scale: float) -> None:
    data = (np.array([3, 4, 12]) * scale).astype(np.float32)
    np.testing.assert_allclose(finished_vector(data.tobytes(), PoolingParams(dimensions=2)), [0.6, 0.8], rtol=1e-5)
    np.testing.assert_array_equal(finished_vector(data.tobytes(), PoolingParams(use_activation=False)), data)
    assert not finished_vector(bytes(12), PoolingParams()).any()
