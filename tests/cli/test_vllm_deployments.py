"""Deployments written for vLLM, command line and environment as published: the same door is locked, or a refusal names
what is in the way."""

from __future__ import annotations

import logging
import shlex
from typing import Any

import pytest

from quire.api import vllm_environment
from quire.api.compat import engine_arguments
from quire.api.vllm_environment import VARIABLES
from quire.cli import serve
from quire.cli.main import main
from quire.cli.parser import Parser
from quire.config import EngineConfig
from quire.errors import ConfigError, QuireError
from quire.server.config import ServerConfig


def deployed(
    monkeypatch: pytest.MonkeyPatch, command: str, variables: dict[str, str]
) -> tuple[EngineConfig, ServerConfig]:
    """What `quire serve` runs with; as in the process, the environment is read too."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    parser = Parser(prog="quire serve")
    serve.configure(parser)
    return serve.configurations(parser.parse(shlex.split(command)), vllm_environment.read(variables))


# The forms that vLLM's and other projects' documentation shows, shortened: (name, arguments, environment, expected).
STARTS: list[tuple[str, str, dict[str, str], dict[str, Any]]] = [
    (
        "a classifier made of a language model",
        "m --runner pooling --convert classify --enable-prompt-tokens-details",
        {},
        {"hf_overrides": {"is_classifier": True}, "enable_prompt_tokens_details": True},
    ),
    (
        "docker run vllm/vllm-openai",
        "--model mistralai/Mistral-7B-v0.1",
        {"HF_TOKEN": "secret"},
        {"model": "mistralai/Mistral-7B-v0.1", "api_key": ()},
    ),
    (
        "docker run with a key in the environment",
        "--model Qwen/Qwen3-0.6B --host 0.0.0.0 --port 8000",
        {"VLLM_API_KEY": "sk-a,b", "VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_NO_USAGE_STATS": "1"},
        {"model": "Qwen/Qwen3-0.6B", "api_key": ("sk-a,b",), "host": "0.0.0.0"},
    ),
    (
        "docker compose with a tool parser",
        "--model Qwen/Qwen2.5-7B-Instruct --gpu-memory-utilization 0.9 --max-model-len 16384 --enable-auto-tool-choice "
        "--tool-call-parser hermes --served-model-name qwen gpt-4o --disable-log-requests --trust-remote-code",
        {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "NVIDIA_VISIBLE_DEVICES": "all"},
        {"served_model_name": ("qwen", "gpt-4o"), "tool_call_parser": "hermes", "max_model_len": 16384},
    ),
    (
        "Kubernetes with shared memory",
        "mistralai/Mistral-7B-Instruct-v0.3 --trust-remote-code --enable-chunked-prefill --max_num_batched_tokens 1024 "
        "--dtype bfloat16 --max-num-seqs 64",
        {"VLLM_PORT": "tcp://10.0.0.7:8000", "VLLM_SERVICE_HOST": "10.0.0.7", "VLLM_PORT_8000_TCP": "tcp://10.0.0.7:1"},
        {"max_num_batched_tokens": 1024, "max_num_seqs": 64, "port": 8000},
    ),
    (
        "Helm chart of the production stack",
        "facebook/opt-125m --host 0.0.0.0 --port 8000 --no-enable-prefix-caching --no-enable-chunked-prefill "
        "--max-model-len 1024 --dtype bfloat16 --tensor-parallel-size 1 --disable-log-requests",
        {"VLLM_API_KEY": "from-a-secret", "LMCACHE_LOG_LEVEL": "DEBUG", "HF_HOME": "/data"},
        {"enable_prefix_caching": False, "enable_chunked_prefill": False, "api_key": ("from-a-secret",)},
    ),
    (
        "KServe with the older boolean form",
        "--model /mnt/models --port 8080 --max-model-len 4096 --served-model-name llm --enable-prefix-caching=True "
        "--enable-chunked-prefill False --enforce-eager=false",
        {"VLLM_USE_V1": "1"},
        {"model": "/mnt/models", "enable_prefix_caching": True, "enable_chunked_prefill": False, "port": 8080},
    ),
    (
        "systemd behind a proxy",
        "serve-me --root-path /llm --uds /run/vllm.sock --uvicorn-log-level warning --disable-uvicorn-access-log "
        "--disable-fastapi-docs --api-key one two --allowed-origins '[\"https://chat.example\"]' "
        "--allowed-methods '[\"GET\", \"POST\"]' --allow-credentials",
        {"VLLM_CONFIGURE_LOGGING": "0"},
        {"api_key": ("one", "two"), "allowed_origins": ("https://chat.example",), "allow_credentials": True,
         "root_path": "/llm", "disable_fastapi_docs": True, "allowed_methods": ("GET", "POST")},
    ),
    (
        "a reasoning model",
        "Qwen/Qwen3-8B --reasoning-parser qwen3 --enable-auto-tool-choice --tool-call-parser hermes "
        "--default-chat-template-kwargs '{\"enable_thinking\": false}' --generation-config vllm "
        "--override-generation-config '{\"temperature\": 0.6, \"top_p\": 0.95}' --structured-outputs-config.backend "
        "xgrammar -tp 2 --distributed-executor-backend mp --async-scheduling --compilation-config "
        "'{\"cudagraph_mode\": \"FULL_AND_PIECEWISE\"}' -O3",
        {},
        {"reasoning_parser": "qwen3", "tensor_parallel_size": 2, "generation_config": "vllm",
         "override_generation_config": {"temperature": 0.6, "top_p": 0.95}},
    ),
    (
        "TLS",
        "m --ssl-certfile cert.pem --ssl-keyfile key.pem --ssl-ca-certs ca.pem --ssl-cert-reqs 2 --enable-ssl-refresh",
        {"VLLM_API_KEY": ""},
        {"client_certificates": 2, "enable_ssl_refresh": True, "api_key": ()},
    ),
    (
        "TLS where clients need no certificate",
        "m --ssl-certfile cert.pem --ssl-ca-certs ca.pem --ssl-cert-reqs 0",
        {},
        {"client_certificates": 0},
    ),
    (
        "on a CPU",
        "meta-llama/Llama-3.2-1B-Instruct --dtype bfloat16 --max-num-batched-tokens 4096 --block-size 128",
        {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": "0-15", "VLLM_TARGET_DEVICE": "cpu"},
        {"cpu_kv_cache_bytes": 4 << 30, "block_size": 128},
    ),
    (
        "speculative decoding and attention by name",
        "m --speculative-config '{\"method\": \"ngram\", \"num_speculative_tokens\": 5, \"prompt_lookup_max\": 4}' "
        "--attention-backend FLASH_ATTN --kv-cache-dtype fp8 --kv-offloading-size 8 --load-format fastsafetensors",
        {"VLLM_ATTENTION_BACKEND": "FLASHINFER", "VLLM_USE_FLASHINFER_SAMPLER": "1"},
        {"attention_backend": "auto", "swap_space": 8.0, "load_format": "safetensors"},
    ),
    (
        "limits in the environment",
        "m --max-num-queued-reqs 32",
        {"VLLM_SKIP_MODEL_NAME_VALIDATION": "1", "VLLM_HTTP_MAX_REQUEST_BODY_SIZE": "1048576",
         "VLLM_MAX_N_SEQUENCES": "4", "VLLM_MAX_COMPLETION_PROMPTS": "8",
         "VLLM_BATCH_INVARIANT": "1", "VLLM_REGEX_COMPILATION_TIMEOUT_S": "2"},
        {"max_queued_requests": 32, "max_body_bytes": 1 << 20, "max_samples": 4, "max_prompts": 8,
         "batch_invariant": True, "grammar_timeout": 2, "accept_any_model_name": True},
    ),
    ("images from disk", "m --allowed-local-media-path /", {}, {"allowed_local_media_path": "/"}),
    (
        "adapters", "m --enable-lora --lora-modules sql=/adapters/sql --max-lora-rank 64 --max-loras 4", {},
        {"enable_lora": True, "max_loras": 4, "max_lora_rank": 64, "lora_modules": ("sql=/adapters/sql",)},
    ),
]  # fmt: skip


@pytest.mark.parametrize("command, variables, expected", [row[1:] for row in STARTS], ids=[row[0] for row in STARTS])
def test_a_deployment_starts_with_the_same_door_locked(monkeypatch, command, variables, expected):
    engine, server = deployed(monkeypatch, command, variables)
    for name, value in expected.items():
        assert getattr(server, name, None) == value if hasattr(server, name) else getattr(engine, name) == value


REFUSED = [
    ("prompt adapters", "m --enable-prompt-adapter", {}, "--enable-prompt-adapter"),
    ("adapters at run time", "m", {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
    ("disaggregated prefill", 'm --kv-transfer-config \'{"kv_connector": "NixlConnector"}\'', {}, "kv-transfer-config"),
    ("another hub", "m", {"VLLM_USE_MODELSCOPE": "true"}, "VLLM_USE_MODELSCOPE"),
    ("open admin routes", "m", {"VLLM_SERVER_DEV_MODE": "1"}, "VLLM_SERVER_DEV_MODE.*--admin-key"),
    ("several nodes", "m --nnodes 2 --node-rank 0 --master-addr 10.0.0.1", {}, "--nnodes"),
    ("sleep mode", "m --enable-sleep-mode", {}, "--enable-sleep-mode"),
    ("images from a folder that is not there", "m --allowed-local-media-path /no/such", {}, "allowed_local_media_path"),
    ("reward model", "m --task reward", {}, "task='reward'"),
    ("certificates that cannot be checked", "m --ssl-certfile c --ssl-cert-reqs 2", {}, "ssl_ca_certs"),
]


@pytest.mark.parametrize("command, variables, told", [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_a_deployment_that_cannot_be_served_is_refused_by_name(monkeypatch, command, variables, told):
    with pytest.raises(QuireError, match=told):
        deployed(monkeypatch, command, variables)


# The environment


def test_the_key_of_vllm_locks_the_door_unless_another_is_given(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert ServerConfig().api_key == ("theirs",)
    assert ServerConfig(api_key=("given",)).api_key == ("given",)
    monkeypatch.setenv("QUIRE_API_KEY", "ours")
    assert ServerConfig().api_key == ("ours",)


@pytest.mark.parametrize("name", [name for name, row in VARIABLES.items() if row.instead])
def test_each_variable_that_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name}=.* is not supported by quire: .+"):
        vllm_environment.read({name: "7"})
    for off in ("", "0"):
        assert vllm_environment.read({name: off}).ignored == ()


@pytest.mark.parametrize("name", [name for name, row in VARIABLES.items() if row.setting and not row.reader])
def test_each_variable_that_is_read(name):
    (setting,) = vllm_environment.read({name: "1"}).settings
    fields = {**EngineConfig.__dataclass_fields__, **ServerConfig.__dataclass_fields__}
    assert setting == VARIABLES[name].setting
    assert setting in fields
    assert vllm_environment.read({name: ""}).settings == {}


@pytest.mark.parametrize(
    "name, text", [("VLLM_BATCH_INVARIANT", "maybe"), ("VLLM_MAX_N_SEQUENCES", "0"), ("VLLM_DP_SIZE", "x")]
)
def test_a_value_that_cannot_be_read_is_refused(name, text):
    with pytest.raises(ConfigError, match=name):
        vllm_environment.read({name: text})


def test_ignored_variables_are_named_in_one_line(caplog):
    variables = {"VLLM_TRACE_FUNCTION": "1", "VLLM_CACHE_ROOT": "/x", "VLLM_API_KEY": "k", "PATH": "/bin"}
    environment = vllm_environment.read(variables)
    assert environment.ignored == ("VLLM_CACHE_ROOT", "VLLM_TRACE_FUNCTION")
    logger = logging.getLogger("test.ignored")
    with caplog.at_level(logging.INFO, logger.name):
        environment.report(logger)
        environment.report(logger)
    (line,) = caplog.messages
    assert "VLLM_CACHE_ROOT, VLLM_TRACE_FUNCTION" in line
    assert "VLLM_API_KEY" not in line


def test_keywords_of_llm_override_the_environment(monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert engine_arguments({})["batch_invariant"] is True
    assert engine_arguments({"batch_invariant": False})["batch_invariant"] is False
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    with pytest.raises(ConfigError, match="VLLM_USE_MODELSCOPE"):
        engine_arguments({})


@pytest.mark.parametrize("text, told", [("-1", "VLLM_CPU_KVCACHE_SPACE"), ("many", "VLLM_CPU_KVCACHE_SPACE")])
def test_a_wrong_size_of_the_cache_is_refused_under_its_own_name(monkeypatch, text, told):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", text)
    with pytest.raises(ConfigError, match=told):
        _ = EngineConfig().cpu_kv_cache_bytes
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0")
    assert EngineConfig().cpu_kv_cache_bytes is None
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    monkeypatch.setenv("QUIRE_CPU_KVCACHE_SPACE", "1")
    assert EngineConfig().cpu_kv_cache_bytes == 1 << 30


@pytest.mark.parametrize("given, level", [("DEBUG", "debug"), ("CRITICAL", "error"), ("", None), (None, None)])
def test_the_log_level_of_vllm(monkeypatch, given, level):
    if given is not None:
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", given)
    assert serve._level_of_vllm() == level
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "loud")
    with pytest.raises(ConfigError, match="VLLM_LOGGING_LEVEL must be one of"):
        serve._level_of_vllm()


def test_a_refusal_is_one_line_before_anything_is_loaded(monkeypatch, capsys):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    assert main(["serve", "no/such-model", "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "VLLM_SERVER_DEV_MODE=1 is not supported by quire" in said
