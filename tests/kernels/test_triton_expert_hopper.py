"""MXFP4 experts on Hopper: when they are chosen, how values lie, that they compile; on such a GPU, what they compute.

Gluon has no interpreter. Without a GPU the order of values is checked in plain torch, and a process compiles for sm_90.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.triton_target import DEVICE, HALF, ON_GPU

from quire.kernels.gates import GATES  # isort: skip
from quire.kernels.triton import compiler, launch  # isort: skip
from quire.kernels.triton.moe import tuning as moe_tuning  # isort: skip
from quire.kernels.triton.moe.common import ChosenExperts, ExpertsConfig, ExpertsShape, GemmTile  # isort: skip
from quire.kernels.triton.moe.layout import ExpertLayout, arrange  # isort: skip
from quire.kernels.triton.quantized import expert_hopper  # isort: skip
from quire.kernels.triton.quantized import experts as quantized  # isort: skip
from quire.kernels.triton.quantized.expert_hopper import (  # isort: skip
    config_for, gather_rows, hopper_experts, operand_order, pitch_of,
)  # fmt: skip
from quire.kernels.triton.quantized.expert_stacks import Stack, stack_of  # isort: skip
from quire.kernels.triton.tuning_table import Gpu, TuningTables, shipped_path, write_table  # isort: skip
from quire.kernels.weights.fp4 import Fp4Weight  # isort: skip
from quire.kernels.weights.packing import pack_nibbles, unpack_nibbles  # isort: skip

ON_HOPPER = ON_GPU and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a GPU of compute capability 9.0")
BF16 = torch.bfloat16
H200 = Gpu("NVIDIA H200", 132, True)
GPT_OSS = ExpertsShape(32, 4, 2880, 2880)
GPT_OSS_120B = ExpertsShape(128, 4, 2880, 2880)
SMALL = ExpertsShape(8, 2, 320, 192)
"""Three steps and two, the last of each a half."""
CONFIGS = [config_for(16, 8, 6), config_for(32, 8, 6), config_for(64, 8, 5), config_for(128, 8, 4)]
"""What `config_of` may choose."""
TOLERANCE = 1e-2
"""Relative; features and every expert's result are rounded to bfloat16."""


def meta_weights(shape: ExpertsShape, dtype: torch.dtype = BF16) -> tuple[Fp4Weight, Fp4Weight]:
    """Stacks without values: gate and up, down."""

    def empty(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    gate_up = Fp4Weight.allocate((shape.experts, 2 * shape.width, shape.hidden), dtype, empty)
    return gate_up, Fp4Weight.allocate((shape.experts, shape.hidden, shape.width), dtype, empty)


def stacks_of(weights: tuple[Fp4Weight, Fp4Weight]) -> tuple[Stack, Stack]:
    gate_up, down = map(stack_of, weights)
    assert gate_up is not None
    assert down is not None
    return gate_up, down


# Which kernel


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """An H200 with the shipped table, as far as choosing goes."""
    monkeypatch.setattr(expert_hopper, "arch", lambda: 90)
    use_tables(monkeypatch, TuningTables(H200, shipped_path(H200), None))
    yield monkeypatch
    moe_tuning.quantized_entry.cache_clear()


def use_tables(monkeypatch: pytest.MonkeyPatch, tables: TuningTables) -> None:
    monkeypatch.setattr(moe_tuning, "current_tables", lambda: tables)
    moe_tuning.quantized_entry.cache_clear()


def chosen(shape: ExpertsShape, tokens: int, dtype: torch.dtype = BF16, invariant: bool = False) -> ExpertsConfig:
    return quantized.config_of(*stacks_of(meta_weights(shape, dtype)), shape.top_k, tokens, invariant)


def test_gpt_oss_on_hopper_uses_it_between_few_tokens_and_prompts(hopper: pytest.MonkeyPatch) -> None:
    names = {tokens: chosen(GPT_OSS, tokens) for tokens in (1, 4, 5, 8, 40, 64, 65, 200, 512, 513, 1024, 1025, 8192)}
    heights = {tokens: config.block_m for tokens, config in names.items() if config.kernel == "hopper"}
    assert heights == {5: 16, 8: 16, 40: 16, 64: 16, 65: 32, 200: 64, 512: 64, 513: 128, 1024: 128}
    assert all(config in CONFIGS for config in names.values() if config.kernel == "hopper")
    assert [names[tokens].kernel for tokens in (1, 4, 1025, 8192)] == ["stream", "stream", "scratch", "scratch"]
    # Four times as many experts: as many tokens an expert.
    assert chosen(GPT_OSS_120B, 256) == names[64]
    assert chosen(GPT_OSS_120B, 1024).block_m == 64


def test_the_shipped_table_is_what_is_guessed_for_its_shape(hopper: pytest.MonkeyPatch) -> None:
    stacks = stacks_of(meta_weights(GPT_OSS))
    for tokens in (8, 64, 256, 1024):
        entry = moe_tuning.quantized_entry(GPT_OSS, tokens, BF16, "mxfp4")
        assert entry == quantized.candidates(*stacks, GPT_OSS.top_k, tokens)[0].base == chosen(GPT_OSS, tokens)


@pytest.mark.parametrize("arch", [0, 80, 89, 100, 120])
def test_other_devices_keep_their_kernels(arch: int, hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(expert_hopper, "arch", lambda: arch)
    found = [chosen(GPT_OSS, tokens) for tokens in moe_tuning.BUCKETS]
    assert {config.kernel for config in found} == {"stream", "tile", "scratch"}
    hopper.setattr(expert_hopper, "arch", lambda: 90)
    hopper.setattr(expert_hopper, "USE_HOPPER", False)
    assert [chosen(GPT_OSS, tokens) for tokens in moe_tuning.BUCKETS] == found


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (GPT_OSS, torch.float16),
        (ExpertsShape(32, 4, 1440, 2880), BF16),  # spans of 32 inputs
        (ExpertsShape(32, 4, 2944, 2880), BF16),  # spans of 128
        (ExpertsShape(32, 4, 64, 2880), BF16),  # a single step
    ],
    ids=str,
)
def test_other_shapes_and_dtypes_keep_their_kernels(
    shape: ExpertsShape, dtype: torch.dtype, hopper: pytest.MonkeyPatch
) -> None:
    assert all(chosen(shape, tokens, dtype).kernel != "hopper" for tokens in moe_tuning.BUCKETS)


