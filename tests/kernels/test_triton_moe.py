"""Mixtures of experts in Triton: routing, sorting, and both kinds of expert kernels, against plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.triton_target import DEVICE, HALF, ON_GPU, assert_same_bits

from quire.kernels.gates import GATES, ExpertVariant, has_gate  # isort: skip
from quire.kernels.reference import TorchOps  # isort: skip
from quire.kernels.routing import RouteRule  # isort: skip
from quire.kernels.triton.moe import tile as moe_tile

from quire.kernels.triton.moe.experts import experts as experts_by  # isort: skip
from quire.kernels.triton.moe.layout import LARGE, SMALL, arrange, max_tiles  # isort: skip
from quire.kernels.triton.moe.common import GemmTile, ChosenExperts, ExpertsConfig  # isort: skip
from quire.kernels.triton.moe.route import route  # isort: skip
from quire.kernels.triton.moe.tile import tile_experts  # isort: skip
from quire.kernels.triton.moe.vector import vector_experts  # isort: skip

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
EPS = 1e-5

# Small enough for the interpreter; 40 features and 96 inputs are not multiples of any block.
HIDDEN, WIDTH = 96, 40
VECTOR = ExpertsConfig("vector", GemmTile(16, warps=2), GemmTile(16, warps=4))
STEP = 64 if ON_GPU else 32
TILE = ExpertsConfig("tile", GemmTile(64 if ON_GPU else 16, STEP, 4, 3), GemmTile(64 if ON_GPU else 32, STEP, 4, 3), 16)
WIDE_TILE = replace(TILE, block_m=128)
"""Not transposed."""


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs hold NaN, or invalid indices, before a kernel writes them."""
    new_empty = torch.Tensor.new_empty

    def poison(self: torch.Tensor, *size: object, **options: object) -> torch.Tensor:
        made = new_empty(self, *size, **options)  # type: ignore[arg-type]
        return made.fill_(float("nan") if made.is_floating_point() else 0x5555)

    monkeypatch.setattr(torch.Tensor, "new_empty", poison)


def random(*size: int) -> torch.Tensor:
    return torch.randn(size, device=DEVICE)


def expert_weights(
    count: int, dtype: torch.dtype, hidden: int = HIDDEN, width: int = WIDTH
) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = random(count, 2 * width, hidden) * hidden**-0.5
    return gate_up.to(dtype), (random(count, hidden, width) * width**-0.5).to(dtype)


