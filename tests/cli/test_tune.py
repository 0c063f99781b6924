"""`quire tune` on a simulated GPU: what it measures, prints, stores, and skips."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest
import torch

from quire.platforms import choose

pytest.importorskip("triton")

from quire.cli import tune
from quire.kernels.cpu import build
from quire.kernels.triton import cublaslt, tuning_table
from quire.kernels.triton.moe import timing as moe_timing
from quire.kernels.triton.moe.common import ExpertsShape
from quire.kernels.triton.quantized import timing as quantized_timing
from quire.kernels.triton.skinny_gemm import timing
from quire.kernels.triton.skinny_gemm.candidates import GemmShape
from quire.kernels.triton.skinny_gemm.tuning import GemmTuner, key_of
from quire.kernels.triton.tuning_table import Gpu, TuningTables, own_path, read_table, write_table
from tests.quantization.checkpoints import write

GPU = Gpu("NVIDIA Imaginary 9000", 100, True)
# Of a Llama of width 64, MLP 128, 4 query and 2 KV heads of 16, and 257 tokens.
SHAPES = [
    *(GemmShape("linear", n, k) for n, k in [(128, 64), (64, 64), (256, 64), (64, 128), (257, 64)]),
    GemmShape("silu_linear", 256, 64),
    GemmShape("norm_linear", 128, 64),
    GemmShape("norm_silu_linear", 256, 64),
]


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """A GPU on which fusing the norm or the gate is faster, but not both; returns what was timed."""
    timed: list[tuple[GemmShape, int, torch.dtype]] = []

    class Timer:
        def __call__(self, shape, rows, dtype, variant):
            timed.append((shape, rows, dtype))
            if variant.config is None:
                return 4.0
            fused = variant.norm + variant.silu
            return 3.0 if fused == 2 else 2.0 - fused

    build.library()  # before its cache moves: compiling it again takes most of a minute
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    monkeypatch.setattr(tune, "usable_gpu", lambda: choose("cpu"))
    monkeypatch.setattr(tuning_table, "current_gpu", lambda: GPU)
    monkeypatch.setattr(cublaslt, "current_gpu", lambda: GPU)
    monkeypatch.setattr(timing, "GraphTimer", Timer)
    monkeypatch.setattr(timing, "raise_clocks", lambda: None)
    monkeypatch.setattr(timing, "compile_all", lambda kernels: timed.clear())
    return timed


def cases(timed: list) -> set:
    return {(shape, rows) for shape, rows, _ in timed}


def test_every_gemm_of_the_model_is_measured_printed_and_stored(quire, byte_llama, measured):
    ran = quire("tune", byte_llama, "--buckets", "1,4", "--dtype", "float16")
    assert ran.code == 0, ran.err
    assert cases(measured) == {(shape, rows) for shape in SHAPES for rows in (1, 4)}
    assert {dtype for _, _, dtype in measured} == {torch.float16}
    for shape in SHAPES:
        assert f"{shape.kind} {shape.n} x {shape.k} (" in ran.out
    lines = re.findall(r"^ +[14] +(\d\.00) +4\.00  (vector n\d|not fused)", ran.out, re.M)
    assert [us for us, _ in lines] == ["2.00"] * 10 + ["1.00"] * 6
    assert ["fused" in kernel for _, kernel in lines] == [False] * 14 + [True] * 2
    own = own_path(GPU)
    assert str(own) in ran.err
    assert "16 of 16 cases to measure" in ran.err
    assert len(json.loads(own.read_text())) == 16
    kept = GemmTuner(TuningTables(GPU, None, own))
    assert all(kept.known(shape, rows, torch.float16) for shape in SHAPES for rows in (1, 4))


def test_known_results_are_measured_again_only_with_again(quire, byte_llama, measured, monkeypatch, tmp_path):
    shipped = tmp_path / "shipped.json"
    monkeypatch.setattr(tuning_table, "shipped_path", lambda gpu, library="": shipped)
    head = key_of(SHAPES[4], 1, torch.bfloat16)
    write_table(shipped, {head: {"kernel": "cublas", "us": 3.0, "cublas_us": 3.0}})
    command = ["tune", byte_llama, "--dtype", "bfloat16", "--buckets"]
    assert quire(*command, "1").code == 0
    assert cases(measured) == {(shape, 1) for shape in SHAPES if shape != SHAPES[4]}
    assert quire(*command, "1,2").code == 0
    assert cases(measured) == {(shape, 2) for shape in SHAPES}
    measured.clear()
    ran = quire(*command, "1,2")
    assert measured == []
    assert "everything was already known" in ran.err
    assert re.search(r"^ +1 +3\.00 +3\.00  cublas  \(known\)", ran.out, re.M)
    ran = quire(*command, "1", "--again")
    assert cases(measured) == {(shape, 1) for shape in SHAPES}
    assert "(known)" not in ran.out
    assert head in read_table(own_path(GPU))


def test_an_interrupted_tune_keeps_its_results(quire, byte_llama, measured, monkeypatch):
    class Tired(timing.GraphTimer):
        def __call__(self, shape, rows, dtype, variant):
            if rows == 8:
                raise KeyboardInterrupt
            return super().__call__(shape, rows, dtype, variant)

    monkeypatch.setattr(timing, "GraphTimer", Tired)
    assert quire("tune", byte_llama, "--buckets", "2,4,8", "--dtype", "bfloat16").code == 130
    assert len(read_table(own_path(GPU))) == 2


def test_hf_overrides_change_the_model(quire, byte_llama, measured):
    bent = json.dumps({"intermediate_size": 96})
    assert quire("tune", byte_llama, "--buckets", 1, "--hf-overrides", bent).code == 0
    assert GemmShape("norm_silu_linear", 192, 64) in {shape for shape, _ in cases(measured)}


@pytest.mark.parametrize(
    ("buckets", "said"), [("3", "--buckets must be among 1, 2, 4, 8"), ("1,x", "'1,x' is not a list of integers")]
)
def test_invalid_buckets(quire, byte_llama, measured, buckets, said):
    ran = quire("tune", byte_llama, "--buckets", buckets)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


def test_without_a_gpu_the_error_is_one_line(quire, monkeypatch):
    monkeypatch.setattr("quire.platforms.cuda.why_unusable", lambda: "torch sees no GPU")
    ran = quire("tune", "no/such-model")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "quire: error: there is no GPU to measure on: torch sees no GPU\n"


def test_without_triton_the_error_is_one_line(quire, monkeypatch):
    monkeypatch.setattr("quire.platforms.cuda.why_unusable", lambda: "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ran = quire("tune", "no/such-model")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert "triton, which is not installed" in ran.err


def test_experts_are_measured_too(quire, byte_llama, measured, monkeypatch):
    timed = []

    class ExpertsTimer:
        def __call__(self, shape, tokens, dtype, config, part=""):
            timed.append((shape, tokens, dtype))
            return 2.5 if config.kernel == "tile" else 3.0

        def weights(self, shape, dtype):
            return [None]

    monkeypatch.setattr(moe_timing, "GraphExpertsTimer", ExpertsTimer)
    monkeypatch.setattr(moe_timing, "compile_experts", lambda *_: None)
    mixture = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    command = ["tune", byte_llama, "--buckets", "1,4", "--dtype", "bfloat16", "--hf-overrides", json.dumps(mixture)]
    ran = quire(*command)
    assert ran.code == 0, ran.err
    assert set(timed) == {(ExpertsShape(8, 2, 128, 64), tokens, torch.bfloat16) for tokens in (1, 4)}
    assert {GemmShape("norm_linear", 8, 64), GemmShape("linear", 8, 64)} <= {shape for shape, _ in cases(measured)}
    assert "8 experts of 128 x 64, 2 per token" in ran.out
    assert re.search(r"^ +4 +2\.50  tile m\d+, gate_up n\d+", ran.out, re.M)
    timed.clear()
    assert re.search(r"^ +1 +2\.50  tile .* \(known\)$", quire(*command).out, re.M)
    assert timed == []


def test_algorithms_for_many_rows_are_measured_too(quire, byte_llama, measured, monkeypatch, tmp_path):
    timed = []

    class Library:
        version = 7

    def measure(lt, n, k, rows, dtype, timer):
        timed.append((n, k, rows))
        return {"cublas_us": 5.0, "us": 4.0} | ({"algorithm": "ab" * 64} if rows == 64 else {})

    monkeypatch.setattr(cublaslt, "library", Library)
    monkeypatch.setattr(cublaslt, "CublasTimer", lambda: None)
    monkeypatch.setattr(cublaslt, "measure_algorithms", measure)
    weights = [(shape.n, shape.k) for shape in SHAPES[:5]]
    command = ["tune", byte_llama, "--buckets", "1,32,64", "--dtype", "bfloat16"]
    ran = quire(*command)
    assert ran.code == 0, ran.err
    assert timed == [(*weight, rows) for weight in weights for rows in (32, 64)]
    assert re.search(
        r"^cuBLASLt algorithms, 128 x 64\n.*\n +32 +4\.00 +5\.00\n +64 +4\.00 +5\.00  taken$", ran.out, re.M
    )
    own = json.loads(cublaslt.table_paths(GPU, 7)[1].read_text())
    assert len(own) == 10 and sum("algorithm" in entry for entry in own.values()) == 5
    timed.clear()
    assert "  (known)" in quire(*command).out and timed == []
    quire(*command, "--again")
    assert len(timed) == 10
    assert cublaslt.tuned_gemms.__wrapped__() is not None, "and the next start finds them"
    assert "cuBLASLt" not in quire("tune", byte_llama, "--buckets", "1", "--dtype", "bfloat16").out
    timed.clear()
    shipped = {cublaslt.key_of(1024, *weights[0], torch.bfloat16): {"algorithm": "ab" * 64}}
    write_table(tmp_path / "shipped.json", shipped)
    monkeypatch.setattr(cublaslt, "shipped_path", lambda *_: tmp_path / "shipped.json")
    quire("tune", byte_llama, "--buckets", "128", "--dtype", "bfloat16")
    assert timed == [(*weight, 128) for weight in weights[1:]], "what is not in our table, for such a weight, has lost"


def test_weights_in_few_bits_are_measured_stored_and_not_measured_again(quire, tmp_path, measured, monkeypatch):
    timed = []

    class Timer:
        def __init__(self, ops):
            pass

        def __call__(self, weight, rows, gated, config):
            timed.append((tuple(weight.shape), rows, gated, config))
            return 5.0 if config.kernel == "vector" and config.warps == 1 and config.programs else 9.0

    monkeypatch.setattr(quantized_timing, "GraphProductTimer", Timer)
    write(tmp_path / "model", "fp8")
    command = ["tune", tmp_path / "model", "--buckets", "1,16", "--dtype", "bfloat16"]
    ran = quire(*command)
    assert ran.code == 0, ran.err
    # Of a Llama of width 64, MLP 96, 4 query and 2 KV heads of 16; its head has 16 bits.
    shapes = {((128, 64), False), ((64, 64), False), ((192, 64), True), ((64, 96), False)}
    assert {(case[0], case[2]) for case in timed} == shapes and {case[1] for case in timed} == {1, 16}
    assert "gated-fp8-token 192 x 64" in ran.out
    assert len(re.findall(r"^ +1 +5\.00 +9\.00  vector n\d+ w1 programs 2$", ran.out, re.M)) == 4
    stored = read_table(own_path(GPU))
    assert stored["fp8-token 1 128x64 bfloat16"]["kernel"] == "vector"
    timed.clear()
    assert "(known)" in quire(*command).out and not timed
    assert quire(*command, "--again").code == 0 and timed
