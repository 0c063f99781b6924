"""How kernels of products with weights in few bits are chosen: entries of the tables, rules without them, measuring."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.triton_target import DEVICE, HALF

from quire.kernels.reference import TorchOps  # isort: skip
from quire.kernels.triton.ops import TritonOps  # isort: skip
from quire.kernels.triton.quantized import scaled, tuning, weight_only  # isort: skip
from quire.kernels.triton.quantized.gemm import WeightOnlyConfig, WeightOnlyGemm, as_words  # isort: skip
from quire.kernels.triton.quantized.registry import products_of  # isort: skip
from quire.kernels.triton.quantized.timing import random_like  # isort: skip
from quire.kernels.triton.quantized.w8 import choice  # isort: skip
from quire.kernels.triton.skinny_gemm.common import GemmConfig  # isort: skip
from quire.kernels.triton.tuning_table import Gpu, TuningTables, read_table, write_table  # isort: skip
from quire.kernels.weights.base import QuantizedWeight  # isort: skip
from quire.kernels.weights.fp4 import Fp4Weight  # isort: skip
from quire.kernels.weights.grouped import GroupedWeight  # isort: skip
from quire.kernels.weights.scaled import BlockScaledWeight, ScaledWeight  # isort: skip

BF16 = torch.bfloat16
H200 = Gpu("NVIDIA H200", 132, True)
KINDS = ("int4", "int4-zeros", "int8-groups", "mxfp4", "nvfp4", "fp8", "int8", "int8-values", "fp8-blocks")
# Llama-3.1-8B's products, and Qwen2.5-0.5B's, whose sizes are multiples of little.
SHAPES = [(6144, 4096, False), (28672, 4096, True), (4096, 14336, False), (1152, 896, False), (9728, 896, True)]


def weight_of(kind: str, n: int, k: int, device: str = "meta", dtype: torch.dtype = BF16) -> QuantizedWeight:
    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    if kind.endswith("fp4"):
        return Fp4Weight.allocate((n, k), dtype, allocate, nvidia=kind == "nvfp4")
    if kind.startswith("int4") or kind == "int8-groups":
        return GroupedWeight.allocate((n, k), dtype, allocate, int(kind[3]), 128, zeros=kind.endswith("zeros"))
    code = torch.int8 if kind.startswith("int8") else torch.float8_e4m3fn
    codes = allocate((n, k), code)
    if kind == "fp8-blocks":
        return BlockScaledWeight(codes, allocate((-(-n // 128), -(-k // 128)), torch.float32), dtype, (128, 128))
    return ScaledWeight(codes, allocate((n,), torch.float32), dtype, "none" if kind == "int8-values" else "token")


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[TuningTables]:
    """Empty tables of an H200, and our kernels in the interpreter."""
    empty = TuningTables(H200, None, None)
    for module in (scaled, weight_only):
        monkeypatch.setattr(module, "current_tables", lambda: empty)
        module._chosen.cache_clear()
        module._case.cache_clear()
    monkeypatch.setattr(choice, "current_gpu", lambda: H200)
    monkeypatch.setattr(scaled, "USE_OWN_GEMMS", True)
    monkeypatch.setattr(weight_only, "USE_KERNELS", True)
    choice.choose.cache_clear()
    yield empty
    for module in (scaled, weight_only):
        module._chosen.cache_clear()
        module._case.cache_clear()
    choice.choose.cache_clear()


def products(weight: QuantizedWeight, config: Any = None, invariant: bool = False) -> Any:
    return products_of(weight)(TritonOps(), invariant, config)


def chosen(weight: QuantizedWeight, rows: int, gated: bool, invariant: bool = False) -> Any:
    """The configuration of a product."""
    owner = products(weight, invariant=invariant)
    if isinstance(weight, ScaledWeight | BlockScaledWeight):
        return owner._config(torch.empty(rows, weight.shape[1], dtype=BF16, device="meta"), weight, gated)
    return owner._config(as_words(weight), rows, gated)


def ruled(weight: QuantizedWeight, rows: int, gated: bool) -> Any:
    """What the rules say."""
    n, k = weight.shape
    if isinstance(weight, ScaledWeight | BlockScaledWeight):
        bucket = next(size for size in scaled.BUCKETS if size >= rows)
        blocked = isinstance(weight, BlockScaledWeight)
        quantized = blocked or weight.inputs != "none"
        return choice.choose(bucket, n, k, gated, weight.codes.dtype, blocked, quantized)
    words = as_words(weight)
    assert words is not None
    return weight_only.choose(n, k // words.span, rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n, k, gated", SHAPES)
def test_without_entries_the_rules_choose(kind: str, n: int, k: int, gated: bool) -> None:
    weight = weight_of(kind, n, k)
    for rows in (1, 2, 3, 8, 16, 40, 64, 100, 256, 300, 1000):
        assert chosen(weight, rows, gated) == ruled(weight, rows, gated), rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n, k, gated", SHAPES)
def test_every_candidate_can_be_launched(kind: str, n: int, k: int, gated: bool) -> None:
    weight = weight_of(kind, n, k)
    owner = products(weight)
    keys = set()
    for rows in owner.buckets:
        case = owner.case_of(weight, rows, gated)
        if case is None:
            assert rows > 128
            continue
        keys.add(case.key)
        assert case.candidates[0] == case.rule and len(case.candidates) == len(set(case.candidates))
        x = torch.empty(rows, k, dtype=BF16, device="meta")
        for config in case.candidates:
            if isinstance(weight, ScaledWeight | BlockScaledWeight):
                assert products(weight, config)._launches(x, weight, scaled.Product(silu=gated))
            elif config.kernel != "dequantize":
                words = as_words(weight)
                assert words is not None
                weight_only.launch_of(WeightOnlyGemm(x, words, silu=gated), config)
    assert len(keys) >= 7


@pytest.mark.parametrize("kind", ["int4-zeros", "mxfp4", "fp8", "int8-values", "fp8-blocks"])
def test_an_entry_is_used_for_its_rows_and_shape_only(kind: str, tables: TuningTables) -> None:
    weight = weight_of(kind, 6144, 4096)
    case = products(weight).case_of(weight, 8, False)
    other = next(config for config in case.candidates[::-1] if config.kernel == "tile")
    tables.record({case.key: tuning.entry_of(other) | {"us": 3.0, "rule_us": 4.0}})
    assert chosen(weight, 8, False) == chosen(weight, 5, False) == other != case.rule
    assert chosen(weight, 8, False, invariant=True) != other, "batch-invariant: one shape for any number of rows"
    assert chosen(weight, 8, True) == ruled(weight, 8, True)
    assert chosen(weight, 16, False) == ruled(weight, 16, False)
    assert chosen(weight_of(kind, 4096, 4096), 8, False) == ruled(weight_of(kind, 4096, 4096), 8, False)


@pytest.mark.parametrize(
    "entry",
    [{}, {"kernel": "few"}, {"kernel": "few", "block_n": 16, "block_m": 1, "depth": 8}, {"kernel": "warp"},
     {"kernel": "tile", "block_n": "64"}, {"kernel": None, "block_n": [1]}],
    ids=str,
)  # fmt: skip
def test_entries_that_are_no_candidates_are_ignored(entry: dict[str, Any], tables: TuningTables) -> None:
    weight = weight_of("int4-zeros", 6144, 4096)
    case = products(weight).case_of(weight, 16, False)
    tables.record({case.key: {**entry, "us": 1.0}})
    assert chosen(weight, 16, False) == case.rule


def test_the_fastest_candidate_is_stored_and_read_back(tmp_path: Path) -> None:
    path, weight = tmp_path / "own.json", weight_of("fp8", 6144, 4096)
    case = products(weight).case_of(weight, 16, False)
    best = case.candidates[3]

    def time(config: Any) -> float:
        return 5.0 if config == best else 9.0 if config == case.rule else float("inf")

    entry = tuning.tune(case, TuningTables(H200, None, path), time)
    assert entry == tuning.entry_of(best) | {"us": 5.0, "rule_us": 9.0}
    assert tuning.config_of(case, TuningTables(H200, None, path)) == best
    assert str(best.block_n) in tuning.describe(entry)


def test_a_gain_within_the_noise_changes_nothing(tables: TuningTables) -> None:
    weight = weight_of("int4", 6144, 4096)
    case = products(weight).case_of(weight, 1, False)
    entry = tuning.tune(case, tables, lambda config: 10.0 if config == case.rule else 9.9)
    assert entry == tuning.entry_of(case.rule) | {"us": 10.0, "rule_us": 10.0}
    assert tuning.tune(case, TuningTables(H200, None, None), lambda _: float("inf")) is None


@pytest.mark.parametrize(
    "kind, wanted",
    [("fp8", GemmConfig("vector", 4, warps=1, programs=2)), ("int4-zeros", WeightOnlyConfig("dequantize"))],
)
def test_products_by_an_entry_are_right(kind: str, wanted: Any, tables: TuningTables, tmp_path: Path) -> None:
    """The kernel that runs is the entry's; its result that of the reference."""
    weight = random_like(weight_of(kind, 8, 512, dtype=HALF), DEVICE)
    owner = products(weight)
    case = owner.case_of(weight, 2, False)
    assert wanted in case.candidates and wanted != case.rule
    write_table(tmp_path / "own.json", {case.key: tuning.entry_of(wanted)})
    tables.record(read_table(tmp_path / "own.json"))
    assert chosen(weight, 2, False) == wanted
    assert owner.kernels_of(weight, normed=False, gated=False, bias=False, max_rows=2)
    x = torch.randn(2, 512, device=DEVICE).to(HALF)
    found, expected = owner.linear(x, weight).double(), TorchOps().linear(x, weight).double()
    assert (found - expected).norm() < 5e-3 * expected.norm()
