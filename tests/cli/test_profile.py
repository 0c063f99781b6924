"""`--profile`: the trace can be read back, and the numbers of its tables add up."""

from __future__ import annotations

import gzip
import json

import pytest

from quire.cli.bench.limits import KINDS, DeviceSpeed, StepShape, Work, kind_of
from quire.cli.bench.profile_table import metrics, report
from quire.cli.bench.trace import MARK, Trace, short

SHAPE = StepShape(
    layers=2, hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=16, vocabulary=256, itemsize=2,
    body_bytes=2 * 2 * (64 * 128 + 64 * 64 + 3 * 64 * 128),
)  # fmt: skip
WORK = Work(tokens=8, rows=8, draws=8, context=800, pairs=800)


def span(name: str, begin: float, end: float, kind: str = "kernel", thread: int = 7) -> dict:
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": end - begin, "tid": thread}


def step(begin: float, end: float) -> dict:
    return span(MARK + "step", begin, end, "user_annotation")


# Reading a trace


def test_gaps_and_busy_time_sum_up_to_the_wall():
    trace = Trace.of([
        step(100, 200), step(200, 300), {"ph": "M", "name": "process_name"},
        span("before", 10, 50), span("_dot", 110, 150), span("_dot", 160, 190), span("_decode", 205, 295),
        span("Memcpy DtoH (Device -> Pinned)", 297, 310, "gpu_memcpy"),
    ])  # fmt: skip
    assert (trace.steps, trace.wall) == (2, 200)
    assert trace.busy == 40 + 30 + 90 + 3
    assert (trace.longest_gap, trace.after_gap) == (15, "_decode")
    assert {name: (entry.calls, entry.microseconds) for name, entry in trace.kernels.items()} == {
        "_dot": (2, 70),
        "_decode": (1, 90),
        "Memcpy DtoH": (1, 3),
    }


def test_a_kernel_that_starts_early_counts_only_its_own_time():
    trace = Trace.of([step(0, 100), span("a", 0, 40), span("b", 10, 60), span("c", 55, 80)])
    assert {name: entry.microseconds for name, entry in trace.kernels.items()} == {"a": 40, "b": 20, "c": 20}
    assert trace.busy == 80


def test_one_kernel_within_another_counts_once():
    trace = Trace.of([step(0, 100), span("long", 0, 90), span("short", 20, 30)])
    assert trace.busy == 90
    assert trace.longest_gap == 0


def test_operators_count_without_those_they_call():
    operators = [("to", 0, 50), ("_to_copy", 5, 45), ("empty", 10, 15), ("copy_", 15, 40), ("add", 60, 80)]
    trace = Trace.of([step(0, 100), *(span(name, begin, end, "cpu_op") for name, begin, end in operators)])
    owns = {name: entry.microseconds for name, entry in trace.operators.items()}
    assert owns == {"to": 10, "_to_copy": 10, "empty": 5, "copy_": 25, "add": 20}
    assert trace.operators_time == 70


def test_a_trace_without_steps_is_refused():
    with pytest.raises(ValueError, match="too short"):
        Trace.of([span("_dot", 0, 1)])


