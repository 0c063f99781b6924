"""Routing and experts, on the CPU and in the reference, against the same formulas in float64 one token at a time."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.cpu.ops import CpuOps
from quire.kernels.reference import TorchOps
from tests.layers.device_watch import NeverWaits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 8, 2, 12, 20), (7, 4, 4, 33, 9), (40, 16, 3, 24, 50), (3, 60, 8, 64, 32)]  # tokens, experts, k, H, I


@pytest.fixture(params=["native", "reference"])
def ops(request: pytest.FixtureRequest) -> TorchOps:
    if request.param == "reference":
        return TorchOps()
    ops = CpuOps()
    if not ops.is_native:
        pytest.skip("no C++ compiler on this machine")
    return ops


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def mixture(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, router logits, gate_up, down."""
    tokens, experts, _, hidden, width = shape
    return (
        random(tokens, hidden, dtype=dtype),
        random(tokens, experts, dtype=dtype, seed=1),
        (random(experts, 2 * width, hidden, dtype=dtype, seed=2) * hidden**-0.5).to(dtype),
        (random(experts, hidden, width, dtype=dtype, seed=3) * width**-0.5).to(dtype),
    )


def exact(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """One token and one expert at a time, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], experts[token], strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            out[token] += weight.double() * (down[expert].double() @ (gate / (1 + (-gate).exp()) * up))
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_route_takes_the_largest_of_a_softmax_over_all_experts(
    ops: TorchOps, shape: tuple[int, ...], renormalise: bool, dtype: torch.dtype
) -> None:
    _, logits, _, _ = mixture(shape, dtype)
    counts = torch.full((shape[1],), 5)
    with NeverWaits():
        weights, experts = ops.route(logits, shape[2], renormalise, counts)
    assert weights.dtype == torch.float32 and experts.dtype == torch.int32
    probabilities = logits.double().softmax(-1)
    for row, (chosen, weight) in enumerate(zip(experts.tolist(), weights, strict=True)):
        ranked = sorted(range(shape[1]), key=lambda e: (-logits[row, e].item(), e))
        assert chosen == ranked[: shape[2]]
        expected = probabilities[row, chosen]
        torch.testing.assert_close(weight.double(), expected / expected.sum() if renormalise else expected)
    assert torch.equal(counts - 5, torch.bincount(experts.flatten().long(), minlength=shape[1]))


def test_ties_choose_the_lower_expert(ops: TorchOps) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0], [0.0] * 5])
    weights, experts = ops.route(logits, 2, True)
    assert experts.tolist() == [[1, 2], [0, 1]]
    torch.testing.assert_close(weights, torch.full((2, 2), 0.5))


def test_nan_and_infinite_logits_choose_valid_experts(ops: TorchOps) -> None:
    logits = random(4, 6)
    logits[0] = torch.nan
    logits[1, 2], logits[2, 3], logits[3, 1] = torch.nan, torch.inf, -torch.inf
    weights, experts = ops.route(logits, 3, True)
    assert ((experts >= 0) & (experts < 6)).all()
    assert all(len(set(row)) == 3 for row in experts.tolist())
    assert weights[:2].isnan().all() and weights[3].isfinite().all()


def test_strided_logits(ops: TorchOps) -> None:
    logits = random(5, 20)[:, 3:11]
    for ours, plain in zip(ops.route(logits, 2, True), ops.route(logits.contiguous(), 2, True), strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_sum_their_outputs_for_a_token(ops: TorchOps, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, logits, gate_up, down = mixture(shape, dtype)
    weights, experts = ops.route(logits, shape[2], True)
    ours = ops.experts(x, weights, experts, gate_up, down)
    assert ours.dtype == dtype
    step = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(ours.double(), exact(x, weights, experts, gate_up, down), rtol=step, atol=step)


def test_all_tokens_to_one_expert(ops: TorchOps) -> None:
    x, _, gate_up, down = mixture((200, 8, 1, 24, 50), torch.float32)
    experts, weights = torch.full((200, 1), 5, dtype=torch.int32), torch.full((200, 1), 0.25)
    ours = ops.experts(x, weights, experts, gate_up, down)
    torch.testing.assert_close(ours.double(), exact(x, weights, experts, gate_up, down), rtol=1e-5, atol=1e-5)


def test_experts_out_of_range_add_nothing(ops: TorchOps) -> None:
    x, _, gate_up, down = mixture((3, 4, 2, 12, 20), torch.float32)
    experts = torch.tensor([[-1, 2], [4, 7], [3, -5]], dtype=torch.int32)
    weights = torch.ones(3, 2)
    ours = ops.experts(x, weights, experts, gate_up, down)
    here = (experts >= 0) & (experts < 4)
    expected = exact(x, weights * here, experts * here, gate_up, down)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)
    assert not ours[1].any()


def test_an_expert_that_overflows_affects_only_its_own_tokens(ops: TorchOps) -> None:
    x, _, gate_up, down = mixture((2, 3, 1, 12, 20), torch.float32)
    down[1] = torch.inf
    experts = torch.tensor([[0], [1]], dtype=torch.int32)
    ours = ops.experts(x, torch.ones(2, 1), experts, gate_up, down)
    assert ours[0].isfinite().all() and not ours[1].isfinite().any()


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    ops = CpuOps()
    if not ops.is_native:
        pytest.skip("no C++ compiler on this machine")
    for dtype in (torch.float32, torch.bfloat16):
        x, logits, gate_up, down = mixture((90, 6, 3, 40, 70), dtype)
        weights, experts = ops.route(logits, 3, True)
        whole = ops.experts(x, weights, experts, gate_up, down)
        for part in (slice(0, 1), slice(89, 90), slice(4, 12), slice(10, 70)):
            assert torch.equal(ops.experts(x[part], weights[part], experts[part], gate_up, down), whole[part])


def test_no_tokens(ops: TorchOps) -> None:
    x, _, gate_up, down = mixture((1, 4, 2, 12, 20), torch.float32)
    weights, experts = ops.route(torch.zeros(0, 4), 2, True, torch.zeros(4, dtype=torch.int64))
    assert weights.shape == experts.shape == (0, 2)
    assert ops.experts(x[:0], weights, experts, gate_up, down).shape == (0, 12)
