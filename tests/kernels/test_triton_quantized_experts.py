"""Experts in few bits in Triton, both kinds of kernels, against a float64 loop over dequantized matrices."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from tests.kernels.triton_target import DEVICE, HALF, ON_GPU

from quire.kernels.gates import GATES  # isort: skip
from quire.kernels.reference import TorchOps  # isort: skip
from quire.kernels.triton.quantized import experts as quantized

from quire.kernels.triton.moe.common import ChosenExperts, ExpertsConfig, GemmTile  # isort: skip
from quire.kernels.triton.quantized.expert_scratch import dequantize_stack  # isort: skip
from quire.kernels.triton.quantized.expert_stacks import Stack, stack_of  # isort: skip
from quire.kernels.triton.quantized.expert_streams import stream_experts  # isort: skip
from quire.kernels.triton.quantized.expert_tiles import encode, in_pairs  # isort: skip
from quire.kernels.triton.quantized.expert_vectors import vector_experts  # isort: skip
from quire.kernels.triton.quantized.registry import ReferenceProducts  # isort: skip
from quire.kernels.weights.base import QuantizedWeight  # isort: skip
from quire.kernels.weights.fp4 import Fp4Weight  # isort: skip
from quire.kernels.weights.grouped import GroupedWeight  # isort: skip
from quire.kernels.weights.scaled import BlockScaledWeight, ScaledWeight, quantize_rows  # isort: skip

COUNT, TOP = 4, 2
TOLERANCE = 1e-2 if ON_GPU else 1e-3
"""Relative; features and every expert's result are rounded to 16 bits, and few codes of features may differ by one."""

