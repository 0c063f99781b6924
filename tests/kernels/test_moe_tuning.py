"""How the experts' kernel is chosen: tables, guesses, measuring; and that `Ops` uses it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.kernels.triton_target import DEVICE, HALF, ON_GPU, assert_same_bits

from quire.kernels.reference import TorchOps  # isort: skip
from quire.kernels.triton import ops  # isort: skip
from quire.kernels.triton.moe import experts as moe
from quire.kernels.triton.moe import tuning as moe_tuning

from quire.kernels.triton.moe.common import GemmTile, ExpertsConfig, ExpertsShape  # isort: skip
from quire.kernels.triton.moe.tuning import (  # isort: skip
    BUCKETS, ExpertsTuner, candidates, config_of, entry_of, guess, key_of,
)  # fmt: skip
from quire.kernels.triton.tuning_table import Gpu, TuningTables, read_table, write_table  # isort: skip

BF16 = torch.bfloat16
H200 = Gpu("NVIDIA H200", 132, True)
QWEN3 = ExpertsShape(128, 8, 768, 2048)
MIXTRAL = ExpertsShape(8, 2, 14336, 4096)
VECTOR = ExpertsConfig("vector", GemmTile(2, warps=4), GemmTile(1, warps=2))
TILE = ExpertsConfig("tile", GemmTile(64, 64, 4, 5), GemmTile(128, 64, 4, 5), 32, True)


def experts_tuner(own: Path | None = None) -> ExpertsTuner:
    return ExpertsTuner(TuningTables(H200, None, own))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape", [QWEN3, MIXTRAL, ExpertsShape(60, 4, 1408, 2048), ExpertsShape(3, 1, 20, 36)], ids=str
)
def test_a_guess_fits_any_shape(shape: ExpertsShape, dtype: torch.dtype) -> None:
    for tokens in BUCKETS:
        found = candidates(shape, tokens, dtype, H200)
        assert guess(shape, tokens, dtype, H200) == found[0].base
        for base, gate_ups, downs in found:
            if base.kernel == "vector":
                assert tokens <= 8
                continue
            assert not base.tma or shape.hidden * dtype.itemsize % 16 == shape.width * dtype.itemsize % 16 == 0
            for blocks, matrices in ((gate_ups, 2), (downs, 1)):
                for block in blocks:
                    assert block.stages >= 1
                    tile = (matrices * block.n + base.block_m) * block.k * dtype.itemsize
                    assert tile * block.stages <= 227 * 1024


def test_few_tokens_use_vectors_and_many_use_tall_tiles() -> None:
    assert guess(QWEN3, 1, BF16, H200).kernel == "vector"
    heights = [guess(QWEN3, tokens, BF16, H200).block_m for tokens in (16, 256, 512, 1024, 8192)]
    assert heights == [16, 32, 64, 128, 128]


@pytest.mark.parametrize("config", [VECTOR, TILE, replace(TILE, tma=False)], ids=str)
def test_a_table_keeps_a_configuration(config: ExpertsConfig, tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    write_table(path, {key_of(QWEN3, 256, BF16): entry_of(config) | {"us": 1.0}})
    tuner = experts_tuner(path)
    assert tuner.choose(QWEN3, 256, BF16) == config
    assert tuner.choose(QWEN3, 128, BF16) == guess(QWEN3, 128, BF16, H200)


@pytest.mark.parametrize(
    "damage",
    [{}, {"kernel": "tile"}, {"gate_up": [64, 64]}, {"down": [1, 2, 3, "4"]}, {"kernel": "warp"}, {"block_m": 3}],
    ids=str,
)
def test_an_entry_this_version_does_not_know_is_a_guess(damage: dict, tmp_path: Path) -> None:
    entry = {} if damage in ({}, {"kernel": "tile"}) else entry_of(TILE)
    assert config_of(entry | damage) is None


def test_the_fastest_shape_of_each_gemm_is_stored(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    groups = candidates(QWEN3, 256, BF16, H200)
    gate_up, down = groups[1].gate_ups[-1], groups[1].downs[1]

    def timer(shape: ExpertsShape, tokens: int, dtype: torch.dtype, config: ExpertsConfig, part: str = "") -> float:
        if part == "gate_up":
            return 5.0 if config.gate_up == gate_up else 6.0
        if part == "down":
            return 5.0 if config.down == down else 6.0
        return 12.0 - (config.block_m == groups[1].base.block_m) - (not config.tma)

    found = experts_tuner(path).tune(QWEN3, BF16, [256], timer)
    best = replace(groups[1].base, gate_up=gate_up, down=down, tma=False)
    assert found == {key_of(QWEN3, 256, BF16): entry_of(best) | {"us": 10.0}} == read_table(path)


def test_configurations_that_cannot_be_measured_are_not_kept() -> None:
    assert experts_tuner().tune(QWEN3, BF16, [1, 256], lambda *_: float("inf")) == {}


def test_measuring_stops_at_the_time_limit() -> None:
    assert experts_tuner().tune(QWEN3, BF16, [1, 256], lambda *_: 1.0, expired=lambda: True) == {}


HIDDEN, WIDTH, COUNT, TOP = 64, 32, 8, 2
SMALL = {
    "vector": ExpertsConfig("vector", GemmTile(16, warps=1), GemmTile(16, warps=2)),
    "tile": ExpertsConfig("tile", GemmTile(64 if ON_GPU else 32, 32, 4, 2), GemmTile(64, 32, 4, 2), 16),
}


def random(*size: int) -> torch.Tensor:
    return torch.randn(size, device=DEVICE).to(HALF)


def layer() -> tuple[torch.Tensor, ...]:
    """Gain, router, experts. No two logits are so close that rounding decides."""
    scale = HIDDEN**-0.5
    router = torch.arange(1, COUNT + 1, device=DEVICE)[:, None].to(HALF) * random(HIDDEN) * scale
    return random(HIDDEN), router, random(COUNT, 2 * WIDTH, HIDDEN) * scale, random(COUNT, HIDDEN, WIDTH) * scale


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts' kernels as on a GPU; skinny GEMMs stay torch's, which are fast here."""
    monkeypatch.setattr(ops, "USE_OWN_GEMMS", True)
    if not ON_GPU:
        monkeypatch.setattr(ops, "choose", lambda *_: None)
        monkeypatch.setattr(ops, "INVARIANT", None)


