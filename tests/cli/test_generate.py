"""`quire generate` prints what the Python API returns."""

from __future__ import annotations

import json

import pytest

from quire import LLM, SamplingParams
from tests.adapters.beside import Beside

FLAGS = ["--temperature", "0", "--max-tokens", "6"]


@pytest.fixture(scope="module")
def texts(byte_llama):
    """Greedy completions of two prompts, from the API."""
    with LLM(str(byte_llama), kv_cache_memory_bytes=1 << 20) as llm:
        outputs = llm.generate(["Hello", "Good day"], SamplingParams(temperature=0, max_tokens=6))
        return [output.outputs[0].text for output in outputs]


def test_one_prompt_streams_its_text(quire, byte_llama, texts):
    ran = quire("generate", "Hello", "--model", byte_llama, *FLAGS)
    assert (ran.code, ran.out) == (0, texts[0] + "\n")


def test_a_dash_reads_standard_input(quire, byte_llama, texts):
    assert quire("generate", "-", "--model", byte_llama, *FLAGS, stdin="Good day").out == texts[1] + "\n"


def test_an_adapter_by_its_folder(quire, byte_llama, texts, tmp_path):
    beside = Beside(byte_llama, tmp_path)
    folder = beside.write("mine", target_modules="all-linear")
    ran = quire("generate", "Hello", "--model", byte_llama, *FLAGS, "--lora", folder, "--json", "--dtype", "float32")
    (line,) = map(json.loads, ran.out.splitlines())
    found = line["outputs"][0]["token_ids"]
    assert found == beside.tokens(line["prompt_token_ids"], 6, {"mine": 1.0})[: len(found)]
    assert line["outputs"][0]["text"] != texts[0]
    assert quire("generate", "Hello", "--model", byte_llama, "--lora", tmp_path / "none").code != 0


def test_json_is_one_object_per_prompt(quire, byte_llama, texts):
    ran = quire("generate", "Hello", "Good day", "--model", byte_llama, *FLAGS, "--json", "--logprobs", 2)
    first, second = map(json.loads, ran.out.splitlines())
    assert [first["outputs"][0]["text"], second["outputs"][0]["text"]] == texts
    assert first["prompt"] == "Hello"
    assert len(first["prompt_token_ids"]) == 5
    sample = first["outputs"][0]
    assert sample["finish_reason"] == "length"
    assert len(sample["token_ids"]) == len(sample["logprobs"]) == 6
    assert sample["logprobs"][0][0]["token_id"] == sample["token_ids"][0]
    assert sample["logprobs"][0][0]["rank"] == 1


def test_several_sequences_are_numbered_and_repeatable(quire, byte_llama):
    arguments = ["generate", "Hello", "--model", byte_llama, "--n", 3, "--max-tokens", 5, "--json"]
    first, again, other = (
        [sample["token_ids"] for sample in json.loads(quire(*arguments, "--seed", seed).out)["outputs"]]
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert len({tuple(tokens) for tokens in first}) == 3
    assert quire(*arguments[:-1]).out.count("── Hello (sequence ") == 3


def test_chat_uses_the_template(quire, byte_llama):
    ran = quire("generate", "Hi", "--chat", "--system", "Be kind", "--model", byte_llama, *FLAGS, "--json")
    # "<|role|>" is 8 bytes more than the role's letters, less "<|end|>", which is one token.
    expected = len("<|system|>Be kind") + 1 + len("<|user|>Hi") + 1 + len("<|assistant|>")
    assert len(json.loads(ran.out)["prompt_token_ids"]) == expected


def test_a_prompt_that_is_too_long_is_refused(quire, byte_llama):
    ran = quire("generate", "x" * 500, "--model", byte_llama)
    assert ran.code == 2
    assert "the prompt has 500 tokens" in ran.err


def test_debug_logs_one_line_per_step(quire, byte_llama):
    ran = quire("generate", "Hello", "--model", byte_llama, *FLAGS, "--log-level", "debug")
    assert sum(" debug   step " in line for line in ran.err.splitlines()) == 6
    assert " info    " in ran.err
