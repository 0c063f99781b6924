"""Memory of large results on a CPU: used again when the tensors in it are gone, and not before."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.cpu import results
from quire.kernels.cpu.ops import CpuOps
from quire.kernels.cpu.results import ResultMemory


@pytest.fixture(autouse=True)
def small_results_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_LARGE", 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_used_again_once_no_tensor_views_it(dtype: torch.dtype) -> None:
    memory, like = ResultMemory(), torch.empty(0, dtype=dtype)
    first = memory.empty(like, 8, 16)
    assert first.shape == (8, 16) and first.dtype == dtype and first.is_contiguous()
    first.fill_(1)
    address, view = first.data_ptr(), first[2:, 3:5].view(6, 1, 2)
    del first
    other = memory.empty(like, 8, 16).fill_(2)
    assert other.data_ptr() != address and bool((view == 1).all())
    del view
    assert memory.empty(like, 4, 16).data_ptr() == address
    assert bool((other == 2).all())


def test_the_smallest_that_is_large_enough_is_used() -> None:
    memory, like = ResultMemory(), torch.empty(0)
    made = [memory.empty(like, rows, 4096) for rows in (4, 1, 2)]
    addresses = [each.data_ptr() for each in made]
    made.clear()
    assert memory.empty(like, 2, 4096).data_ptr() == addresses[2]
    kept = memory.empty(like, 2, 4096), memory.empty(like, 2, 4096)
    assert kept[0].data_ptr() == addresses[2] and kept[1].data_ptr() == addresses[0]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_MOST", 3)
    memory, like = ResultMemory(), torch.empty(0)
    held = [memory.empty(like, 32).fill_(i) for i in range(6)]
    assert len(memory._pieces) == 3
    assert all(bool((each == i).all()) for i, each in enumerate(held))


def test_what_is_too_large_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_LARGEST", 4096)
    memory, like = ResultMemory(), torch.empty(0)
    assert memory.empty(like, 33, 32).shape == (33, 32) and not memory._pieces
    assert memory.empty(like, 32, 32).shape == (32, 32) and len(memory._pieces) == 1


def test_where_there_is_no_memory_the_error_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_LARGEST", 1 << 60)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        ResultMemory().empty(torch.empty(0), 1 << 55)


def test_references_are_counted_as_this_python_counts_them() -> None:
    """From Python 3.14 on a call of `getrefcount` with a variable counts one fewer."""
    pieces = [results.mmap.mmap(-1, 64)]
    assert results._references(pieces) == [results._UNUSED]
    tensor = torch.frombuffer(pieces[0], dtype=torch.uint8)
    assert results._references(pieces) == [results._UNUSED + 1]
    del tensor
    assert results._references(pieces) == [results._UNUSED]


def test_a_recorded_pass_has_memory_of_its_own() -> None:
    """It is replayed after its tensors are gone: no result of another pass may lie there."""
    ops = CpuOps()
    if not ops.is_native:
        pytest.skip("no C++ compiler on this machine")
    x, weight = torch.randn(4, 64), torch.randn(64, 64)
    result, replay = ops.capture(lambda: ops.linear(ops.linear(x, weight), weight))
    assert replay is not None
    others = [ops.linear(x, weight) for _ in range(4)]
    expected = [each.clone() for each in others]
    replay()
    assert all(torch.equal(*pair) for pair in zip(others, expected, strict=True))
    assert torch.equal(result, ops.linear(ops.linear(x, weight), weight))
