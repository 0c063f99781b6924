"""Flags: every field of EngineConfig has one, and its value arrives in the config."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import msgspec
import pytest

from quire.cli.engine_flags import add_engine_flags, engine_settings, flag
from quire.cli.parser import Parser, UsageError, with_dashes
from quire.cli.reference import reference
from quire.cli.sampling_flags import add_sampling_flags, sampling_params
from quire.cli.values import readable_bytes, size
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.messages.sampling import HELP, SCALARS, SamplingParams

VALUES = {
    "hf_overrides": {"rope_theta": 5.0},
    "override_generation_config": {"temperature": 0.5},
    "logits_processors": ("a.b.C", "d.E"),
    "max_model_len": 4096,
    "pipeline_depth": 4,
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "pipeline_parallel_size": 3,
    "pipeline_layers": "7,9",
    "ray_env": ("A_VARIABLE", "ANOTHER"),
    "gpu_memory_utilization": 0.5,
    "cpu_kv_cache_share": 0.125,
    "weight_copy_share": 0.5,
    "max_step_stretch": 1.5,
    "tenant_weights": {"gold": 2.5, "*": 1},
    "tenant_max_rows": {"gold": 0.5, "*": 3},
    "tenant_max_blocks": {"*": 0.25},
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    "power_budget": 45.5,
    "limit_mm_per_prompt": {"image": 2, "video": 0},
    "mm_processor_kwargs": {"max_pixels": 1003520},
    "allowed_media_hosts": ("images.example.com", "*.example.org"),
    "allowed_local_media_path": "/",
}
NEEDS = {
    **{key: {"scheduling_policy": "fair"} for key in ("tenant_weights", "tenant_max_rows", "tenant_max_blocks")},
    "num_redundant_experts": {"enable_expert_parallel": True},
    "expert_rebalance_interval": {"enable_expert_parallel": True},
    **{key: {"distributed_executor_backend": "ray"} for key in ("ray_address", "ray_placement_timeout", "ray_env")},
    "pipeline_layers": {"pipeline_parallel_size": 2},
    "kv_store": {"kv_disk": "folder"},
    "kv_tier_dtype": {"swap_space": 1.0},
    "allow_gpu_power_control": {"energy_policy": "saver"},
}
"""Other fields that a field needs."""
ROOT = Path(__file__).parents[2]


def parse(*arguments: str) -> argparse.Namespace:
    parser = Parser(prog="quire test")
    add_engine_flags(parser)
    return parser.parse(arguments)


def another(field: dataclasses.Field) -> object:
    """A valid value for a field, other than its default if there is another."""
    if field.name in VALUES:
        return VALUES[field.name]
    if choices := field.metadata.get("choices"):
        return choices[-1]
    if isinstance(field.default, bool):
        return not field.default
    if isinstance(field.default, float):
        return 7.5
    return 77 if isinstance(field.default, int) or "int" in str(field.type) else "something"


@pytest.mark.parametrize("field", dataclasses.fields(EngineConfig), ids=lambda field: field.name)
def test_every_engine_field_round_trips_through_its_flag(field):
    value = another(field)
    if isinstance(value, bool):
        arguments = [flag(field.name) if value else flag(f"no_{field.name}")]
    elif isinstance(value, tuple):
        arguments = [part for each in value for part in (flag(field.name), each)]
    else:
        arguments = [flag(field.name), json.dumps(value) if isinstance(value, dict) else str(value)]
    settings = engine_settings(parse(*arguments))
    assert list(settings) == [field.name]
    assert getattr(EngineConfig(**settings, **NEEDS.get(field.name, {})), field.name) == value


def test_pipeline_depth_has_a_maximum():
    with pytest.raises(ConfigError, match="pipeline_depth .*at most 4"):
        EngineConfig(**engine_settings(parse("--pipeline-depth", "5")))


def test_flags_not_given_leave_the_defaults_to_the_config():
    assert engine_settings(parse()) == {}


def test_underscores_and_dashes_are_equal_in_names_but_not_in_values():
    assert with_dashes(["--a_b=c_d", "e_f", "--", "--g_h"]) == ["--a-b=c_d", "e_f", "--", "--g_h"]
    assert parse("--max_num_seqs", "3").max_num_seqs == 3


@pytest.mark.parametrize(
    ("text", "value"), [("12", 12), ("4k", 4000), ("4K", 4096), ("2G", 2 << 30), ("1.5K", 1536), ("-1", -1)]
)
def test_sizes(text, value):
    assert size(text) == value


@pytest.mark.parametrize("text", ["", "k", "1kb", "0.3", "1e3", "four"])
def test_not_sizes(text):
    with pytest.raises(argparse.ArgumentTypeError):
        size(text)


def test_a_size_may_be_auto_where_the_config_says_so():
    assert parse("--max-model-len", "auto").max_model_len == "auto"
    with pytest.raises(UsageError, match="not a size"):
        parse("--kv-cache-memory-bytes", "auto")


def test_short_flags_are_vllms():
    assert engine_settings(parse("-tp", "2", "-pp", "3", "-dp", "4", "-ep", "-q", "fp8", "-sc", "{}")) == {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 3,
        "data_parallel_size": 4,
        "enable_expert_parallel": True,
        "quantization": "fp8",
        "speculative_config": {},
    }


def test_keys_of_an_object_may_be_flags_of_their_own():
    dotted = parse("--speculative_config.num_speculative_tokens", "3", "--speculative-config.method=ngram", "--seed=1")
    assert engine_settings(dotted) == {
        "speculative_config": {"num_speculative_tokens": 3, "method": "ngram"},
        "seed": 1,
    }
    with pytest.raises(UsageError, match="both as an object and by its keys"):
        parse("--hf-overrides", "{}", "--hf-overrides.a", "1")
    with pytest.raises(UsageError, match="needs a value"):
        parse("--hf-overrides.a")
    with pytest.raises(UsageError, match="unknown argument --no-such"):
        parse("--no-such.a", "1")


def test_vllms_short_names_of_speculation():
    expected = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    assert engine_settings(parse("--spec-method", "ngram", "--spec-tokens", "4")) == expected


def test_vllm_flags_without_effect_are_accepted():
    taken = ["--async-scheduling", "--no-enable-sleep-mode", "--tokenizer-mode", "auto"]
    assert engine_settings(parse(*taken, "--compilation-config", "3", "--mm-processor-cache-gb", "4")) == {}


@pytest.mark.parametrize(
    "flags",
    [["--enable-prompt-adapter"], ["--kv-transfer-config", '{"kv_role": "both"}'], ["--enable-sleep-mode"]],
    ids=str,
)
def test_vllm_flags_that_are_not_supported_are_refused_by_name(flags):
    with pytest.raises(UsageError, match=f"{flags[0]}.* is not supported"):
        parse(*flags)


def test_only_visible_flags_are_suggested():
    with pytest.raises(UsageError, match="unknown argument -tq "):
        parse("-tq", "2")
    with pytest.raises(UsageError, match="--performance-mod "):
        parse("--performance-mod")


def test_bytes_are_readable():
    assert [readable_bytes(n) for n in (5, 2048, 3 << 30)] == ["5 bytes", "2.0 KiB", "3.0 GiB"]


def test_sampling_flags_override_the_defaults():
    parser = Parser(prog="quire test")
    add_sampling_flags(parser)
    args = parser.parse(
        ["--temperature", "0.5", "--stop", "a", "--stop", "b", "--logit-bias", '{"3": -1}', "--ignore-eos"]
    )
    params = sampling_params(args, SamplingParams(top_k=5, temperature=1.5), max_tokens=9)
    assert params == SamplingParams(
        temperature=0.5, top_k=5, max_tokens=9, stop=["a", "b"], logit_bias={3: -1}, ignore_eos=True
    )
    assert sampling_params(parser.parse(["--max-tokens", "-1"]), SamplingParams()).max_tokens is None


def test_every_sampling_parameter_is_explained():
    assert list(HELP) == [field.name for field in msgspec.structs.fields(SamplingParams)]
    assert all(isinstance(text, str) and text for text in HELP.values())


def test_every_scalar_has_a_flag():
    parser = Parser(prog="quire test")
    add_sampling_flags(parser)
    flags = [part for scalar in SCALARS for part in ("--" + scalar.name.replace("_", "-"), str(scalar.default))]
    assert sampling_params(parser.parse(flags), SamplingParams()) == SamplingParams()


def test_the_configuration_page_is_up_to_date():
    assert (ROOT / "docs/configuration.md").read_text() == reference() + "\n", "run `make docs`"
