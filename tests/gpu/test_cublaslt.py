"""cuBLASLt algorithms compute what torch's GEMMs do, in eager mode and in a graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.triton import cublaslt
from tests.gpu.target import DEVICE, ON_A_GPU

pytestmark = ON_A_GPU
SHAPES = [(1, 64, 64), (33, 512, 1024), (256, 4096, 1024), (1000, 1024, 3072), (3000, 6144, 256)]


@pytest.fixture(scope="module")
def lt() -> cublaslt.CublasLt:
    library = cublaslt.library()
    assert library is not None
    return library


def tensors(rows: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, k, device=DEVICE), torch.randn(n, k, device=DEVICE) * k**-0.5
    return x.to(dtype), weight.to(dtype), torch.randn(rows, n, device=DEVICE).to(dtype)


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.float() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows, n, k", SHAPES)
def test_every_algorithm_computes_the_product(
    lt: cublaslt.CublasLt, rows: int, n: int, k: int, dtype: torch.dtype
) -> None:
    x, weight, before = tensors(rows, n, k, dtype)
    expected = F.linear(x.float(), weight.float())
    algorithms = lt.algorithms(x, weight, before, 6)
    assert algorithms
    for algorithm in algorithms:
        out = torch.full_like(before, float("nan"))
        assert lt.run(x, weight, out, algorithm, accumulate=False)
        assert error(out, expected) < 8e-3
        out = before.clone()
        assert lt.run(x, weight, out, algorithm, accumulate=True)
        assert error(out, expected + before.float()) < 8e-3


def test_rows_and_strides_may_change_between_calls(lt: cublaslt.CublasLt) -> None:
    x, weight, out = tensors(512, 1024, 1024, torch.bfloat16)
    algorithm = lt.algorithms(x, weight, out, 1)[0]
    wide = torch.randn(512, 3072, device=DEVICE, dtype=torch.bfloat16)
    for rows in (512, 100, 7, 300):
        for source in (x, wide[:, 1024:2048]):
            given, result = source[:rows], torch.empty(rows, 1024, device=DEVICE, dtype=torch.bfloat16)
            assert lt.run(given, weight, result, algorithm, accumulate=False)
            assert error(result, F.linear(given.float(), weight.float())) < 8e-3


def test_a_graph_replays_it(lt: cublaslt.CublasLt) -> None:
    x, weight, out = tensors(256, 2048, 2048, torch.bfloat16)
    algorithm = lt.algorithms(x, weight, out, 1)[0]
    lt.run(x, weight, out, algorithm, accumulate=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lt.run(x, weight, out, algorithm, accumulate=False)
    x.normal_()
    graph.replay()
    assert error(out, F.linear(x.float(), weight.float())) < 8e-3
