"""vLLM's arguments: each is accepted where it has no effect, translated, or refused by name with what to use."""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import pytest

from quire.api import vllm_environment
from quire.api.compat import engine_arguments
from quire.cli import run_batch, serve, vllm_page
from quire.cli.engine_flags import flag
from quire.cli.parser import Parser, UsageError
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.server.config import ServerConfig
from quire.vllm_arguments import BATCH, CALL, ENGINE, SERVER, ForeignArgument

NAMES = json.loads((Path(__file__).parents[1] / "data" / "vllm_arguments.json").read_text())
"""vLLM's arguments in its releases 0.6 to 0.33: (name, where, kind of flag, default, last release that has it)."""


@functools.cache
def parser_of(command: Any) -> Parser:
    parser = Parser(prog="quire serve")
    command.configure(parser)
    return parser


def parse(*arguments: str, command: Any = serve) -> argparse.Namespace:
    return parser_of(command).parse(arguments)


def configurations(*arguments: str, **variables: str) -> tuple[EngineConfig, ServerConfig]:
    return serve.configurations(parse(*arguments), vllm_environment.read(variables))


def written(name: str, kind: str, value: Any) -> list[str]:
    """A flag with a value, as a user writes it."""
    if kind == "switch":
        return [flag(name) if value else flag(f"no_{name}")]
    if kind == "list":
        return [flag(name), *map(str, value)] if value else []
    return [flag(name), value if isinstance(value, str) else json.dumps(value)]


# Every name


@pytest.mark.parametrize("name, where, kind, default, last", NAMES, ids=[name for name, *_ in NAMES])
def test_every_argument_of_vllm_is_accepted_at_its_default(name, where, kind, default, last):
    command = run_batch if where == "batch" else serve
    files = ["-i", "in", "-o", "out"] if where == "batch" else []
    if default is not None:
        parse(*files, *written(name, kind, default), command=command)
    if where == "engine" and name not in ("model", "max_num_queued_reqs", "max_num_queued_tokens", "log_level"):
        EngineConfig(**engine_arguments({name: default}))


@pytest.mark.parametrize("name, where, kind, default, last", NAMES, ids=[name for name, *_ in NAMES])
def test_every_argument_of_vllm_is_known(name, where, kind, default, last):
    """With any value it is accepted or refused by its name; never as unknown."""
    command, files = (run_batch, ["-i", "in", "-o", "out"]) if where == "batch" else (serve, [])
    try:
        parse(*files, *([flag(name)] if kind == "switch" else [flag(name), "17"]), command=command)
    except UsageError as error:
        assert flag(name) in str(error)
        assert "unknown argument" not in str(error)


NOTHING_INSTEAD = ("chat_template_content_format", "prefix_caching_hash_algo")
ROWS = [*ENGINE.values(), *SERVER.values(), *BATCH.values(), *CALL.values()]


def other_value(row: ForeignArgument) -> Any:
    """A value that a row does not accept; None if it accepts any."""
    if row.accepts is None:
        return None
    if isinstance(row.accepts, dict):
        return {"something": "else"}
    return next(value for value in (True, 4242, "something", {"a": 1}) if not row.allows(value))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_row(row):
    if isinstance(row.accepts, dict):
        for key, values in row.accepts.items():
            assert all(row.allows({key: value}) for value in (values or ("anything", 1)))
    else:
        assert all(row.allows(value) for value in (row.accepts or ("anything", 1, True, {"a": 1})))
    assert row.allows(None)
    if (other := other_value(row)) is not None:
        assert not row.allows(other)
        assert row.instead or row.name in (
            "chat_template_content_format",
            "prefix_caching_hash_algo",
        )


@pytest.mark.parametrize(
    "row", [row for row in ENGINE.values() if other_value(row) is not None], ids=lambda row: row.name
)
def test_what_would_have_an_effect_is_refused_by_name_as_keyword_and_as_flag(row):
    value = other_value(row)
    with pytest.raises(ConfigError, match=rf"{row.name}.* is not supported by quire: .+") as refused:
        engine_arguments({row.name: value})
    assert refused.value.parameter == row.name
    if row.name in ("reasoning_parser", "otlp_traces_endpoint", "structured_outputs_config"):
        return  # flags of the server, and one that is translated
    arguments = written(row.name, row.kind, [value] if row.kind == "list" else value)
    with pytest.raises(UsageError, match=rf"{flag(row.name)}: {row.name}.* is not supported by quire: .+"):
        parse(*arguments)


def test_no_argument_is_both_an_engine_setting_and_in_the_table():
    assert not set(EngineConfig.__dataclass_fields__) & set(ENGINE)


# Forms


