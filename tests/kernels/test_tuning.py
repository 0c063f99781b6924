"""How a skinny GEMM's kernel is chosen: tables, guesses, measuring."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from quire.kernels.triton.moe import tuning as moe_tuning
from quire.kernels.triton.skinny_gemm import tuning
from tests.kernels.triton_target import DEVICE, HALF, ON_GPU

from quire.kernels.triton.skinny_gemm.gemm import GemmConfig  # isort: skip
from quire.kernels.triton.skinny_gemm.candidates import GemmShape, candidates, guess  # isort: skip
from quire.kernels.triton.skinny_gemm.timing import GraphTimer, random_inputs, run  # isort: skip
from quire.kernels.triton.skinny_gemm.tuning import KINDS, GemmTuner, GemmVariant, key_of  # isort: skip
from quire.kernels.triton.tuning_table import (  # isort: skip
    TABLES, Gpu, TuningTables, current_gpu, own_path, read_table, shipped_path, write_table,
)  # fmt: skip

BF16 = torch.bfloat16
H200 = Gpu("NVIDIA H200", 132, True)
QKV = GemmShape("linear", 4096, 1024)


def gemm_tuner(shipped: Path | None = None, own: Path | None = None) -> GemmTuner:
    return GemmTuner(TuningTables(H200, shipped, own))


def table(path: Path, **entries: dict) -> Path:
    write_table(path, {key_of(QKV, int(bucket[1:]), BF16): entry for bucket, entry in entries.items()})
    return path


def test_the_users_table_comes_first_then_the_shipped_one_then_a_guess(tmp_path: Path) -> None:
    shipped = table(tmp_path / "shipped.json", _1={"kernel": "cublas"}, _2={"kernel": "vector", "block_n": 8})
    own = table(tmp_path / "own.json", _1={"kernel": "vector", "block_n": 2, "warps": 8, "us": 3.0})
    tuner = gemm_tuner(shipped, own)
    assert tuner.choose(QKV, 1, BF16) == GemmConfig("vector", 2, warps=8)
    assert tuner.choose(QKV, 2, BF16) == GemmConfig("vector", 8)
    assert tuner.choose(QKV, 4, BF16) == guess(QKV, 4, BF16, H200)


def test_rows_are_rounded_up_to_a_bucket(tmp_path: Path) -> None:
    own = table(tmp_path / "own.json", _4={"kernel": "vector", "block_n": 8}, _512={"kernel": "cublas"})
    tuner = gemm_tuner(own=own)
    assert tuner.choose(QKV, 3, BF16) == tuner.choose(QKV, 4, BF16) == GemmConfig("vector", 8)
    assert tuner.choose(QKV, 300, BF16) is None
    assert tuner.choose(QKV, 513, BF16) is None


def test_choosing_reads_the_tables_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Counting(GemmTuner):
        def choose(self, shape: GemmShape, rows: int, dtype: torch.dtype) -> GemmConfig | None:
            asked.append(rows)
            return super().choose(shape, rows, dtype)

    monkeypatch.setattr(tuning, "GemmTuner", Counting)
    tuning._chosen.cache_clear()
    for _ in range(3):
        assert tuning.choose("linear", 2, 4096, 1024, BF16) is not None
        assert tuning.choose("linear", 5000, 4096, 1024, BF16) is None
        assert tuning.choose("linear", 0, 4096, 1024, BF16) is None
    assert asked == [2]
    tuning._chosen.cache_clear()


@pytest.mark.parametrize("damage", [b"", b"{", b"[1, 2]", b'{"linear 1 4096x1024 bfloat16": 7}', b"\xff\xfe"])
def test_a_damaged_table_is_ignored_and_rewritten(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "own.json"
    path.write_bytes(damage)
    tuner = gemm_tuner(own=path)
    assert tuner.choose(QKV, 1, BF16) == guess(QKV, 1, BF16, H200)
    tuner.tune([QKV], BF16, [1], lambda *_: 1.0)
    assert list(read_table(path)) == [key_of(QKV, 1, BF16)]


def test_entries_of_one_weight_are_sorted_by_rows(tmp_path: Path) -> None:
    keys = [
        "32 4096x1024 bfloat16", "1024 4096x1024 bfloat16", "128 6144x1024 bfloat16", "experts 8 4x64x64/2 bfloat16",
        "linear 8 4096x1024 bfloat16", "linear 16 4096x1024 bfloat16", "linear 2 6144x1024 bfloat16", "no number",
    ]  # fmt: skip
    write_table(tmp_path / "t.json", {key: {} for key in sorted(keys, reverse=True)})
    assert list(read_table(tmp_path / "t.json")) == keys


def test_an_entry_this_version_does_not_know_is_cublas(tmp_path: Path) -> None:
    own = table(
        tmp_path / "own.json", _1={"kernel": "warp", "block_n": 2}, _2={"kernel": "vector"},
        _4={"kernel": "vector", "block_n": "8"},
    )  # fmt: skip
    tuner = gemm_tuner(own=own)
    assert [tuner.choose(QKV, rows, BF16) for rows in (1, 2, 4)] == [None, None, None]


def test_a_table_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table(tmp_path / "tuning" / "own.json", _1={"kernel": "cublas"})
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError):
        table(path, _1={"kernel": "vector", "block_n": 4})
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["own.json"]


def test_tables_keep_what_others_measured_and_are_sorted(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    tuner = gemm_tuner(own=path)
    table(path, _16={"kernel": "cublas"})  # by another process, since
    tuner.tune([QKV], BF16, [8, 1], lambda *_: 1.0)
    assert [key.split()[1] for key in json.loads(path.read_text())] == ["1", "8", "16"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n, k", [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576), (64, 8), (16, 64)])
def test_a_guess_fits_any_shape(n: int, k: int, kind: str, dtype: torch.dtype) -> None:
    shape = GemmShape(kind, n, k)
    for rows in tuning.BUCKETS:
        config = guess(shape, rows, dtype, H200)
        if rows <= 2 or (rows == 4 and n * k * dtype.itemsize < 12e6):
            assert config is not None
            assert config.kernel == "vector"
        elif rows > 16 or n * k * dtype.itemsize > 13e6:
            assert config is None
        for config in candidates(shape, rows, dtype, H200):
            assert config.kernel == "tile" or rows <= (4 if config.kernel == "vector" else config.block_m)
            assert config.split == 1 or config.split <= k // config.block_k
            assert dtype.itemsize == 2 or config.kernel == "vector"
            assert not (shape.norm and (config.split > 1 or (config.programs and config.kernel == "tile")))
            if config.kernel != "vector":
                depth = config.block_k * (config.warps if config.kernel == "dot" else 1)
                tile = (config.block_n * (2 if shape.silu else 1) + config.block_m) * depth * dtype.itemsize
                assert tile * (config.stages - 1) <= 227 * 1024


def test_odd_weights_are_left_to_cublas() -> None:
    assert guess(GemmShape("linear", 128, 100), 1, BF16, H200) is None
    assert guess(GemmShape("linear", 1, 128), 1, BF16, H200) is None


def test_tma_is_not_a_candidate_without_tma() -> None:
    for rows in tuning.BUCKETS:
        assert not any(config.tma for config in candidates(QKV, rows, HALF, Gpu("NVIDIA A100", 108, False)))


@pytest.mark.parametrize("ours, kernel", [(97.0, "vector"), (98.5, "cublas"), (120.0, "cublas")])
def test_a_kernel_must_be_two_percent_faster(ours: float, kernel: str) -> None:
    tuner = gemm_tuner()
    best = candidates(QKV, 1, BF16, H200)[3]

    def timer(shape: GemmShape, rows: int, dtype: torch.dtype, variant: GemmVariant) -> float:
        return {None: 100.0, best: ours}.get(variant.config, float("inf"))

    entry = tuner.tune([QKV], BF16, [1], timer)[key_of(QKV, 1, BF16)]
    assert entry["kernel"] == kernel
    assert entry["cublas_us"] == 100.0
    assert tuner.choose(QKV, 1, BF16) == (best if kernel == "vector" else None)


def test_a_fused_kernel_must_beat_the_less_fused_ones_too() -> None:
    parts, whole = GemmShape("linear", 4096, 1024), GemmShape("norm_linear", 4096, 1024)

    def timer(shape: GemmShape, rows: int, dtype: torch.dtype, variant: GemmVariant) -> float:
        if variant.config is None:
            return 100.0
        return 80.0 if variant.norm else 70.0

    tuner = gemm_tuner()
    found = tuner.tune([whole, parts], BF16, [1], timer)
    assert found[key_of(parts, 1, BF16)]["kernel"] == "vector"
    assert found[key_of(whole, 1, BF16)] == {"kernel": "cublas", "us": 70.0, "cublas_us": 100.0}


def test_shipped_less_fused_kernels_are_not_measured_again(tmp_path: Path) -> None:
    variants = []

    def timer(shape: GemmShape, rows: int, dtype: torch.dtype, variant: GemmVariant) -> float:
        variants.append(variant)
        return 1.0

    shipped = table(tmp_path / "shipped.json", _1={"kernel": "vector", "block_n": 2})
    whole = QKV._replace(kind="norm_linear")
    assert tuning.with_less_fused(whole) == [QKV, whole]
    gemm_tuner(shipped).tune([whole], BF16, [1], timer)
    assert GemmVariant(GemmConfig("vector", 2)) in variants


def test_an_early_start_is_tried_on_the_fastest() -> None:
    def timer(shape: GemmShape, rows: int, dtype: torch.dtype, variant: GemmVariant) -> float:
        return 100.0 if variant.config is None else 40.0 if variant.config.early else 50.0

    tuner = gemm_tuner()
    tuner.tune([QKV], BF16, [1], timer)
    config = tuner.choose(QKV, 1, BF16)
    assert config is not None
    assert config.early


def test_every_variant_computes_the_same() -> None:
    shape, config = GemmShape("norm_silu_linear", 32, 64), GemmConfig("vector", 4, warps=1)
    inputs = random_inputs(shape, 2, torch.float32, 1, DEVICE)
    variants = [
        GemmVariant(),
        GemmVariant(config),
        GemmVariant(config, silu=True),
        GemmVariant(config, norm=True, silu=True),
    ]
    outs = []
    for variant in variants:
        fresh = inputs._replace(residual=inputs.residual.clone())  # the separate norm adds in place
        outs.append(run(shape, variant, fresh, inputs.weights[0]))
    for out in outs[1:]:
        assert out.shape == (2, 16)
        assert torch.allclose(out, outs[0], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not ON_GPU, reason="measures")
def test_measuring_finds_a_kernel(tmp_path: Path) -> None:
    gpu, path = current_gpu(), tmp_path / "own.json"
    found = GemmTuner(TuningTables(gpu, None, path)).tune([QKV], BF16, [1], GraphTimer())
    entry = found[key_of(QKV, 1, BF16)]
    assert 0.5 < entry["us"] <= entry["cublas_us"] < 100
    assert read_table(path) == found


def test_the_kernels_of_a_model_are_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "current_tables", lambda: TuningTables(H200, None, None))
    tuning._chosen.cache_clear()
    norm = GemmShape("norm_linear", 4096, 1024)

    def chosen(shape: GemmShape, rows: int) -> list[GemmConfig]:
        config = tuning.choose(shape.kind, rows, shape.n, shape.k, BF16)
        return [] if config is None else [config]

    kernels = tuning.distinct_kernels([QKV, norm, QKV], BF16, [1, 2, 8, 16, 256], chosen)
    tuning._chosen.cache_clear()
    plain = [kernel for kernel in kernels if kernel.shape == QKV]
    # Rows 8 and 16 are one kernel; 256 is cuBLAS; a norm comes with a residual stream and without.
    assert [kernel.rows for kernel in plain] == [1, 2, 8]
    assert len(kernels) == 3 * len(plain)


def test_gpus_of_one_processor_share_a_table() -> None:
    names = [
        "NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3", "NVIDIA H100 NVL", "NVIDIA H100 PCIe",
        "NVIDIA GH200 480GB",
    ]  # fmt: skip
    assert {shipped_path(Gpu(name, 132, True)).name for name in names} == {"nvidia-h200.json"}
    assert shipped_path(Gpu("NVIDIA A100-SXM4-40GB", 108, False)).name == "nvidia-a100-sxm4-40gb.json"


def test_shipped_tables_are_valid() -> None:
    paths = set(TABLES.glob("*.json")) - set(TABLES.glob("*-cublas-*.json"))
    assert paths
    for path in paths:
        for key, entry in json.loads(path.read_text()).items():
            if key.startswith("experts "):
                kernels = moe_tuning.QUANTIZED_KERNELS if key.endswith(" mxfp4") else moe_tuning.KERNELS
                assert moe_tuning.config_of(entry, kernels) is not None
            else:
                assert (tuning.config_of(entry) is None) == (entry["kernel"] == "cublas")
            assert entry["us"] > 0


def test_the_users_table_is_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    path = own_path(H200)
    assert path.parent == tmp_path / "tuning"
    assert path.name.startswith("nvidia-h200-")