def test_batch_invariant_experts_keep_one_kernel(hopper: pytest.MonkeyPatch) -> None:
    assert {chosen(GPT_OSS, tokens, invariant=True) for tokens in moe_tuning.BUCKETS} == {quantized.INVARIANT[False]}


def test_copies_are_multiplied_where_they_were_before(hopper: pytest.MonkeyPatch) -> None:
    stacks = [replace(stack, copy=stack.codes) for stack in stacks_of(meta_weights(GPT_OSS))]
    kernels = [quantized.config_of(*stacks, 4, tokens, False).kernel for tokens in (4, 64, 256, 512, 1024)]
    assert kernels == ["stream", "hopper", "hopper", "scratch", "scratch"]


def test_a_users_table_decides(hopper: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tile = ExpertsConfig("tile", GemmTile(128, 64, 8, 4), GemmTile(128, 64, 8, 4), 64)
    path = tmp_path / "own.json"
    entries = {(256, GPT_OSS): tile, (2048, GPT_OSS): CONFIGS[3], (256, ExpertsShape(32, 4, 2944, 2880)): CONFIGS[2]}
    write_table(
        path,
        {
            moe_tuning.key_of(shape, tokens, BF16, "mxfp4"): moe_tuning.entry_of(config) | {"us": 1.0}
            for (tokens, shape), config in entries.items()
        },
    )
    use_tables(hopper, TuningTables(H200, shipped_path(H200), path))
    assert chosen(GPT_OSS, 256) == tile
    assert chosen(GPT_OSS, 1500) == CONFIGS[3]
    assert chosen(GPT_OSS, 512) == CONFIGS[2]
    assert chosen(ExpertsShape(32, 4, 2944, 2880), 256).kernel == "tile"  # it cannot run there
    # 16-bit experts have other keys and other kernels.
    assert moe_tuning.config_of(moe_tuning.entry_of(CONFIGS[0])) is None
    assert moe_tuning.ExpertsTuner(TuningTables(H200, None, path)).known(GPT_OSS, 256, BF16) is None


@pytest.mark.parametrize("shape", [GPT_OSS, GPT_OSS_120B], ids=str)
def test_what_is_chosen_is_compiled_at_start(shape: ExpertsShape, hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(quantized, "USE_KERNELS", True)
    weights = meta_weights(shape)
    tasks = quantized.expert_kernels(*weights, shape.top_k, True, shape.experts, 1100, False, "clamped_swiglu", True)
    compiled = {key[0] if isinstance(key, tuple) else key for key in tasks}
    plain = stacks_of(weights)
    copied = [replace(stack, copy=stack.codes) for stack in plain]
    for tokens in range(1, 1101):
        for stacks in (plain, copied):
            assert quantized.config_of(*stacks, shape.top_k, tokens, False) in compiled


# How values lie


def test_rows_have_the_order_in_which_codes_come_out_of_words() -> None:
    codes = torch.randint(0, 16, (3, 320), dtype=torch.uint8)  # two and a half steps
    packed = F.pad(pack_nibbles(codes), (0, 32))
    # A step is 64 bytes of a line: two spans, of which a thread has 16 adjacent bytes, read as eight words of two
    # bytes; of four words at a time low nibbles of even and odd bytes come out, then high ones.
    parts = packed.unflatten(1, (-1, 2, 2, 4, 2, 2))  # [steps, span, thread, word pair, word, byte]
    nibbles = torch.stack((parts & 15, parts >> 4))  # [high, lines, steps, span, thread, word pair, word, byte]
    words = nibbles.permute(1, 2, 5, 0, 7, 3, 4, 6).flatten(1)
    assert torch.equal(operand_order(codes), words)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)


def test_products_do_not_depend_on_the_order() -> None:
    x, y = torch.randn(4, 2880, dtype=torch.float64), torch.randn(5, 2880, dtype=torch.float64)
    ordered = operand_order(x)
    assert ordered.shape == (4, pitch_of(2880)) == (4, 2944)
    torch.testing.assert_close(ordered @ operand_order(y).T, x @ y.T)
    places = operand_order(torch.arange(1.0, 129.0)[None])[0]
    for index in range(128):
        span, high, thread = index // 64, index // 32 % 2, index // 16 % 2
        quad, word, odd = index // 4 % 4, index // 2 % 2, index % 2
        assert places[quad * 32 + high * 16 + odd * 8 + span * 4 + thread * 2 + word] == index + 1


def test_gathered_rows_are_tokens_in_the_order_of_operands() -> None:
    x = torch.randn(5, 192, device=DEVICE).to(HALF)
    # The last two rows are pairs of other ranks: nothing was written there.
    order = torch.tensor([7, 0, 9, 3, 2**31 - 1, -(2**31)], dtype=torch.int32, device=DEVICE)
    layout = ExpertLayout(order, torch.empty(1, 4, dtype=torch.int32))
    assert torch.equal(gather_rows(x, layout, 2)[:4], operand_order(x)[[3, 0, 4, 1]])


# Compiling without a GPU


def compile_for_hopper() -> None:
    """Every kernel of `CONFIGS` for gpt-oss-20b's experts, launched at start as for steps of other sizes."""
    gate_up, down = stacks_of(meta_weights(GPT_OSS))
    tasks = quantized.launches(gate_up, down, GPT_OSS.top_k, True, GPT_OSS.experts, CONFIGS, True, "clamped_swiglu")

    def step(tokens: int, config: ExpertsConfig) -> None:
        def zeros(*size: int, dtype: torch.dtype = BF16) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device="meta")

        routing = ChosenExperts(4, zeros(tokens, 4, dtype=torch.float32), zeros(tokens, 4, dtype=torch.int32))
        biases = zeros(*gate_up.shape[:2]), zeros(*down.shape[:2])
        hopper_experts(zeros(tokens, 2880), routing, gate_up, down, config, *biases, "clamped_swiglu")

    steps = [functools.partial(step, tokens, config) for config in CONFIGS for tokens in (3, 16, 1000)]
    compiler.compile_tasks(90, 132, [*tasks.values(), *steps])


