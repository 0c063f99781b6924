"""Bad input raises a typed error that names the value and the limit, and leaves nothing behind."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import (
    CacheTooSmallError,
    CheckpointError,
    ConfigError,
    ModelNotFoundError,
    QuireError,
    UnsupportedModelError,
    ValidationError,
)
from quire.loading.hub import DEFAULT_MODEL, resolve
from tests.conftest import TINY_VOCAB, assert_idle

GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.mark.parametrize(
    "prompt, names",
    [
        ("", "empty"),
        ([[]], "empty"),
        ({"prompt": ""}, "empty"),
        ("a\ud800", r"'\\ud800', half a surrogate pair"),
        ({"prompt_token_ids": []}, "empty"),
        ([5] * 256, "256 tokens.*max_model_len 256"),
        ([5] * 1000, "1000 tokens.*256"),
        ("a" * 500, "500 tokens.*256"),
        ([5, TINY_VOCAB], f"{TINY_VOCAB} is outside the vocabulary of {TINY_VOCAB}"),
        ([5, 10**12], "1000000000000"),
        ([5, -1], "-1 is outside"),
        ([5, 1.5], "1.5"),
        ([5, "a"], "'a'"),
        ([True], "True"),
        ([5, None], "None"),
        ({"prompt_token_ids": None}, "NoneType"),
        ({"prompt_token_ids": 5}, "int"),
        ({"prompt": 5}, "int"),
        ({"prompt": None}, "NoneType"),
        ({}, "NoneType"),
        ({"text": "a"}, "text"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "multi_modal_data"),
        ([["a"]], "'a'"),
        ([5.5], "float"),
        ([None], "NoneType"),
        (None, "NoneType"),
        (7, "int"),
        (b"abc", "bytes"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_bad_prompts(llm: LLM, prompt: Any, names: str) -> None:
    with pytest.raises(ValidationError, match=names) as caught:
        llm.generate(prompt, GREEDY, use_tqdm=False)
    assert isinstance(caught.value, ValueError)
    assert_idle(llm)
    with pytest.raises(ValidationError, match=names):
        llm.stream(prompt, GREEDY)  # refused at once, not when it is read


def test_half_a_surrogate_pair_in_a_message(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="messages holds .*surrogate"):
        llm.chat([{"role": "user", "content": "a\udcff"}], GREEDY, use_tqdm=False)


@pytest.mark.parametrize("bad", ["", [5, TINY_VOCAB], None, {"prompt_token_ids": [5] * 300}], ids=str)
def test_one_bad_prompt_refuses_the_batch_and_frees_the_rest(llm: LLM, bad: Any) -> None:
    with pytest.raises(ValidationError):
        llm.generate(["abc", "the world", bad, "x"], GREEDY, use_tqdm=False)
    assert_idle(llm)
    assert len(llm.generate("abc", GREEDY, use_tqdm=False)) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}, {"temperature": "hot"},
        {"temperature": None}, {"temperature": 100.5}, {"top_p": 0}, {"top_p": 1.1}, {"top_p": -1}, {"top_p": math.nan},
        {"top_k": -2}, {"top_k": 1.5}, {"min_p": -0.1}, {"min_p": 1.1}, {"n": 0}, {"n": -1}, {"n": 1.0}, {"n": True},
        {"n": 20_000}, {"n": 2, "temperature": 0}, {"max_tokens": 0}, {"max_tokens": -5}, {"max_tokens": "many"},
        {"min_tokens": -1}, {"min_tokens": 5, "max_tokens": 4}, {"presence_penalty": 2.1}, {"frequency_penalty": -2.1},
        {"repetition_penalty": 0}, {"repetition_penalty": math.inf}, {"seed": "x"}, {"seed": 2**64}, {"stop": ""},
        {"stop": ["a", ""]}, {"stop": [5]}, {"stop": ["x"], "detokenize": False}, {"stop_token_ids": [-1]},
        {"stop_token_ids": ["a"]}, {"allowed_token_ids": []}, {"logit_bias": {-1: 1.0}}, {"logit_bias": {1: math.nan}},
        {"logprobs": -2}, {"prompt_logprobs": -2}, {"truncate_prompt_tokens": 0}, {"output_kind": "delta"},
    ],
    ids=str,
)  # fmt: skip
def test_bad_params(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams(**fields)
    message = str(caught.value)
    assert any(name in message for name in fields), message


@pytest.mark.parametrize(
    "fields, names",
    [
        ({"logprobs": 21}, "21.*at most 20"),
        ({"prompt_logprobs": 500}, "500.*at most 20"),
        ({"logprobs": -1}, "-1.*at most 20"),
        ({"stop_token_ids": [TINY_VOCAB]}, f"{TINY_VOCAB}.*vocabulary of {TINY_VOCAB}"),
        ({"allowed_token_ids": [3, 999]}, "999"),
        ({"logit_bias": {500: 1.0}}, "500"),
    ],
    ids=str,
)
def test_params_that_do_not_suit_the_model(llm: LLM, fields: dict[str, Any], names: str) -> None:
    with pytest.raises(ValidationError, match=names):
        llm.generate(["abc", "x"], [GREEDY, SamplingParams(**fields)], use_tqdm=False)


@pytest.mark.parametrize("given", [[], [GREEDY], [GREEDY] * 3], ids=len)
def test_as_many_params_as_prompts(llm: LLM, given: list[SamplingParams]) -> None:
    with pytest.raises(ValidationError, match=f"2 prompts, but {len(given)}"):
        llm.generate(["a", "b"], given, use_tqdm=False)


@pytest.mark.parametrize("given", [{"temperature": 0}, "greedy", 0, [{"temperature": 0}]], ids=str)
def test_params_of_another_kind(llm: LLM, given: Any) -> None:
    with pytest.raises(ValidationError, match="sampling_params"):
        llm.generate(["a"], given, use_tqdm=False)


@pytest.mark.parametrize("given", [5, b"me", [1, "b"]], ids=str)
def test_invalid_tenants(llm: LLM, given: Any) -> None:
    with pytest.raises(ValidationError, match="a tenant is a string"):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False, tenant=given)


def test_as_many_priorities_as_prompts(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="2 prompts, but 3 priorities"):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[1, 2, 3])


@pytest.mark.parametrize("priority", ["high", 1.5, None, 2**80], ids=str)
def test_invalid_priorities(make_llm: Any, priority: Any) -> None:
    llm = make_llm(scheduling_policy="priority")
    with pytest.raises(ValidationError, match="priority is an integer"):
        llm.generate(["a", "b"], GREEDY, priority=[1, priority], use_tqdm=False)
    assert_idle(llm)


def test_a_request_bigger_than_the_cache(make_llm: Any) -> None:
    llm = make_llm(num_gpu_blocks_override=4, max_model_len=256)
    with pytest.raises(CacheTooSmallError, match=r"124 tokens.*8 blocks of 16.*has 4"):
        llm.generate([[5] * 24], SamplingParams(max_tokens=100), use_tqdm=False)
    with pytest.raises(CacheTooSmallError, match="100"):
        llm.generate([[5] * 100], SamplingParams(max_tokens=None), use_tqdm=False)
    assert_idle(llm)


@pytest.mark.parametrize(
    "settings, names",
    [
        ({"gpu_memory_utilisation": 0.9}, "gpu_memory_utilisation.*gpu_memory_utilization"),
        ({"max_model_length": 10}, "max_model_length.*max_model_len"),
        ({"frobnicate": 7}, "frobnicate.*7"),
        ({"tensor_parallel_size": 3}, "heads cannot be split over 3"),
        ({"enable_prompt_adapter": True}, "enable_prompt_adapter=True is not supported"),
        ({"speculative_config": {"method": "medusa"}}, "method 'medusa' is not supported: use an EAGLE-3 head"),
        ({"quantization": "awq"}, "quantization is 'awq', but .* is not quantized"),
        ({"runner": "draft"}, "runner='draft'"),
        ({"dtype": "int8"}, "dtype.*int8"),
        ({"block_size": 0}, "block_size.*0"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"gpu_memory_utilization": 1.5}, "1.5"),
        ({"max_model_len": 1}, "max_model_len.*1"),
        ({"max_model_len": "long"}, "'long'"),
        ({"max_model_len": 1000}, "1000.*256"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "32.*64"),
        ({"scheduling_policy": "lottery"}, "lottery"),
        ({"attention_backend": "no.such.Thing"}, "no.such.Thing"),
        ({"pipeline_depth": -1}, "pipeline_depth"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_settings(tiny_model: Path, settings: dict[str, Any], names: str) -> None:
    with pytest.raises(ValidationError, match=names) as caught:
        LLM(tiny_model, device="cpu", **settings)
    assert isinstance(caught.value, ConfigError) or "known" in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"swap_space": 4}, {"disable_custom_all_reduce": True}, {"enable_lora": False}, {"tokenizer_mode": "auto"},
        {"task": "generate"}, {"pooler_config": None, "kv_transfer_config": None, "max_loras": None},
        {"logprobs_mode": "raw_logprobs", "model_impl": "auto", "generation_config": "vllm"},
    ],
    ids=str,
)  # fmt: skip
def test_harmless_settings_of_vllms_are_accepted(make_llm: Any, settings: dict[str, Any]) -> None:
    make_llm(**settings)


def test_none_is_the_default_of_a_setting(make_llm: Any) -> None:
    config = make_llm(
        block_size=None, enable_prefix_caching=None, dtype=None, session_idle_seconds=None
    ).llm_engine.config
    assert (config.block_size, config.enable_prefix_caching, config.dtype) == (16, True, "auto")
    assert config.session_idle_seconds is None  # None is one of its values


def test_an_unknown_setting_is_a_type_error(tiny_model: Path) -> None:
    with pytest.raises(TypeError, match="frobnicate"):
        LLM(tiny_model, frobnicate=7)


def test_arguments_of_vllms_calls(llm: LLM) -> None:
    """Accepted if they change nothing, refused by name otherwise."""
    taken = {"lora_request": None, "tokenization_kwargs": None, "mm_processor_kwargs": {}}
    assert llm.generate("abc", GREEDY, use_tqdm=False, **taken)[0].finished
    assert llm.embed("abc", use_tqdm=False, **taken)[0].finished
    messages = [{"role": "user", "content": "abc"}]
    assert llm.chat(messages, GREEDY, use_tqdm=False, chat_template_content_format="auto", **taken)[0].finished
    for call in (llm.generate, llm.embed, llm.encode):
        with pytest.raises(ValidationError, match="lora_request"):
            call("abc", lora_request="an adapter", use_tqdm=False)
        with pytest.raises(TypeError, match="colour"):
            call("abc", colour="red", use_tqdm=False)
    assert_idle(llm)


def test_no_memory_for_one_block(tiny_model: Path) -> None:
    with pytest.raises(CacheTooSmallError, match="1 bytes.*16 tokens"):
        LLM(tiny_model, device="cpu", kv_cache_memory_bytes=1)


class TestDamagedModels:
    """Each a copy of the tiny model's folder, or a GGUF file, with one thing wrong."""

    @pytest.fixture
    def folder(self, tiny_model: Path, tmp_path: Path) -> Path:
        return shutil.copytree(tiny_model, tmp_path / "model")

    def refused(self, model: Path | str, kind: type[QuireError], names: str) -> None:
        with pytest.raises(kind, match=names) as caught:
            LLM(str(model), device="cpu", num_gpu_blocks_override=4)
        assert isinstance(caught.value, ValueError)

    def test_a_missing_folder(self, tmp_path: Path) -> None:
        self.refused(tmp_path / "nothing", ModelNotFoundError, "nothing")

    def test_an_empty_folder(self, tmp_path: Path) -> None:
        self.refused(tmp_path, ModelNotFoundError, "neither config.json nor")

    def test_an_unknown_model_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        self.refused("no-such-org/no-such-model", ModelNotFoundError, "no-such-org/no-such-model")

    def test_no_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        self.refused(folder, ModelNotFoundError, "no weights")

    @pytest.mark.parametrize("keep", [0, 5, 100, 0.5, 0.99])
    def test_truncated_weights(self, folder: Path, keep: float) -> None:
        weights = folder / "model.safetensors"
        data = weights.read_bytes()
        weights.write_bytes(data[: int(keep * len(data)) if keep < 1 else int(keep)])
        self.refused(folder, CheckpointError, "model.safetensors")

    def test_a_missing_tensor(self, folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, folder / "model.safetensors")
        self.refused(folder, CheckpointError, r"model.layers.1.mlp.up_proj.weight")

    def _change(self, folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))

    def test_a_wrong_shape(self, folder: Path) -> None:
        self._change(folder, lambda config: config.update(intermediate_size=128))
        self.refused(folder, CheckpointError, r"\(96, 64\).*\(128, 64\)")

    def test_an_unknown_architecture(self, folder: Path) -> None:
        self._change(folder, lambda config: config.update(architectures=["AbacusForCausalLM"]))
        self.refused(folder, UnsupportedModelError, "AbacusForCausalLM.*LlamaForCausalLM")

    def test_a_broken_config(self, folder: Path) -> None:
        (folder / "config.json").write_text("{")
        self.refused(folder, CheckpointError, "config.json")

    def test_a_broken_tokenizer(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")
        self.refused(folder, CheckpointError, "tokenizer")

    def test_no_tokenizer(self, folder: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).unlink()
        self.refused(folder, ModelNotFoundError, "no tokenizer")

    @pytest.mark.parametrize("size", [0, 3, 20, 1000, 50_000, 3_000_000])
    def test_a_truncated_gguf_file(self, tmp_path: Path, size: int) -> None:
        path = tmp_path / "model.gguf"
        with resolve(DEFAULT_MODEL, progress=False).path.open("rb") as whole:
            path.write_bytes(whole.read(size))
        self.refused(path, CheckpointError, "model.gguf")

    @pytest.mark.parametrize(
        "at, value", [(0, b"XXXX"), (4, b"\xff\xff\xff\x7f"), (8, b"\xff" * 8), (16, b"\xff" * 8)], ids=str
    )
    def test_a_corrupt_gguf_header(self, tmp_path: Path, at: int, value: bytes) -> None:
        path = tmp_path / "model.gguf"
        with resolve(DEFAULT_MODEL, progress=False).path.open("rb") as whole:
            data = bytearray(whole.read(3_000_000))
        data[at : at + len(value)] = value
        path.write_bytes(data)
        with pytest.raises((CheckpointError, UnsupportedModelError), match="model.gguf"):
            LLM(str(path), device="cpu")

    def test_a_file_that_is_not_a_model(self, tmp_path: Path) -> None:
        path = tmp_path / "notes.txt"
        path.write_text("hello")
        self.refused(path, ModelNotFoundError, "not a GGUF file")