@pytest.mark.parametrize(
    "arguments, setting, value",
    [
        (["--enforce-eager=true"], "enforce_eager", True),
        (["--enforce-eager=False"], "enforce_eager", False),
        (["--enforce_eager", "False"], "enforce_eager", False),
        (["--no-enforce-eager"], "enforce_eager", False),
        (["--enable-prefix-caching=false"], "enable_prefix_caching", False),
        (["--disable-prefix-caching"], "enable_prefix_caching", False),
        (["--enable-log-stats"], "disable_log_stats", False),
        (["--device-memory-utilization", "0.5"], "gpu_memory_utilization", 0.5),
        (["--kv-offloading-size", "2"], "swap_space", 2.0),
        (["--load-format", "hf"], "load_format", "auto"),
        (["-q", "auto_awq"], "quantization", "awq"),
        (["--rope-scaling", '{"rope_type": "yarn", "factor": 4.0}'], "hf_overrides",
         {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        (["--rope-theta", "1e6", "--hf-overrides.a", "1"], "hf_overrides", {"rope_theta": 1e6, "a": 1}),
        (["--rope-scaling", "{}"], "hf_overrides", None),
        (["--quantization", "fp8"], "quantization", "fp8"),
        (["--load-format", "runai_streamer"], "load_format", "safetensors"),
        (["--attention-backend", "FLASHINFER"], "attention_backend", "auto"),
        (["--pooler-config", '{"pooling_type": "MEAN", "normalize": true}'], "pooling", "mean"),
        (["--pooler-config.pooling_type", "LAST"], "pooling", "last"),
        (["--hf-overrides.rope_parameters.a_b", "1e6"], "hf_overrides", {"rope_parameters": {"a_b": 1e6}}),
        (["--hf-overrides.names+", "a", "--hf-overrides.names+=b,c"], "hf_overrides", {"names": ["a", "b", "c"]}),
        (["-sc.method", "ngram", "-sc.num_speculative_tokens=2"], "speculative_config",
         {"method": "ngram", "num_speculative_tokens": 2}),
        (["--structured-outputs-config.disable_any_whitespace", "true"], "disable_any_whitespace", True),
        (["--structured-outputs-config", '{"disable_any_whitespace": false}'], "disable_any_whitespace", False),
        (["--override-generation-config", '{"temperature": 0.5}'], "override_generation_config", {"temperature": 0.5}),
        (["--limit-mm-per-prompt", "image=4,video=0"], "limit_mm_per_prompt", {"image": 4, "video": 0}),
        (["--limit-mm-per-prompt", '{"image": 4}'], "limit_mm_per_prompt", {"image": 4}),
        (["--limit-mm-per-prompt.image", "4"], "limit_mm_per_prompt", {"image": 4}),
        (["--allowed-media-domains", "a.example", "b.example"], "allowed_media_hosts", ("a.example", "b.example")),
    ],
    ids=str,
)  # fmt: skip
def test_forms_of_flags(arguments, setting, value):
    found = getattr(configurations(*arguments)[0], setting)
    assert found.items() >= value.items() if isinstance(value, dict) else found == value


@pytest.mark.parametrize(
    "arguments",
    [
        ["-O0"], ["-O3"], ["-O", "2"], ["-O=1"], ["-cc", "3"], ["-cc.mode=3"], ["-cc.pass_config.fuse", "true"],
        ["--compilation-config", '{"cudagraph_mode": "FULL"}'], ["-ac.backend", "FLASH_ATTN"], ["-n", "1"], ["-r", "0"],
        ["--structured-outputs-config.backend", "xgrammar"], ["--structured-outputs-config", '{"backend": "guidance"}'],
        ["--structured_outputs_config={}"], ["--cudagraph-capture-sizes", "1", "2"], ["--numa-bind-nodes", "[0, 1]"],
        ["--async-scheduling=False"], ["--enable-lora=False"], ["--no-enable-lora"], ["--disable-lora"],
        ["--config-format", "auto"], ["--uvicorn-log-level", "warning"], ["--disable-uvicorn-access-log"],
        ["--disable-uvicorn-access-log=False"], ["--mm-processor-cache-gb", "4"], ["--task", "generate"],
        ["--video-pruning-rate", "0.5"], ["--kv-transfer-config", "{}"], ["--log-level", "INFO"],
        ["--tokenizer-mode", "None"], ["--guided-decoding-backend", "outlines"], ["--disable-log-requests"],
    ],
    ids=str,
)  # fmt: skip
def test_forms_without_effect(arguments):
    assert configurations(*arguments)[0] == EngineConfig()


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--enforce-eager=maybe"], "--enforce-eager is on or off"),
        (["--enable-prompt-adapter"], "adapters"),
        (["--enable-prompt-adapter=true"], "adapters"),
        (["--prompt-adapters", "sql=/adapters/sql"], "adapters"),
        (["--kv-transfer-config", '{"kv_connector": "NixlConnector"}'], "kv_disk"),
        (["--data-parallel-rank", "0"], "Ray"),
        (["--nnodes", "2"], "Ray"),
        (["--headless"], "Ray"),
        (["--cpu-offload-gb", "4"], "quantization"),
        (["--speculative-model", "a", "--num-speculative-tokens", "5"], "speculative_config"),
        (["--no-such-thing"], "unknown argument --no-such-thing"),
        (["--hf-overrides.a", "1", "--hf-overrides.a.b", "2"], "a has a value already"),
    ],
    ids=str,
)  # fmt: skip
def test_refusals_say_what_to_do(arguments, told):
    with pytest.raises(UsageError, match=told):
        parse(*arguments)