@pytest.mark.slow
def test_gpt_oss_compiles_for_hopper_once_for_any_number_of_tokens(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = "from tests.kernels import test_triton_expert_hopper as test; test.compile_for_hopper()"
    subprocess.run(
        [sys.executable, "-c", command], check=True, env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        timeout=400, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    made = sorted(path.stem for path in tmp_path.rglob("*.cubin"))
    sorting = ["_arrange"] * 3 + ["_combine", "_count", "_gather"]
    assert made == sorted([*["_products"] * 2 * len(CONFIGS), *sorting, "_route"])


# On such a GPU


class Layer(NamedTuple):
    """Experts with random codes and biases; for inputs about 1 outputs are about 1."""

    shape: ExpertsShape
    weights: tuple[Fp4Weight, Fp4Weight]
    biases: tuple[torch.Tensor | None, torch.Tensor | None]
    activation: str

    def run(self, x: torch.Tensor, routing: ChosenExperts, config: ExpertsConfig) -> torch.Tensor:
        return quantized.expert_outputs(x, routing, *stacks_of(self.weights), config, *self.biases, self.activation)

    def expected(self, x: torch.Tensor, routing: ChosenExperts) -> torch.Tensor:
        """Expert by expert, with dequantized matrices in float32."""
        out = torch.zeros(x.shape, device=DEVICE)
        for expert in range(self.shape.experts):
            token, slot = (routing.experts == expert).nonzero(as_tuple=True)
            features = GATES[self.activation](*self._product(x[token], expert, 0).chunk(2, 1)).to(BF16)
            out.index_add_(0, token, self._product(features, expert, 1) * routing.weights[token, slot, None])
        return out

    def _product(self, rows: torch.Tensor, expert: int, part: int) -> torch.Tensor:
        bias = self.biases[part]
        out = rows.float() @ self.weights[part][expert].dequantize().float().T
        return out if bias is None else out + bias[expert].float()


def make_layer(shape: ExpertsShape, biased: bool = True, activation: str = "clamped_swiglu") -> Layer:
    def fill(weight: Fp4Weight) -> Fp4Weight:
        weight.codes.random_(0, 256)
        exponent = 127 - round(0.5 * (weight.shape[2] * 8).bit_length())
        weight.scale.random_(exponent - 1, exponent + 2)
        return weight

    def zeros(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=DEVICE)

    shapes = (shape.experts, 2 * shape.width, shape.hidden), (shape.experts, shape.hidden, shape.width)
    weights = [fill(Fp4Weight.allocate(size, BF16, zeros)) for size in shapes]
    biases = [torch.randn(size[:2], device=DEVICE).to(BF16) if biased else None for size in shapes]
    return Layer(shape, (weights[0], weights[1]), (biases[0], biases[1]), activation)


def route(shape: ExpertsShape, tokens: int, favoured: int = 0, elsewhere: bool = True) -> ChosenExperts:
    """Random experts; `favoured`: most tokens choose among this many; `elsewhere`: some are on other ranks."""
    scores = torch.rand(tokens, shape.experts, device=DEVICE)
    scores[: tokens * 9 // 10, :favoured] += 1
    experts = scores.topk(shape.top_k).indices.int()
    if elsewhere:
        experts[tokens // 2, 1] = -1
        experts[tokens // 3, 0] = shape.experts + 5
    return ChosenExperts(shape.top_k, torch.rand(tokens, shape.top_k, device=DEVICE), experts)


def random_rows(shape: ExpertsShape, tokens: int) -> torch.Tensor:
    return torch.randn(tokens, shape.hidden, device=DEVICE).to(BF16)


def error_of(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.float() - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Layer:
    """gpt-oss-20b's experts, compiled as an engine's start does."""
    torch.manual_seed(0)
    layer = make_layer(GPT_OSS)
    found = quantized.expert_kernels(*layer.weights, 4, True, 32, 1024, False, "clamped_swiglu", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CACHE", str(tmp_path_factory.mktemp("cache")))
        compiler.Compilers(list(found.values()), "experts").wait()
    for task in found.values():
        task()
    torch.cuda.synchronize()
    return layer


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs hold NaN, or invalid indices, before a kernel writes them."""
    new_empty = torch.Tensor.new_empty

    def poison(self: torch.Tensor, *size: object, **options: object) -> torch.Tensor:
        made = new_empty(self, *size, **options)  # type: ignore[arg-type]
        return made.fill_(float("nan") if made.is_floating_point() else 0x55555555)

    monkeypatch.setattr(torch.Tensor, "new_empty", poison)


@needs_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 16, 40, 64, 100, 256, 300, 1000, 1024])
def test_gpt_oss_equals_dequantized_matrices(gpt_oss: Layer, tokens: int) -> None:
    torch.manual_seed(tokens)
    x = random_rows(GPT_OSS, tokens)
    for favoured in (0, 4):
        routing = route(GPT_OSS, tokens, favoured, elsewhere=tokens > 1)
        expected = gpt_oss.expected(x, routing)
        results = [gpt_oss.run(x, routing, config) for config in CONFIGS]
        assert max(error_of(out, expected) for out in results) < TOLERANCE
        assert torch.equal(results[0], gpt_oss.run(x, routing, CONFIGS[0]))


@needs_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
def test_few_steps_and_few_lines(biased: bool, activation: str) -> None:
    torch.manual_seed(1)
    layer = make_layer(SMALL, biased, activation)
    for tokens in (1, 30, 500):
        x, routing = random_rows(SMALL, tokens), route(SMALL, tokens, elsewhere=tokens > 1)
        for config in (CONFIGS[0], CONFIGS[2]):
            assert error_of(layer.run(x, routing, config), layer.expected(x, routing)) < TOLERANCE


@needs_hopper
def test_a_rank_without_tokens_adds_nothing(gpt_oss: Layer) -> None:
    routing = route(GPT_OSS, 9, elsewhere=False)
    elsewhere = ChosenExperts(4, routing.weights, routing.experts + 32)
    assert not gpt_oss.run(random_rows(GPT_OSS, 9), elsewhere, CONFIGS[0]).any()


@needs_hopper
def test_the_kernels_it_replaces_differ_by_rounding_only(gpt_oss: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    for tokens in (8, 64, 256):
        x, routing = random_rows(GPT_OSS, tokens), route(GPT_OSS, tokens)
        monkeypatch.setattr(expert_hopper, "USE_HOPPER", True)
        ours = quantized.config_of(*stacks_of(gpt_oss.weights), 4, tokens, False)
        monkeypatch.setattr(expert_hopper, "USE_HOPPER", False)
        before = quantized.config_of(*stacks_of(gpt_oss.weights), 4, tokens, False)
        assert (ours.kernel, before.kernel) == ("hopper", "tile")
        assert error_of(gpt_oss.run(x, routing, ours), gpt_oss.run(x, routing, before).float()) < 5e-3


@needs_hopper
@pytest.mark.parametrize("tokens", [1, 8, 64, 256, 1024])
def test_a_captured_graph_follows_its_inputs(gpt_oss: Layer, tokens: int) -> None:
    """Three layers after each other, so that each kernel starts while the one before it ends."""
    torch.manual_seed(tokens)
    weights, layers = route(GPT_OSS, tokens).weights / 8, 3
    x, experts = random_rows(GPT_OSS, tokens), route(GPT_OSS, tokens, elsewhere=False).experts
    routing = ChosenExperts(4, weights, experts)

    def steps(rows: torch.Tensor) -> torch.Tensor:
        for _ in range(layers):
            out = quantized.quantized_experts(
                rows, weights, experts, *gpt_oss.weights, gpt_oss.activation, *gpt_oss.biases
            )  # fmt: skip
            assert out is not None
            rows = out
        return rows

    steps(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = steps(x)
    for favoured in (0, 4):
        x.copy_(random_rows(GPT_OSS, tokens))
        experts.copy_(route(GPT_OSS, tokens, favoured).experts)
        graph.replay()
        first = captured.clone()
        expected = x
        for _ in range(layers):
            expected = gpt_oss.expected(expected, routing).to(BF16)
        assert error_of(first, expected.float()) < 2 * TOLERANCE
        assert torch.equal(first, steps(x))
        for _ in range(20):
            graph.replay()
            assert torch.equal(captured, first)


@needs_hopper
def test_nothing_is_compiled_after_the_start(gpt_oss: Layer) -> None:
    launch.watch_compiles()
    try:
        for tokens in (1, 2, 5, 8, 9, 17, 33, 64, 65, 129, 200, 256, 511, 1000, 1024):
            x, routing = random_rows(GPT_OSS, tokens), route(GPT_OSS, tokens, elsewhere=tokens > 1)
            out = quantized.quantized_experts(
                x, routing.weights, routing.experts, *gpt_oss.weights, gpt_oss.activation, *gpt_oss.biases
            )
            assert out is not None
        assert launch.compiled == []
    finally:
        compiler.triton.knobs.runtime.jit_post_compile_hook = None


@needs_hopper
def test_gathered_rows_of_a_layout(gpt_oss: Layer) -> None:
    x, routing = random_rows(GPT_OSS, 300), route(GPT_OSS, 300, elsewhere=False)
    layout = arrange(routing.experts, 32, 64)
    assert torch.equal(gather_rows(x, layout, 4), operand_order(x)[layout.order.long() // 4])