@pytest.mark.parametrize("kernel", ["vector", "tile"])
@pytest.mark.parametrize("given", ["x", "residual", "both"])
def test_sparse_mlp_equals_torch(kernel: str, given: str, ours: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "choose_experts", lambda *_: SMALL[kernel])
    gain, *weights = layer()
    x = None if given == "residual" else random(3, HIDDEN)
    residual = None if given == "x" else random(3, HIDDEN)
    counts = torch.zeros(COUNT, dtype=torch.int64, device=DEVICE)
    expected_counts = counts.clone()
    copy = None if residual is None else residual.clone()
    good, good_stream = TorchOps().sparse_mlp(x, copy, gain, 1e-5, *weights, TOP, True, expected_counts)
    out, stream = ops.TritonOps().sparse_mlp(x, residual, gain, 1e-5, *weights, TOP, True, counts)
    torch.testing.assert_close(out, good, rtol=2e-2, atol=2e-2)
    assert torch.equal(stream, good_stream)
    assert torch.equal(counts, expected_counts)


def test_in_batch_invariant_mode_a_row_is_the_same_in_any_batch(ours: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(moe_tuning, "INVARIANT", SMALL["tile"])
    invariant = ops.TritonOps(batch_invariant=True)
    _, router, gate_up, down = layer()
    x = random(9, HIDDEN)
    routing = TorchOps().route(x @ router.T, TOP, True)
    whole = invariant.experts(x, *routing, gate_up, down)
    for rows in ([4], [5, 4, 0]):
        part = invariant.experts(x[rows], *(given[rows] for given in routing), gate_up, down)
        assert_same_bits(part, whole[rows])


def test_kernels_compiled_at_start_are_those_of_the_steps(ours: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "choose_experts", lambda _, tokens, __: SMALL["vector" if tokens <= 2 else "tile"])
    _, _, gate_up, down = layer()
    tasks = ops.TritonOps().expert_kernels_of(gate_up, down, TOP, True, len(gate_up), 4)
    assert len(tasks) == len({str(kernel) for kernel in tasks}) == 9
    for name, task in tasks.items():
        if ON_GPU or "arrange" not in str(name):
            task()


def test_a_shape_is_read_from_the_weights() -> None:
    assert moe.shape_of(torch.empty(128, 2048, 768, device="meta"), 8) == QWEN3


def test_tokens_are_rounded_up_to_a_bucket() -> None:
    tuner = experts_tuner()
    assert tuner.choose(QWEN3, 17, BF16) == guess(QWEN3, 32, BF16, H200)
    assert tuner.choose(QWEN3, 100_000, BF16) == guess(QWEN3, BUCKETS[-1], BF16, H200)