VECTOR = ExpertsConfig("vector", GemmTile(8 if ON_GPU else 32, warps=4), GemmTile(8 if ON_GPU else 64, warps=4))
TILE = ExpertsConfig("tile", GemmTile(64, 64, 4, 2), GemmTile(128, 64, 4, 2), 16)
BLOCK_TILE = ExpertsConfig("tile", GemmTile(128, 128, 4, 2), GemmTile(256, 128, 8, 2), 16)
STREAM = ExpertsConfig("stream", GemmTile(8, 1, 2, 1), GemmTile(16, 0, 4, 2))
TALL_TILE = ExpertsConfig("tile", GemmTile(128, 128, 8, 2), GemmTile(128, 128, 8, 2), 64)
"""Not transposed."""


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs hold NaN, or invalid indices, before a kernel writes them."""
    torch.manual_seed(0)
    new_empty = torch.Tensor.new_empty

    def poison(self: torch.Tensor, *size: object, **options: object) -> torch.Tensor:
        made = new_empty(self, *size, **options)  # type: ignore[arg-type]
        return made.fill_(float("nan") if made.is_floating_point() else 0x55)

    monkeypatch.setattr(torch.Tensor, "new_empty", poison)


def random(*size: int) -> torch.Tensor:
    return torch.randn(size, device=DEVICE)


def zeros(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(size, dtype=dtype, device=DEVICE)


def spread(size: torch.Size) -> torch.Tensor:
    return torch.rand(size, device=DEVICE) + 0.5


def make(kind: str, shape: tuple[int, int, int], rows: int = 128) -> QuantizedWeight:
    """Random codes of the full range; for inputs about 1 outputs are about 1."""
    size = shape[2] ** -0.5
    name, *options = kind.split("-")
    if name in ("block", "fp8", "int8"):
        code = torch.int8 if name == "int8" else torch.float8_e4m3fn
        made: BlockScaledWeight | ScaledWeight
        if name == "block":
            made = BlockScaledWeight.allocate(shape, HALF, zeros, (rows, 128))
        else:
            made = ScaledWeight.allocate(shape, HALF, zeros, code, options[0])
            if made.input_scale is not None:
                made.input_scale.fill_(4 / 448)
        made.codes.copy_(quantize_rows(random(*shape), code)[0])
        made.scale.copy_(spread(made.scale.shape) * size * 4 / (127 if name == "int8" else 448))
        return made
    if name == "grouped":
        bits, group = int(options[0]), int(options[1])
        weight = GroupedWeight.allocate(
            shape, HALF, zeros, bits, group, zeros="zero" in options, minimums="minimum" in options
        )
        weight.codes.random_(0, 256)
        weight.scale.copy_(spread(weight.scale.shape) * size * 4 / (1 << bits))
        if weight.zero is not None:
            weight.zero.random_(0, 1 << bits)
        if weight.minimum is not None:
            weight.minimum.copy_(spread(weight.minimum.shape) * size * -2)
        return weight
    fp4 = Fp4Weight.allocate(shape, HALF, zeros, nvidia=name == "nvfp4")
    fp4.codes.random_(0, 256)
    if fp4.factor is not None:
        fp4.scale.copy_((spread(fp4.scale.shape) * 200).to(torch.float8_e4m3fn))
        fp4.factor.copy_(spread(fp4.factor.shape) * size / 600)
    else:
        fp4.scale.random_(121, 124)
    return fp4


@dataclass
class Case:
    """Tokens, routed to some of the experts, and to one on another rank."""

    gate_up: QuantizedWeight
    down: QuantizedWeight
    x: torch.Tensor
    routing: ChosenExperts
    biases: tuple[torch.Tensor | None, torch.Tensor | None]
    activation: str

    @property
    def stacks(self) -> tuple[Stack, Stack]:
        gate_up, down = stack_of(self.gate_up), stack_of(self.down)
        assert gate_up is not None
        assert down is not None
        return gate_up, down

    def run(self, config: ExpertsConfig) -> torch.Tensor:
        return quantized.expert_outputs(
            self.x, self.routing, *self.stacks, config, *self.biases, activation=self.activation
        )

    def expected(self, x: torch.Tensor | None = None, nudged: bool = False) -> torch.Tensor:
        """Pair by pair, in float64. `nudged`: with some features between the products, drawn at random, one unit in the
        last place larger."""
        rows = self.x if x is None else x
        out = torch.zeros(rows.shape, dtype=torch.float64, device=DEVICE)
        for token, chosen in enumerate(self.routing.experts.tolist()):
            for slot, expert in enumerate(chosen):
                if not 0 <= expert < COUNT:
                    continue
                both = exact_linear(rows[token], self.gate_up[expert])
                if self.biases[0] is not None:
                    both += self.biases[0][expert].double()
                features = GATES[self.activation](*both.chunk(2)).to(HALF)
                if nudged:
                    last_bits = torch.randint(0, 2, features.shape, dtype=torch.int16, device=DEVICE)
                    features = (features.view(torch.int16) + last_bits).view(HALF)
                result = exact_linear(features, self.down[expert])
                if self.biases[1] is not None:
                    result += self.biases[1][expert].double()
                out[token] += self.routing.weights[token, slot].double() * result
        return out


def exact_linear(row: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """The product in float64, of activations as the format sees them. Only weights that no 8-bit activation meets are
    rounded to 16 bits."""
    inputs = weight.quantize_input(row[None])[0].double()
    if isinstance(weight, BlockScaledWeight):
        lines, columns = weight.shape
        scale = weight.scale.double().repeat_interleave(weight.block[0], 0)[:lines]
        return (weight.codes.double() * scale.repeat_interleave(weight.block[1], 1)[:, :columns]) @ inputs
    if isinstance(weight, ScaledWeight) and weight.inputs != "none":
        return (weight.codes.double() * weight.scale.double()[:, None]) @ inputs
    return weight.dequantize().double() @ inputs


def case(kind: str, tokens: int, hidden: int, width: int, *, rows: int = 128, biased: bool = False, activation: str = "silu") -> Case:  # fmt: skip # noqa: E501
    # Expert 3 gets no token: it is empty, or its tokens are another rank's.
    chosen = torch.stack([torch.randperm(3)[:TOP] for _ in range(tokens)]).int().to(DEVICE)
    chosen[tokens // 2, 1] = -1
    weights = torch.rand(tokens, TOP, device=DEVICE)
    biases = (random(COUNT, 2 * width).to(HALF), random(COUNT, hidden).to(HALF)) if biased else (None, None)
    gate_up, down = make(kind, (COUNT, 2 * width, hidden), rows), make(kind, (COUNT, hidden, width), rows)
    return Case(gate_up, down, random(tokens, hidden).to(HALF), ChosenExperts(TOP, weights, chosen), biases, activation)


def assert_close(out: torch.Tensor, expected: torch.Tensor, moved: float = 0.0) -> None:
    """`moved`: by how much the last bit of a feature may change the result."""
    assert out.dtype == HALF
    error = (out.double() - expected).norm() / expected.norm()
    assert error < max(TOLERANCE, moved), f"{error:.1e}"


DEQUANTIZED = [
    "fp8-none", "grouped-4-32", "grouped-4-128-zero", "grouped-4-64-minimum", "grouped-8-64-zero", "mxfp4", "nvfp4",
]  # fmt: skip
KINDS = ["block", "fp8-token", "int8-token", "fp8-tensor", *DEQUANTIZED]


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_equal_a_loop_over_pairs(kind: str) -> None:
    # 160 features are no multiple of a block of 128; both 160 and 96 have spans of 32 inputs.
    hidden, width = (128, 96) if kind in DEQUANTIZED else (256, 160)
    given = case(kind, 3, hidden, width, rows=32, biased=True, activation="clamped_swiglu")
    expected = given.expected()
    # Features are quantized again between the products: one rounded otherwise moves its code, or all of a scale's.
    moved = max(float((given.expected(nudged=True) - expected).norm() / expected.norm()) for _ in range(4))
    assert_close(given.run(TILE if kind in DEQUANTIZED else BLOCK_TILE), expected, moved)


@pytest.mark.parametrize("kind", DEQUANTIZED)
def test_a_dequantized_stack_equals_the_reference(kind: str) -> None:
    weight = make(kind, (2, 40, 160))
    stack = stack_of(weight)
    assert stack is not None
    buffer = torch.zeros(2 * 40 * 160 + 8, dtype=HALF, device=DEVICE)
    assert torch.equal(dequantize_stack(stack, buffer), weight.dequantize())
    assert not buffer[-8:].any()


@pytest.mark.parametrize("kind", ["grouped-4-32", "mxfp4"])
def test_very_many_tokens_multiply_the_dequantized_stack(kind: str) -> None:
    given = case(kind, 3, 64, 32, biased=True, activation="clamped_swiglu")
    config = ExpertsConfig("scratch", GemmTile(64, 32, 4, 2), GemmTile(64, 32, 4, 2), 16)
    assert_close(given.run(config), given.expected())


@pytest.mark.parametrize("kind", ["block", "int8-token"])
def test_tall_tiles_are_not_transposed(kind: str) -> None:
    given = case(kind, 40, 128, 128)
    assert_close(given.run(TALL_TILE), given.expected())


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_equal_a_loop_over_pairs_and_norm_first(kind: str) -> None:
    given = case(kind, 2, 256, 160, rows=32, biased=True, activation="clamped_swiglu")
    gain = random(256).to(HALF)
    out = vector_experts(
        given.x, given.routing, *given.stacks, VECTOR, *given.biases, given.activation, (gain, 1e-6)
    )  # fmt: skip
    normed = torch.nn.functional.rms_norm(given.x.float(), (256,), gain.float(), 1e-6).to(HALF)
    assert_close(out, given.expected(normed))


@pytest.mark.parametrize("tokens", [1, 2])
def test_streams_equal_a_loop_over_pairs_and_norm_one_token(tokens: int) -> None:
    # 320 inputs are two and a half pieces, 192 one and a half: the last warps have less than others, or nothing.
    given = case("mxfp4", tokens, 320, 192, biased=True, activation="clamped_swiglu")
    gain = random(320).to(HALF)
    norm = (gain, 1e-6) if tokens == 1 else None
    out = stream_experts(given.x, given.routing, *given.stacks, STREAM, *given.biases, given.activation, norm)
    normed = torch.nn.functional.rms_norm(given.x.float(), (320,), gain.float(), 1e-6).to(HALF)
    assert_close(out, given.expected(normed if tokens == 1 else None))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_activations(activation: str) -> None:
    given = case("grouped-4-32", 1, 64, 32, activation=activation)
    assert_close(given.run(VECTOR), given.expected())


@pytest.mark.parametrize("kind", ["block", "fp8-token", "int8-token", "fp8-tensor"])
def test_activations_are_quantized_as_the_layout_says(kind: str) -> None:
    weight = make(kind, (1, 128, 288))
    stack = stack_of(weight)
    assert stack is not None
    x = (random(7, 288) * 10 ** random(7, 288)).to(HALF)
    x[3] = 0
    codes, scales = encode(x, stack)
    group = 128 if kind == "block" else 288
    fake = codes.float() * scales.repeat_interleave(group, 1)[:, :288]
    assert torch.equal(fake, weight.quantize_input(x))


def test_the_products_use_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    given = case("grouped-4-32", 2, 64, 32)
    arguments = given.x, given.routing.weights, given.routing.experts, given.gate_up, given.down
    gain, router = random(64).to(HALF), random(COUNT, 64).to(HALF) * 8
    mlp = given.x, None, gain, 1e-6, router, given.gate_up, given.down, TOP, True
    products = ReferenceProducts(TorchOps(), False)
    monkeypatch.setattr(quantized, "USE_KERNELS", False)
    plain, (sparse, stream) = products.experts(*arguments), products.sparse_mlp(*mlp)
    assert not products.expert_kernels_of(given.gate_up, given.down, TOP, True, COUNT, 2)
    monkeypatch.setattr(quantized, "USE_KERNELS", True)
    monkeypatch.setattr(quantized, "config_of", lambda *_: VECTOR)
    assert_close(products.experts(*arguments), plain.double())
    fused, same = products.sparse_mlp(*mlp)
    assert_close(fused, sparse.double())
    assert torch.equal(same, stream)
    for name, task in products.expert_kernels_of(given.gate_up, given.down, TOP, True, COUNT, 2).items():
        if ON_GPU or "arrange" not in str(name):
            task()


def test_what_the_kernels_cannot_read_is_left_to_the_reference() -> None:
    ordered = GroupedWeight.allocate((2, 32, 64), HALF, zeros, 4, 32, ordered=True)
    assert stack_of(ordered) is None
    assert stack_of(BlockScaledWeight.allocate((2, 64, 64), HALF, zeros, (64, 64))) is None
    assert stack_of(GroupedWeight.allocate((32, 64), HALF, zeros, 4, 32)) is None


@pytest.mark.parametrize("kind", KINDS)
def test_configurations_exist_for_any_number_of_tokens(kind: str) -> None:
    gate_up, down = stack_of(make(kind, (2, 256, 128))), stack_of(make(kind, (2, 128, 128)))
    assert gate_up is not None
    assert down is not None
    kernels = [quantized.config_of(gate_up, down, 2, tokens, False).kernel for tokens in (1, 4, 8, 400, 100_000)]
    many = "tile" if gate_up.quantizes else "scratch"
    assert kernels == ["vector", "vector", "tile", many, many]
    assert quantized.config_of(gate_up, down, 2, 1, True) == quantized.config_of(gate_up, down, 2, 5000, True)


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize(("hidden", "width"), [(64, 192), (128, 64)])
def test_mxfp4_codes_in_pairs_of_bytes(hidden: int, width: int, bounded: bool) -> None:
    given = case("mxfp4", 5, hidden, width, biased=True, activation="clamped_swiglu")
    given.gate_up.bounded = given.down.bounded = bounded
    assert in_pairs(*given.stacks)
    for block_m in (16, 64) if ON_GPU else (16,):
        config = ExpertsConfig("tile", GemmTile(64, 64, 4, 2), GemmTile(64, 192, 4, 2), block_m)
        assert_close(given.run(config), given.expected())


def test_mxfp4_stacks_that_do_not_fit_pairs_are_read_byte_by_byte() -> None:
    given = case("mxfp4", 3, 96, 64)  # 96 inputs: spans of 32
    assert not in_pairs(*given.stacks)
    assert_close(given.run(ExpertsConfig("tile", GemmTile(32, 64, 4, 1), GemmTile(32, 64, 4, 1), 16)), given.expected())


def test_copies_are_multiplied_from_fewer_tokens_on() -> None:
    stacks = [stack_of(make("mxfp4", shape)) for shape in ((4, 256, 128), (4, 128, 128))]
    assert stacks[0] is not None and stacks[1] is not None
    copied = [replace(stack, copy=stack.codes) for stack in stacks]
    for tokens, plain, with_copy in ((64, "tile", "tile"), (128, "tile", "scratch"), (1024, "scratch", "scratch")):
        assert quantized.config_of(*stacks, 2, tokens, False).kernel == plain
        assert quantized.config_of(*copied, 2, tokens, False).kernel == with_copy


def test_a_copy_is_read_instead_of_the_codes() -> None:
    given = case("mxfp4", 3, 64, 64)
    expected = given.expected()
    for weight in (given.gate_up, given.down):
        weight.copy = weight.dequantize()
        weight.codes.zero_()
    config = ExpertsConfig("scratch", GemmTile(64, 32, 4, 2), GemmTile(64, 32, 4, 2), 16)
    assert_close(given.run(config), expected)