@pytest.mark.parametrize(
    ("kernel", "name", "kind"),
    [
        ("void at::native::elementwise_kernel<128, 2, foo(int)>(int)", "at::native::elementwise_kernel", "other"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "GEMMs"),
        ("_tile", "_tile", "GEMMs"),
        ("_decode", "_decode", "attention"),
        ("_add_rms_norm", "_add_rms_norm", "norms"),
        ("_prepare_qkv", "_prepare_qkv", "QKV"),
        ("_draw_kernel", "_draw_kernel", "sampling"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD", "copies"),
    ],
)
def test_kernels_have_short_names_and_kinds(kernel, name, kind):
    assert short(kernel) == name
    assert kind_of(short(kernel)).name == kind


# Limits


def test_gemms_read_every_weight_once_with_two_operations_per_token():
    kind = next(kind for kind in KINDS if kind.name == "GEMMs")
    moved, operations = kind.cost(SHAPE, WORK)
    weights = SHAPE.body_bytes + 2 * 256 * 64
    assert weights < moved < 2 * weights
    assert operations == 2 * 8 * weights / 2


def test_attention_reads_keys_and_values_of_the_context():
    kind = next(kind for kind in KINDS if kind.name == "attention")
    moved, operations = kind.cost(SHAPE, WORK)
    assert moved == 800 * 2 * 2 * 2 * 16 * 2 + 8 * 2 * 2 * 4 * 16 * 2
    assert operations == 4 * 2 * 4 * 16 * 800


def test_the_slower_of_memory_and_arithmetic_is_the_limit():
    speed = DeviceSpeed(100.0, 1000.0)
    assert speed.seconds((200, 0)) == 2
    assert speed.seconds((200, 5000)) == 5


def test_the_report_names_kinds_kernels_and_limits():
    trace = Trace.of([
        step(0, 100), span(MARK + "launch", 0, 30, "user_annotation"),
        span("_dot", 10, 50), span("_decode", 50, 80), span("void odd<1>(int)", 80, 90),
    ])  # fmt: skip
    text = report(trace, WORK, SHAPE, DeviceSpeed(2e9, 1e15), before=95e-6)
    assert "1 steps of 8 requests, 8 tokens, 800 in context" in text
    assert "0.100 ms per step; 0.095 ms before the profiler started" in text
    assert "GPU busy      0.080 ms, 80.0%" in text
    assert "the longest 10 us, before _dot" in text
    assert "launch 0.030" in text and "rest 0.070" in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.startswith("  ") and line.split()}
    assert rows["_decode"] == ["_decode", "attention", "1.0", "30.0", "30.0", "37.5%"]
    moved, _ = next(kind for kind in KINDS if kind.name == "attention").cost(SHAPE, WORK)
    assert rows["attention"] == ["attention", "1.0", "30.0", "37.5%", f"{moved / 2e3:.1f}", f"{moved / 2e3 / 0.3:.0f}%"]
    assert rows["other"] == ["other", "1.0", "10.0", "12.5%"]
    assert metrics(trace, WORK, "x")["kernels"]["_dot"] == {"calls": 1, "seconds": pytest.approx(40e-6)}


def test_without_known_limits_their_columns_are_empty():
    trace = Trace.of([step(0, 100), span("_dot", 10, 50)])
    text = report(trace, WORK, SHAPE, None, None)
    assert "%" in text and "limits as measured" not in text


# The commands


@pytest.mark.parametrize("command", ["throughput", "latency"])
def test_a_benchmark_writes_a_trace_and_prints_where_the_time_goes(quire, byte_llama, tmp_path, command):
    requests = {"throughput": ["--num-prompts", 3], "latency": ["--batch-size", 3, "--num-iters", 1]}[command]
    ran = quire(
        "bench", command, "--model", byte_llama, "--load-format", "dummy", "--input-len", 8, "--output-len", 12,
        *requests, "--profile", tmp_path / "traces", "--profile-steps", 4, "--output-json", tmp_path / "out.json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    (path,) = (tmp_path / "traces").iterdir()
    assert str(path) in ran.out
    with gzip.open(path, "rt") as file:
        assert json.load(file)["traceEvents"]
    assert "4 steps of 3 requests, 3 tokens" in ran.out
    assert "aten::" in ran.out and "(native kernels, Python)" in ran.out
    told = json.loads((tmp_path / "out.json").read_text())["profile"]
    assert told["steps"] == 4
    assert told["host"]["launch"] > 0
    assert sum(told["host"].values()) < told["wall"]
    assert "USDT" not in ran.err


def test_a_profiled_engine_is_as_it_was_afterwards(llm):
    from quire import SamplingParams
    from quire.cli.bench.profile import marked

    engine = llm.llm_engine
    parts = (engine, engine.core.scheduler, engine.core._executor, engine._outputs)
    before = [set(vars(part)) for part in parts]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    steps = []
    with marked(llm, lambda: steps.append(1)) as notes:
        llm.generate([[5, 6, 7, 8]], params, use_tqdm=False)
    assert [set(vars(part)) for part in parts] == before
    assert len(steps) == len(notes.begins) == 6
    assert notes.works[0] == Work(tokens=4, rows=1, draws=1, context=4, pairs=10)
    assert notes.works[2] == Work(tokens=1, rows=1, draws=1, context=6, pairs=6)


@pytest.mark.parametrize("bench", ["latency", "throughput"])
@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_folder_that_cannot_be_created_is_an_error_before_loading(quire, tmp_path, bench, folder):
    (tmp_path / "file").write_text("")
    ran = quire("bench", bench, "--model", tmp_path / "no-model", "--profile", tmp_path / folder)
    assert ran.code == 2
    assert f"--profile {tmp_path / folder}: " in ran.err and ran.err.count("\n") == 1
