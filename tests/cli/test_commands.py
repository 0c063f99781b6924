"""Commands: pull, inspect, env, bench."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from quire.cli.inspect import estimate_memory
from quire.config import EngineConfig
from quire.loading.hub import resolve
from quire.loading.model_config import read_model_config

SMALL = ["--input-len", 8, "--output-len", 4]


def test_pull_prints_the_path_and_nothing_else_on_stdout(quire, byte_llama):
    ran = quire("pull", byte_llama)
    assert (ran.code, ran.out) == (0, f"{byte_llama}\n")
    assert "safetensors" in ran.err


def test_pull_finds_the_default_model_offline(quire, monkeypatch):
    path = resolve(EngineConfig.model).path  # downloads it the first time
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert quire("pull").out == f"{path}\n"


def test_pull_offline_lists_what_was_tried(quire, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ran = quire("pull", "someone/something", "--download-dir", tmp_path)
    assert ran.code == 2
    assert "downloads are disabled" in ran.err


def test_inspect_prints_dimensions_and_memory_plan(quire, byte_llama):
    ran = quire("inspect", byte_llama, "--num-gpu-blocks-override", 32)
    assert ran.code == 0, ran.err
    for fact in (
        "LlamaForCausalLM",
        "2 of width 64",
        "4 query, 2 KV, 16 each",
        "128 tokens",
        "257 tokens, with a chat",
    ):
        assert fact in ran.out
    # Keys and values of 2 layers, 2 heads of 16 in float32, and the token's id.
    assert f"{2 * 2 * 2 * 16 * 4 + 4} bytes per token" in ran.out
    assert "capacity      512 tokens in 32 blocks of 16" in ran.out
    assert "4.0 sequences of the full 128 tokens" in ran.out


def test_inspect_prints_experts_and_active_parameters(quire):
    folder = Path(__file__).parents[2] / "benchmarks" / "gpu" / "models" / "qwen3-30b-a3b"
    ran = quire("inspect", folder, "--load-format", "dummy", "--num-gpu-blocks-override", 8)
    assert ran.code == 0, ran.err
    assert "128 of width 768, 8 per token" in ran.out
    assert "30532.1 million, 3353.0 million of them per token" in ran.out


def test_inspect_plans_the_memory_that_the_engine_uses(byte_llama, monkeypatch):
    from quire import LLM

    monkeypatch.setenv("QUIRE_CPU_KVCACHE_SPACE", "0.001")
    config = EngineConfig(model=str(byte_llama))
    files = resolve(config.model)
    plan = estimate_memory(config, files, read_model_config(files))
    with LLM(config.model) as llm:
        info = llm.llm_engine.info
    assert (plan.memory.num_blocks - 1, plan.memory.cache) == (info.num_blocks, info.kv_bytes)
    assert (plan.memory.weights, plan.dtype, plan.device) == (info.weight_bytes, info.dtype, info.device)
    assert (plan.max_model_len, plan.max_num_seqs) == (info.max_model_len, info.max_num_seqs)


def test_inspect_of_an_unknown_architecture_is_an_error(quire, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["WalrusForCausalLM"]}))
    ran = quire("inspect", tmp_path)
    assert ran.code == 2
    assert "WalrusForCausalLM" in ran.out
    assert "'WalrusForCausalLM' is not implemented; supported: " in ran.err


def test_env_names_versions_and_no_secrets(quire, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    ran = quire("env")
    assert ran.code == 0
    assert all(word in ran.out for word in ("quire", "torch", "transformers", "cache", "native CPU kernels"))
    assert "hf_secret" not in ran.out


def test_bench_waste_is_under_four_percent(quire, tmp_path):
    ran = quire("bench", "waste", "--num-prompts", 600, "--output-json", tmp_path / "waste.json")
    assert ran.code == 0, ran.err
    assert "KV waste" in ran.out
    figures = json.loads((tmp_path / "waste.json").read_text())
    assert 0 < figures["kv_waste"] < 0.04
    assert figures["kv_waste_if_reserved"] > 0.5


@pytest.mark.parametrize(
    ("bench", "flag"),
    [
        ("waste", "--output-json"),
        ("latency", "--output-json"),
        ("throughput", "--output-json"),
        ("serve", "--save-result"),
        ("serve", "--plot"),
    ],
)
@pytest.mark.parametrize(("name", "said"), [("none/out", "no folder"), ("file/out", "no folder"), ("", "is a folder")])
def test_a_bench_with_an_unwritable_output_file_is_refused_at_once(quire, tmp_path, bench, flag, name, said):
    (tmp_path / "file").write_text("")
    model = [] if bench == "waste" else ["--model", tmp_path / "no-model"]
    ran = quire("bench", bench, *model, flag, tmp_path / name)
    assert ran.code == 2 and not ran.out
    assert flag in ran.err and said in ran.err and "no-model" not in ran.err


def test_bench_waste_grows_with_the_block(quire, tmp_path):
    def waste(block_size: int) -> float:
        options = ["--num-prompts", 100, "--block-size", block_size, "--output-json", tmp_path / "waste.json"]
        assert quire("bench", "waste", *options).code == 0
        return json.loads((tmp_path / "waste.json").read_text())["kv_waste"]

    assert waste(1) == 0
    assert waste(16) < waste(64)


def test_bench_throughput_with_random_weights(quire, byte_llama, tmp_path):
    file = tmp_path / "result.json"
    ran = quire(
        "bench", "throughput", "--model", byte_llama, "--load-format", "dummy", *SMALL, "--num-prompts", 3,
        "--output-json", file,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert re.search(r"\d output tokens/s", ran.out)
    figures = json.loads(file.read_text())
    assert figures["num_requests"] == 3
    assert figures["total_num_tokens"] == 3 * (8 + 4)
    assert figures["tokens_per_second"] == pytest.approx(36 / figures["elapsed_time"])


def test_bench_throughput_of_several_engines(quire, byte_llama):
    bench = ("bench", "throughput", "--model", byte_llama, "--load-format", "dummy", *SMALL, "--num-prompts", 3,
             "--data-parallel-size", 2)  # fmt: skip
    ran = quire(*bench)
    assert ran.code == 0, ran.err
    assert re.search(r"\d output tokens/s", ran.out) and "KV waste" not in ran.out
    assert "--profile works with one engine" in quire(*bench, "--profile").err


def test_bench_latency_reports_as_vllm_does(quire, byte_llama, tmp_path):
    file = tmp_path / "result.json"
    ran = quire(
        "bench", "latency", "--model", byte_llama, *SMALL, "--batch-size", 2, "--num-iters", 3, "--num-iters-warmup", 1,
        "--output-json", file,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    figures = json.loads(file.read_text())
    assert len(figures["latencies"]) == 3
    assert figures["percentiles"]["50"] == sorted(figures["latencies"])[1]


def test_bench_latency_compares_drafts_with_none(quire, byte_llama, tmp_path):
    file = tmp_path / "latency.json"
    ran = quire(
        "bench", "latency", "--model", byte_llama, *SMALL, "--batch-size", 1, "--num-iters", 1, "--num-iters-warmup", 1,
        "--spec-method", "ngram", "--synthetic-acceptance", "1,0.5", "--output-json", file,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "against none" in ran.out
    assert json.loads(file.read_text())["speedup_against_none"] > 0


def test_bench_refuses_lengths_beyond_the_model(quire, byte_llama):
    ran = quire("bench", "latency", "--model", byte_llama, "--input-len", 100, "--output-len", 100)
    assert ran.code == 2
    assert "exceed max_model_len, 128" in ran.err
