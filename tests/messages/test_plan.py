"""Plans and results cross the process boundary as bytes and are unchanged."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.messages.plan import (
    Fork,
    NewRow,
    PrefixGroup,
    PromptLogprobs,
    StepMasks,
    StepPlan,
    StepResult,
    TokenLogprobs,
    decode_masks,
    decode_plan,
    decode_result,
    encode,
)
from quire.messages.sampling import SamplingParams

INTS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5).map(lambda values: np.array(values, np.int32))
BOOLS = st.lists(st.booleans(), max_size=5).map(lambda values: np.array(values, np.bool_))


def assert_same(one: msgspec.Struct, other: msgspec.Struct) -> None:
    assert type(one) is type(other)
    for name in one.__struct_fields__:
        a: Any = getattr(one, name)
        b: Any = getattr(other, name)
        if isinstance(a, np.ndarray):
            assert isinstance(b, np.ndarray) and a.dtype == b.dtype
            assert np.array_equal(a, b) and b.flags.writeable
        elif isinstance(a, list) and a and isinstance(a[0], msgspec.Struct):
            assert isinstance(b, list) and len(a) == len(b)
            for mine, yours in zip(a, b, strict=True):
                assert_same(mine, yours)
        else:
            assert a == b and type(a) is type(b), name


@given(arrays=st.lists(INTS, min_size=8, max_size=8), step=st.integers(0, 2**40), flag=st.booleans())
def test_a_plan_round_trips(arrays: list[np.ndarray], step: int, flag: bool) -> None:
    rows, counts, tokens, samples, sample_rows, block_rows, block_indices, blocks = arrays
    params = SamplingParams(n=2, temperature=0.5, stop=["x"], logit_bias={1: 2.0})
    plan = StepPlan(
        step=step, rows=rows, counts=counts, num_decodes=3, tokens=tokens, samples=samples, sample_rows=sample_rows,
        block_rows=block_rows, block_indices=block_indices, blocks=blocks, max_context=17, reset=flag, drop=[1, 2],
        add=[NewRow(1, "a", 4, 6, 2, 9, 2**64 - 1, 1, params, [5], [[1, 2], [3]], None, tokens, 2, 5)],
        forks=[Fork(1, 2, 3, "é")], copies=[(4, 5), (6, 7)], block_groups=blocks, snapshots=[(8, 9)],
        groups=[PrefixGroup([1, 2, 5], 512), PrefixGroup([7, 3], 256)] if flag else None,
    )  # fmt: skip
    assert_same(decode_plan(encode(plan)), plan)


@given(tokens=INTS, counts=INTS, stopped=BOOLS, invalid=BOOLS)
def test_a_result_round_trips(tokens: np.ndarray, counts: np.ndarray, stopped: np.ndarray, invalid: np.ndarray) -> None:
    entry = TokenLogprobs([1, 2], [-0.5, -1.5], 1)
    result = StepResult(
        9, tokens, counts, stopped, invalid, {0: entry, 7: entry}, {2: PromptLogprobs(3, [entry, entry])}
    )
    assert_same(decode_result(encode(result)), result)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_masks_round_trip(count: int) -> None:
    """Also none at all: on a busy machine every mask may be late."""
    masks = StepMasks(7, np.arange(count, dtype=np.int32), np.arange(count * 4, dtype=np.int32).reshape(count, 4))
    back = decode_masks(encode(masks))
    assert back.step == 7
    assert back.draws.tolist() == masks.draws.tolist()
    assert back.bits.tolist() == masks.bits.tolist()


def test_tokens_of_a_plan_are_decodes_plus_packed_ones() -> None:
    none = np.zeros(0, np.int32)
    plan = StepPlan(0, none, none, 3, np.arange(5, dtype=np.int32), none, none, none, none, none, 1)
    assert plan.num_tokens == 8
    assert plan.drop == [] and plan.add == [] and plan.forks == [] and plan.copies == [] and not plan.reset
    assert plan.groups is None


def test_empty_lists_are_not_shared_between_plans() -> None:
    none = np.zeros(0, np.int32)
    one, other = (StepPlan(0, none, none, 0, none, none, none, none, none, none, 1) for _ in range(2))
    one.drop.append(1)
    assert other.drop == []


def test_objects_that_are_not_arrays_are_refused() -> None:
    none = np.zeros(0, np.int32)
    plan = StepPlan(object(), none, none, 0, none, none, none, none, none, none, 1)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="cannot encode object"):
        encode(plan)
