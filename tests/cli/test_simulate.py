"""`quire simulate` and `quire calibrate`."""

from __future__ import annotations

import json

import pytest

from quire.simulation.costs import read_profile


def test_a_run(quire, tmp_path):
    files = ["--output-json", tmp_path / "out.json", "--timeline", tmp_path / "steps.json"]
    load = ["--num-prompts", 40, "--request-rate", 20, "--output-len", 16]
    ran = quire("simulate", *load, "--dollars-per-hour", 3.6, *files)
    assert ran.code == 0, ran.err
    assert "40 completed, 0 failed" in ran.out and "not fitted to measured steps" in ran.out
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["total_output_tokens"] == 40 * 16
    assert found["dollars"] == pytest.approx(0.001 * found["duration"])
    steps = [event for event in json.loads((tmp_path / "steps.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(steps) == found["steps"]
    assert sum(step["dur"] for step in steps) == pytest.approx(1e6 * found["utilization"] * found["duration"], rel=1e-3)


def test_the_smallest_fleet_that_keeps_a_goal(quire, tmp_path):
    load = ["--num-prompts", 300, "--request-rate", 150, "--goal", "ttft_p99:300"]
    ran = quire("simulate", *load, "--output-json", tmp_path / "out.json")
    assert ran.code == 0, ran.err
    found = json.loads((tmp_path / "out.json").read_text())
    smallest = found["replicas"]
    assert smallest > 1 and f"smallest fleet: {smallest}" in ran.out
    assert found["tried"][str(smallest)]["kept"] and not found["tried"][str(smallest - 1)]["kept"]


def test_a_sweep_marks_the_best(quire, tmp_path):
    load = ["--num-prompts", 100, "--output-json", tmp_path / "out.json"]
    ran = quire("simulate", *load, "--sweep", "max_num_seqs=4,64", "--sweep", "scheduling_policy=fcfs,fair")
    assert ran.code == 0, ran.err
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["runs"]) == 4 and found["best"]["max_num_seqs"] == 64
    assert ran.out.count("← best") == 1


def test_a_trace_with_shared_blocks(quire, tmp_path):
    lines = [
        {"timestamp": 100 * i, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, i + 3]} for i in range(6)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    ran = quire("simulate", "--trace", trace, "--output-json", tmp_path / "out.json")
    assert ran.code == 0, ran.err
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["total_input_tokens"] == 6600 and found["total_cached_tokens"] == 5 * 1024


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--profile", "tpu"], "known are"),
        (["--trace", "/nowhere"], "there is no file"),
        (["--kill", "now"], "2@100"),
        (["--kill", "5@1"], "not among the 1"),
        (["--goal", "ttft:5"], "ttft_p99:500"),
        (["--goal", "ttft_p99:0.001"], "do not keep these limits"),
        (["--sweep", "speed=1"], "max_num_seqs"),
        (["--sweep", "max_num_seqs=a"], "int"),
        (["--sweep", "replicas=0"], "above 0"),
        (["--sweep", "replicas=1", "--best", "luck"], "ttft_p99"),
        (["--input-len", "900000"], "holds"),
        (["--num-prompts", "1000000000000"], "at most 10000000"),
        (["--replicas", "100000000"], "from 1 to 10000"),
        (["--replicas", "2", "--expert-parallel-size", "2"], "not that of a mixture"),
        (["--scheduling-policy", "nonsense"], "nonsense"),
        (["--request-rate", "0"], "above 0"),
        (["--range-ratio", "2"], "from 0 to 1"),
        (["--max-step-stretch", "0.5"], "at least 1"),
        (["--goal", "ttft_p99:5", "--sweep", "replicas=1,2"], "one at a time"),
    ],
)
def test_bad_input_is_one_line(quire, arguments, said):
    ran = quire("simulate", "--num-prompts", 1, *arguments)
    assert (ran.code, ran.err.count("\n")) == (2, 1), ran.err
    assert said in ran.err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"timestamp": 0, "input_length": 3}', "output_length"),
        ('{"timestamp": "now", "input_length": 3, "output_length": 1}', "timestamp"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}', "at least 1"),
        ('{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": 7}', "hash_ids"),
        ('{"timestamp": 0, "output_length": 1, "prompt": 7}', "a prompt is a text"),
        ('{"timestamp": 0, "output_length": 1, "messages": ["hi"]}', "a list of objects"),
        ("nonsense", "not JSON"),
        ("[]", "not a JSON object"),
        ("", "is empty"),
    ],
)
def test_a_bad_trace_names_its_line(quire, tmp_path, line, said):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(line)
    ran = quire("simulate", "--trace", trace)
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert said in ran.err


def test_a_measured_cost_model_can_be_simulated(quire, byte_llama, tmp_path):
    path = tmp_path / "mine.json"
    settings = ["--model", byte_llama, "--device", "cpu", "--max-num-seqs", 4, "--name", "mine", "--tokens", 200]
    ran = quire("calibrate", *settings, "-o", path)
    assert ran.code == 0, ran.err
    model = read_profile(str(path))
    assert (model.name, model.max_num_seqs, model.block_size) == ("mine", 4, 16)
    assert all(seconds > 0 for _, seconds in model.tokens) and model.error is not None
    ran = quire("simulate", "--profile", path, "--num-prompts", 5, "--input-len", 40, "--output-len", 8)
    assert ran.code == 0 and "fitted within" in ran.out
