"""Which cuBLASLt algorithm a GEMM gets. That they compute the same is tested on a GPU (tests/gpu)."""

from __future__ import annotations

import ctypes
import json
from functools import partial

import pytest
import torch

from quire.kernels.triton import cublaslt
from quire.kernels.triton.cublaslt import ROW_GRID, HeuristicResult, TunedGemms
from quire.kernels.triton.ops import TritonOps
from quire.kernels.triton.skinny_gemm.timing import random_inputs
from quire.kernels.triton.tuning_table import TABLES

A, B, C = bytes(range(64)), bytes(range(64, 128)), bytes(range(128, 192))
BF16 = torch.bfloat16


class Library:
    """Records its calls; multiplies with torch, or refuses if not `able`."""

    def __init__(self, able: bool = True) -> None:
        self.able = able
        self.calls: list[tuple[bytes, bool]] = []

    def run(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, algorithm: bytes, accumulate: bool) -> bool:
        self.calls.append((algorithm, accumulate))
        if self.able:
            out.copy_(x @ weight.T + (out if accumulate else 0))
        return self.able


def tuned(library: Library, **entries: bytes) -> TunedGemms:
    table = {f"{rows[1:]} 64x32 bfloat16": {"algorithm": algorithm.hex()} for rows, algorithm in entries.items()}
    return TunedGemms(library, table)  # type: ignore[arg-type]


def tensors(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 32, dtype=BF16), torch.randn(64, 32, dtype=BF16)


@pytest.mark.parametrize(
    "rows, expected",
    [
        (1, None), (16, None), (17, C), (32, C), (33, None), (96, None), (97, A), (128, A), (129, None), (160, None),
        (8193, B), (16384, B), (50_000, B),
    ],
)  # fmt: skip
def test_an_algorithm_serves_the_rows_down_to_the_one_before(rows: int, expected: bytes | None) -> None:
    library = Library()
    known = tuned(library, _32=C, _128=A, _16384=B)
    x, weight = tensors(rows)
    out = known.linear(x, weight)
    assert (out is None) == (expected is None)
    assert library.calls == ([] if expected is None else [(expected, False)])
    if out is not None:
        assert out.equal(x @ weight.T)


def test_a_gemm_is_added_to_the_stream() -> None:
    known = tuned(library := Library(), _128=A)
    x, weight = tensors(100)
    stream = torch.ones(100, 64, dtype=BF16)
    assert known.linear_add(stream, x, weight)
    assert stream.equal(x @ weight.T + 1)
    assert library.calls == [(A, True)]


def test_gemms_the_library_refuses_are_left_to_torch() -> None:
    known = tuned(Library(able=False), _128=A)
    x, weight = tensors(100)
    stream = torch.ones(100, 64, dtype=BF16)
    assert known.linear(x, weight) is None
    assert not known.linear_add(stream, x, weight)
    assert stream.eq(1).all()


def test_unmeasured_weights_and_dtypes_and_unaligned_tensors_are_left_to_torch() -> None:
    known = tuned(library := Library(), _128=A)
    x, weight = tensors(100)
    assert known.linear(x.half(), weight.half()) is None
    assert known.linear(x, weight[:48]) is None
    assert known.linear(torch.randn(100, 33, dtype=BF16)[:, 1:], weight) is None
    assert known.linear(torch.randn(32, 100, dtype=BF16).T, weight) is None
    assert not known.linear_add(torch.zeros(100 * 64 + 1, dtype=BF16)[1:].view(100, 64), x, weight)
    assert library.calls == []


@pytest.mark.parametrize("algorithm", ["", "ab" * 63, "ab" * 65, "no hexadecimal digits", None, 7])
def test_an_invalid_algorithm_is_left_to_torch(algorithm: object) -> None:
    known = TunedGemms(library := Library(), {"128 64x32 bfloat16": {"algorithm": algorithm}})  # type: ignore[arg-type]
    assert known.linear(*tensors(128)) is None
    assert library.calls == []