@pytest.mark.parametrize(
    "settings, told",
    [
        ({"pooler_config": {"pooling_type": "CLS"}}, "pooler_config.pooling_type"),
        ({"override_pooler_config": {"normalize": False}}, "override_pooler_config.normalize"),
        ({"pooler_config": 3}, "pooler_config=3"),
        ({"device_memory_utilization": 0.5, "gpu_memory_utilization": 0.6}, "gpu_memory_utilization"),
        ({"structured_outputs_config": {"enable_in_reasoning": True}}, "structured_outputs_config.enable_in_reasoning"),
        ({"structured_outputs_config": 5}, "structured_outputs_config=5"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"host": "0.0.0.0"}, "host"),
    ],
    ids=str,
)
def test_keywords_that_are_refused(settings, told):
    with pytest.raises(ConfigError, match=told):
        engine_arguments(settings)


def test_an_object_that_is_refused_on_the_command_line():
    with pytest.raises(ConfigError, match="structured_outputs_config.reasoning_parser='qwen3' is not supported"):
        configurations("--structured-outputs-config.reasoning_parser", "qwen3")


def test_a_list_in_json_ends_where_it_ends():
    args = parse(
        "--allowed-origins", '["https://a.example", "https://b.example"]', "a-model", "--allowed-methods", '["GET"]'
    )
    engine, server = serve.configurations(args, vllm_environment.read({}))
    assert engine.model == "a-model"
    assert server.allowed_origins == ("https://a.example", "https://b.example")
    assert (server.allowed_methods, server.allowed_headers) == (("GET",), ("*",))
    with pytest.raises(ConfigError, match="not a JSON list"):
        configurations("--allowed-origins", "[1]")


def test_flags_without_effect_are_remembered_for_the_log():
    assert parse("-O3", "--uvicorn-log-level", "info", "--no-enable-sleep-mode").without_effect == [
        "--optimization-level", "--uvicorn-log-level", "--enable-sleep-mode",
    ]  # fmt: skip


def test_limits_and_logs_under_vllms_names():
    server = configurations(
        "--max-num-queued-reqs", "7", "--max_num_queued_tokens", "4K", "--disable-uvicorn-access-log"
    )[1]
    assert (server.max_queued_requests, server.max_queued_tokens, server.access_log) == (7, 4096, False)
    assert configurations("--no-disable-uvicorn-access-log")[1].access_log


@pytest.mark.parametrize(
    "arguments, is_on",
    [
        (["--disable-log-requests"], False),
        (["--enable-log-requests", "--disable-log-requests"], False),
        (["--disable-log-requests=false"], True),
        (["--no-disable-log-requests"], True),
        (["--disable-log-requests", "--enable-log-requests"], True),
    ],
    ids=str,
)
def test_whether_prompts_are_logged_is_what_the_last_flag_says(arguments, is_on):
    assert configurations(*arguments)[1].enable_log_requests == is_on


def test_a_configuration_file_of_vllm(tmp_path):
    (tmp_path / "vllm.yaml").write_text(
        "model: a-model\nhost: 0.0.0.0\nport: 6379\nuvicorn-log-level: info\nenable_lora: false\n"
        "compilation-config: {pass_config: {fuse_allreduce_rms: true}}\nallowed-origins: ['*']\n"
        "structured_outputs_config:\n  backend: xgrammar\nmax-model-len: 4k\n"
    )
    args = serve.with_file(parse("--port", "9"), tmp_path / "vllm.yaml")
    engine, server = serve.configurations(args, vllm_environment.read({}))
    assert (engine.model, engine.max_model_len) == ("a-model", 4000)
    assert (server.host, server.port, server.allowed_origins) == ("0.0.0.0", 9, ("*",))
    (tmp_path / "vllm.yaml").write_text("enable-prompt-adapter: true\n")
    with pytest.raises(UsageError, match="--enable-prompt-adapter.*adapters"):
        serve.with_file(parse(), tmp_path / "vllm.yaml")


# The page


def test_the_page_for_those_who_move_is_up_to_date():
    assert (Path(__file__).parents[2] / "docs/from-vllm.md").read_text() == vllm_page.page(), "run `make docs`"


def test_the_page_has_every_argument_and_variable():
    page = vllm_page.page()
    for name, *_ in NAMES:
        if name in ENGINE or name in BATCH or (name in SERVER and name not in ServerConfig.__dataclass_fields__):
            assert f"`--{name.replace('_', '-')}`" in page or f"`{name}`" in page, name
    for name in (*vllm_environment.VARIABLES, *CALL):
        assert f"`{name}`" in page