def reference(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Token by token, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, (row, chosen) in enumerate(zip(x.double(), experts.tolist(), strict=True)):
        for slot, expert in enumerate(chosen):
            if 0 <= expert < len(gate_up):
                gate, up = (gate_up[expert].double() @ row).chunk(2)
                out[token] += weights[token, slot].double() * (down[expert].double() @ (F.silu(gate) * up))
    return out


def assert_close(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert out.shape == expected.shape
    assert out.dtype == dtype
    error = (out.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[dtype], f"{error:.1e}"


def run(
    config: ExpertsConfig, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    if config.kernel == "vector":
        return vector_experts(x, ChosenExperts(experts.shape[1], weights, experts), gate_up, down, config)
    return tile_experts(x, weights, experts, gate_up, down, config)


def choices(tokens: int, count: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    weights, experts = TorchOps().route(random(tokens, count), top_k, True)
    return weights.contiguous(), experts.contiguous()


RULES = [
    RouteRule(scale=2.0, shared=1),
    RouteRule(shared=1, gated=True),
    RouteRule(groups=4, top_groups=2),
    RouteRule(sigmoid=True, groups=5, top_groups=2, group_top=2, scale=2.5, shared=2),
    RouteRule(sigmoid=True, scale=1.5),
]


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_routing_by_rules(rule: RouteRule, renormalise: bool) -> None:
    count, top_k = 20, 3
    if rule.sigmoid:
        rule = replace(rule, bias=random(count))
    logits = random(9, count)
    slots = torch.arange(9, device=DEVICE) % 4  # 0: padding
    counts, expected = (torch.zeros(count, dtype=torch.int64, device=DEVICE) for _ in range(2))
    weights, experts = route(logits, top_k, renormalise, counts, slots, rule)
    good_weights, good_experts = TorchOps().route(logits, top_k, renormalise, expected, slots, rule)
    assert torch.equal(experts, good_experts) and torch.equal(counts, expected)
    torch.testing.assert_close(weights, good_weights, rtol=1e-5, atol=1e-6)
    assert experts.shape == (9, top_k + rule.shared) and (experts[slots == 0] == -1).all()


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("tokens, count, top_k", [(1, 8, 2), (5, 128, 8), (7, 60, 4), (3, 3, 3), (9, 5, 1)])
@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
def test_each_token_gets_its_likeliest_experts(
    tokens: int, count: int, top_k: int, renormalise: bool, dtype: torch.dtype
) -> None:
    logits = (random(tokens, count) * 3).to(dtype)
    counts = torch.arange(count, device=DEVICE)
    expected = counts.clone()
    weights, experts = route(logits, top_k, renormalise, counts)
    good_weights, good_experts = TorchOps().route(logits, top_k, renormalise, expected)
    assert torch.equal(experts, good_experts)
    assert torch.equal(counts, expected)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, good_weights)
    assert torch.equal(route(logits, top_k, renormalise, None)[1], experts)


def test_padding_is_routed_to_no_expert() -> None:
    logits = random(9, 12)
    slots = torch.tensor([16, 0, 33, 0, 0, 64, 17, 99, 0], device=DEVICE)
    for ops in (route, TorchOps().route):
        counts = torch.zeros(12, dtype=torch.int64, device=DEVICE)
        weights, experts = ops(logits, 3, True, counts, slots)
        unpadded = ops(logits, 3, True, None)
        assert torch.equal(experts[slots != 0], unpadded[1][slots != 0])
        assert (experts[slots == 0] == -1).all()
        torch.testing.assert_close(weights, unpadded[0])
        assert counts.sum() == 15 and torch.equal(counts, torch.bincount(experts[slots != 0].flatten(), minlength=12))


def test_ties_choose_the_lower_index_and_no_expert_out_of_range_is_chosen() -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor(
        [[0.0, 1.0, 1.0, 0.0, -0.0], [-inf, -inf, 2.0, -inf, -inf], [nan, 1.0, -nan, nan, 3.0], [-inf] * 5],
        device=DEVICE,
    )
    experts = route(logits, 4, True, None)[1]
    assert experts.tolist() == [[1, 2, 0, 3], [2, 0, 1, 3], [0, 2, 3, 4], [0, 1, 2, 3]]


@pytest.mark.parametrize("tokens", [1, 40, SMALL // 2, LARGE // 2, LARGE // 2 + 3])
@pytest.mark.parametrize("skewed", [False, True])
def test_pairs_are_sorted_by_expert(tokens: int, skewed: bool) -> None:
    count, block_m = 12, 16
    experts = torch.randint(-1, 4 if skewed else count + 1, (tokens, 2), device=DEVICE).int()
    layout = arrange(experts, count, block_m)
    flat = experts.flatten().tolist()
    ours = [pair for pair, expert in enumerate(flat) if 0 <= expert < count]
    order = layout.order.tolist()
    assert sorted(order[: len(ours)]) == ours
    assert layout.tiles == max_tiles(2 * tokens, count, block_m)
    seen = []
    for expert, first, end, _ in layout.spans.tolist():
        if expert < count:
            rows = order[first : min(first + block_m, end)]
            assert rows
            assert {flat[pair] for pair in rows} == {expert}
            seen += rows
    assert sorted(seen) == ours


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
@pytest.mark.parametrize(
    "config, tokens",
    [
        *((VECTOR, tokens) for tokens in (1, 3)),
        *((TILE, tokens) for tokens in (1, 5, 21)),
        *((replace(config, tma=True), 21) for config in (replace(TILE, block_m=32), WIDE_TILE)),
        (WIDE_TILE, 21),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else f"{value.kernel}{value.block_m}{value.tma * '-tma'}",
)
def test_any_number_of_tokens(config: ExpertsConfig, tokens: int, dtype: torch.dtype) -> None:
    gate_up, down = expert_weights(6, dtype)
    x, routing = random(tokens, HIDDEN).to(dtype), choices(tokens, 6, 3)
    out = run(config, x, *routing, gate_up, down)
    assert_close(out, reference(x, *routing, gate_up, down), dtype)


@pytest.mark.parametrize("config", [VECTOR, TILE, WIDE_TILE], ids=["vector", "tile", "wide"])
def test_experts_on_other_ranks_add_nothing(config: ExpertsConfig) -> None:
    gate_up, down = expert_weights(4, HALF)
    x, weights = random(3, HIDDEN).to(HALF), random(3, 2).abs()
    experts = torch.tensor([[0, 4], [-1, 3], [7, -5]], dtype=torch.int32, device=DEVICE)
    out = run(config, x, weights, experts, gate_up, down)
    assert_close(out, reference(x, weights, experts, gate_up, down), HALF)
    assert not out[2].any()


@pytest.mark.parametrize("config", [TILE, WIDE_TILE], ids=["tile", "wide"])
def test_all_tokens_to_one_expert(config: ExpertsConfig) -> None:
    gate_up, down = expert_weights(5, HALF)
    x, weights = random(70, HIDDEN).to(HALF), random(70, 1)
    experts = torch.full((70, 1), 3, dtype=torch.int32, device=DEVICE)
    out = run(config, x, weights, experts, gate_up, down)
    assert_close(out, reference(x, weights, experts, gate_up, down), HALF)


@pytest.mark.parametrize("config", [VECTOR, TILE, WIDE_TILE], ids=["vector", "tile", "wide"])
def test_a_token_has_the_same_result_in_any_batch(config: ExpertsConfig) -> None:
    gate_up, down = expert_weights(5, HALF)
    x, (weights, experts) = random(9, HIDDEN).to(HALF), choices(9, 5, 2)
    out = run(config, x, weights, experts, gate_up, down)
    for chosen in ([7], [7, 3, 8]) if config is VECTOR else ([7], [7, 3, 8], list(reversed(range(9)))):
        again = run(config, x[chosen], weights[chosen], experts[chosen], gate_up, down)
        assert_same_bits(again, out[chosen])


@pytest.mark.parametrize(
    "count, top_k, renormalise, dtype",
    [(8, 2, True, HALF), (12, 5, False, HALF), (12, 5, True, torch.float32), (40, 3, False, torch.float32)],
)
def test_the_norm_is_fused_into_the_experts_of_few_tokens(
    count: int, top_k: int, renormalise: bool, dtype: torch.dtype
) -> None:
    gate_up, down = expert_weights(count, dtype)
    x, gain = random(2, HIDDEN).to(dtype), random(HIDDEN).to(dtype)
    chosen = TorchOps().route(random(2, count).to(dtype), top_k, renormalise, None)
    out = vector_experts(x, ChosenExperts(top_k, *chosen), gate_up, down, VECTOR, (gain, EPS))
    inputs = TorchOps().rms_norm(x.float(), gain.float(), EPS)
    assert_close(out, reference(inputs, *chosen, gate_up, down), dtype)


@pytest.mark.parametrize("group", [2, 3, 16] if ON_GPU else [3])
def test_wide_experts_are_visited_by_groups_of_tiles(monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    """Five tiles of two experts, and a partial tile at the end."""
    monkeypatch.setattr(moe_tile, "GROUP", group)
    moe_tile._constants.cache_clear()
    width = moe_tile.WIDE * WIDE_TILE.gate_up.n + 8
    gate_up, down = expert_weights(2, HALF, 32, width)
    x, routing = random(260, 32).to(HALF), choices(260, 2, 2)
    out = run(WIDE_TILE, x, *routing, gate_up, down)
    moe_tile._constants.cache_clear()
    assert_close(out, reference(x, *routing, gate_up, down), HALF)


def test_wide_experts_are_read_in_chunks() -> None:
    gate_up, down = expert_weights(2, HALF, 32, 4500)
    x, routing = random(1, 32).to(HALF), choices(1, 2, 2)
    config = VECTOR if ON_GPU else replace(VECTOR, gate_up=GemmTile(512, warps=1))
    out = run(config, x, *routing, gate_up, down)
    assert_close(out, reference(x, *routing, gate_up, down), HALF)


@pytest.mark.parametrize("activation", ["clamped_swiglu", "gelu_tanh", "relu2_alone"])
@pytest.mark.parametrize("config", [VECTOR, TILE, WIDE_TILE], ids=["vector", "tile", "wide"])
def test_biases_and_other_activations(config: ExpertsConfig, activation: str) -> None:
    gate_up, down = expert_weights(4, HALF)
    if not has_gate(activation):  # up alone
        gate_up = gate_up[:, down.shape[2] :].contiguous()
    variant = ExpertVariant(activation, random(4, gate_up.shape[1]).to(HALF), random(4, HIDDEN).to(HALF))
    x, (weights, experts) = random(5, HIDDEN).to(HALF) * 3, choices(5, 5, 2)  # the fifth expert is on another rank
    out = experts_by(x, weights, experts, gate_up, down, config, variant)
    expected = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, (row, chosen) in enumerate(zip(x.double(), experts.tolist(), strict=True)):
        for slot, expert in enumerate(chosen):
            if expert < 4:
                first, second = (bias.double() for bias in variant.biases(expert))
                product = gate_up[expert].double() @ row + first
                features = GATES[activation](*product.chunk(2)) if has_gate(activation) else product.relu().square()
                expected[token] += weights[token, slot].double() * (down[expert].double() @ features + second)
    assert_close(out, expected, HALF)