def test_every_algorithm_is_measured_within_the_rows_it_serves() -> None:
    for rows in ROW_GRID:
        assert {cublaslt.grid_rows(count) for count in cublaslt.sampled_rows(rows)} == {rows}
        assert len(set(cublaslt.sampled_rows(rows))) == 2 and min(cublaslt.sampled_rows(rows)) >= cublaslt.MIN_ROWS


def test_an_algorithm_is_64_bytes_of_the_library() -> None:
    assert ctypes.sizeof(HeuristicResult) == 96
    algorithm = HeuristicResult()
    algorithm.data[0], algorithm.data[7] = 1, 2
    assert bytes(algorithm) == b"\x01" + bytes(55) + b"\x02" + bytes(7)


def test_without_a_gpu_there_is_no_library() -> None:
    if not torch.cuda.is_available():
        assert cublaslt.library() is None and cublaslt.tuned_gemms() is None


def test_shipped_tables_are_valid() -> None:
    for path in TABLES.glob("*-cublas-*.json"):
        for key, entry in json.loads(path.read_text()).items():
            rows, weight, dtype = key.split()
            assert int(rows) in ROW_GRID and all(int(side) > 0 for side in weight.split("x")) and dtype == "bfloat16"
            assert len(bytes.fromhex(entry["algorithm"])) == 64


def test_ops_use_tuned_gemms(monkeypatch: pytest.MonkeyPatch) -> None:
    known = tuned(library := Library(), _128=A, _1024=B)
    monkeypatch.setattr(TritonOps, "_tuned_gemms", lambda *_: known)
    x, weight = tensors(1024)
    stream = torch.ones(1024, 64, dtype=BF16)
    assert TritonOps().linear(x, weight).equal(x @ weight.T)
    assert TritonOps().linear_add(stream, x, weight) is None
    assert stream.equal(x @ weight.T + 1)
    assert library.calls == [(B, False), (B, True)]
    bias = torch.ones(64, dtype=BF16)
    assert TritonOps().linear(x, weight, bias).equal(torch.nn.functional.linear(x, weight, bias))
    assert len(library.calls) == 2


class Clock:
    """Times from a table: (cuBLAS's, or an algorithm's first byte; rows)."""

    def __init__(self, times: dict[tuple[int | None, int], float]) -> None:
        self.times = times

    def time(self, product: partial, weights: list[torch.Tensor], rows: int) -> float:
        return self.times[None if product.func is not cublaslt._multiply else product.args[3][0], rows]


class Choosing(Library):
    """Offers algorithms 1, 2 and 3; the last computes wrong results."""

    def algorithms(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, limit: int) -> list[bytes]:
        return [bytes([number] * 64) for number in (1, 2, 3)][:limit]

    def run(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, algorithm: bytes, accumulate: bool) -> bool:
        out.copy_(x @ weight.T if algorithm[0] < 3 else x.new_zeros(out.shape))
        return True


@pytest.mark.parametrize(
    "seconds, chosen",
    [
        ({1: (9.0, 9.0), 2: (8.0, 8.0)}, 2),
        ({1: (9.0, 9.0), 2: (7.0, 11.0)}, 1),
        ({1: (9.9, 9.9), 2: (7.0, 11.0)}, None),
        ({1: (12.0, 12.0), 2: (10.0, 10.0)}, None),
    ],
    ids=["the faster one", "at both places", "by enough", "than cuBLAS"],
)
def test_the_winner_is_faster_at_both_ends(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, tuple[float, float]], chosen: int | None
) -> None:
    monkeypatch.setattr(cublaslt, "random_inputs", partial(random_inputs, device="cpu"))
    first, second = cublaslt.sampled_rows(64)
    assert (first, second) == (64, 56)
    times: dict[tuple[int | None, int], float] = {(None, first): 10.0, (None, second): 10.0}
    times |= {(number, rows): us for number, pair in seconds.items() for rows, us in zip((64, 56), pair, strict=True)}
    times |= {(3, first): 1.0, (3, second): 1.0}
    entry = cublaslt.measure_algorithms(Choosing(), 64, 32, 64, BF16, Clock(times))  # type: ignore[arg-type]
    assert entry["cublas_us"] == 10.0
    assert entry.get("algorithm") == (bytes([chosen] * 64).hex() if chosen else None)
