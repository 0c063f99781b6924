"""Every setting of the server; the flags of `quire serve` and its YAML keys are generated from here."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.config import option
from quire.errors import ConfigError, ValidationError
from quire.messages.lora import LoRARequest

LARGEST_PORT = 65535
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True)
class ServerConfig:
    """The server's settings: validated when made, then immutable."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 or :: is every interface", "listening")
    port: int = option(8000, "Port to listen on; 0: any free port", "listening")
    uds: str | None = option(None, "Listen on this Unix socket instead of a port", "listening")
    api_server_count: int = option(
        1, "Front processes that share the port; each reads requests and writes streams; 0: one for every four cores",
        "listening",
    )  # fmt: skip
    root_path: str = option(
        "", "Path prefix under which a proxy exposes the server; paths are served with it and without", "listening"
    )
    ssl_certfile: str | None = option(None, "TLS certificate (PEM); enables https", "listening")
    ssl_keyfile: str | None = option(None, "The certificate's private key, if in a separate file", "listening")
    ssl_ca_certs: str | None = option(
        None, "CA certificates (PEM) for client certificates; if set, every client must present one", "listening"
    )
    ssl_cert_reqs: int | None = option(
        None,
        "Whether clients present a certificate: 0 no, 1 may, 2 must; unset: 2 with ssl_ca_certs, else 0",
        "listening",
    )
    ssl_ciphers: str | None = option(None, "Ciphers of TLS 1.2 and below, as OpenSSL lists them", "listening")
    enable_ssl_refresh: bool = option(False, "Read certificate and key again when their files change", "listening")
    allowed_origins: tuple[str, ...] = option(
        (),
        "Origins that browsers may call the server from (CORS), also as a JSON list; * is all; unset: none",
        "listening",
        many=True,
    )
    allowed_methods: tuple[str, ...] = option(("*",), "Methods that these browsers may use", "listening", many=True)
    allowed_headers: tuple[str, ...] = option(("*",), "Headers that these browsers may send", "listening", many=True)
    allow_credentials: bool = option(False, "Whether these browsers may send cookies", "listening")
    middleware: tuple[str, ...] = option(
        (),
        "Dotted paths of ASGI middleware around the server, the last outermost: a class, or an async function "
        "(request, call_next)",
        "listening",
        many=True,
    )
    disable_fastapi_docs: bool = option(False, "Do not serve /openapi.json", "listening")
    page: bool = option(True, "Serve the page at /: a chat, and what the engine does", "listening")

    api_key: tuple[str, ...] = option(
        (),
        "A key for every route but /health and /ping; unset: QUIRE_API_KEY (several: comma-separated), else "
        "VLLM_API_KEY (one)",
        "access",
        many=True,
    )
    admin_key: str | None = option(None, "The key of the /admin routes, which exist only if it is set", "access")

    served_model_name: tuple[str, ...] = option(
        (), "The model's name in the API; several are aliases, responses use the first", "answers", many=True
    )
    lora_modules: tuple[str, ...] = option(
        (),
        "With enable_lora: adapters that are served from the start, each name=folder or "
        '{"name": "…", "path": "…", "base_model_name": "…"}',
        "adapters",
        many=True,
    )
    allowed_lora_path: tuple[str, ...] = option(
        (),
        "Folders whose adapters may be loaded while the server runs, by /v1/load_lora_adapter with the admin key; "
        "unset: none",
        "adapters",
        many=True,
    )

    accept_any_model_name: bool = option(
        False, "Answer requests for any model with the one that is served, instead of with 404", "answers"
    )
    enable_auto_tool_choice: bool = option(True, "Parse answers for tool calls if the request has tools", "answers")
    tool_call_parser: str | None = option(
        None, "Parser of tool calls, by name or dotted path; unset: chosen by the chat template", "answers"
    )
    enable_tool_preamble: bool = option(
        True, "Describe tools in the system message if the chat template does not", "answers"
    )
    reasoning_parser: str | None = option(
        None,
        "Parser that separates reasoning from the answer, by name or dotted path; unset: none, but for gpt-oss its own",
        "answers",
    )
    exclude_tools_when_tool_choice_none: bool = option(
        False, "Leave tools out of the prompt if tool_choice is none", "answers"
    )
    strict_fields: bool = option(
        False, "Refuse unknown fields of requests with a 400, instead of naming them in X-Quire-Ignored", "answers"
    )
    trust_request_chat_template: bool = option(False, "Accept chat templates in requests", "answers")
    trust_request_mm_kwargs: bool = option(
        False, "Accept settings of the image processor (mm_processor_kwargs) in requests", "answers"
    )
    default_chat_template_kwargs: Mapping[str, Any] | None = option(
        None, "Default variables of the chat template, which requests can override (JSON)", "answers"
    )
    enable_prompt_tokens_details: bool = option(
        False, "Report in usage how many tokens of a prompt were cached, and stand for images", "answers"
    )
    enable_force_include_usage: bool = option(
        False, "Include usage in every chunk and at the end of every stream", "answers"
    )
    enable_request_id_headers: bool = option(False, "Send X-Request-Id in responses", "answers")
    enable_tokenizer_info_endpoint: bool = option(
        True, "Serve /tokenizer_info: the tokenizer's settings and chat template", "answers"
    )
    enable_per_request_metrics: bool = option(
        False, "Include times, cached tokens and preemptions in every response, as return_metrics does", "answers"
    )

    max_queued_requests: int = option(
        1024, "Most sequences that may wait per engine, besides those running; more requests get 429", "limits"
    )
    max_queued_tokens: int | None = option(
        None, "Most prompt tokens that may wait per engine; unset: eight times its KV cache", "limits"
    )
    max_body_bytes: int | None = option(
        None,
        "Longest request body in bytes; reading one of N MiB can hold up other requests for about 4 N ms. unset: "
        "8 MiB, and if the model takes images, room for two of max_image_bytes besides",
        "limits",
    )
    max_body_values: int | None = option(
        None,
        "Most values (numbers, texts, lists, objects) in one JSON body, an eighth of them lists and objects; "
        "unset: 262144, or twice the model's length if that is more",
        "limits",
    )
    max_open_body_bytes: int | None = option(
        None,
        "Most bytes of all request bodies held at once; more requests get 429; unset: 256 MiB, or eight times the "
        "longest if that is more",
        "limits",
    )
    max_header_bytes: int = option(64 * 2**10, "Longest request line and headers together, in bytes", "limits")
    max_prompt_logprobs: int = option(
        131072, "Most logprobs of prompt tokens in one response, alternatives included", "limits"
    )
    max_samples: int = option(128, "Most sequences (n) of one prompt", "limits")
    max_prompts: int = option(1024, "Most prompts in one completions request, each counted n times", "limits")
    max_stored_responses: int = option(
        1000,
        "Most responses, and as many conversations, that one tenant has stored; the least recently used are dropped. "
        "0: nothing is stored",
        "limits",
    )
    max_stored_bytes: int = option(
        64 * 2**20,
        "Most bytes of one tenant's stored responses and conversations, besides the tokens of their sessions; all "
        "tenants together have 16 times as many",
        "limits",
    )
    stored_response_ttl: float = option(
        30 * 86400.0, "Seconds without use after which a stored response or conversation is deleted", "limits"
    )
    max_background_responses: int = option(
        16, "Most background responses of one tenant at once; more requests get 429", "limits"
    )
    request_timeout: float | None = option(
        None, "Seconds a request may take, queued and running; a request's own timeout can only shorten it", "limits"
    )
    stall_timeout: float = option(
        60.0,
        "Seconds without progress in sending the body or reading the response before a client is disconnected",
        "limits",
    )
    engine_stall_seconds: float = option(
        20.0, "Seconds without a completed step, while there is work, after which /health fails", "limits"
    )
    engine_hang_timeout: float = option(
        360.0, "Seconds without a completed step, while there is work, after which the engine is restarted; 0: never",
        "limits",
    )  # fmt: skip
    reload_timeout: float = option(
        30.0,
        "Seconds that running requests have to finish at an engine that is replaced on SIGHUP or by /admin/reload; "
        "then they go on at another, or at the new one",
        "limits",
    )
    shutdown_timeout: float = option(
        30.0, "Seconds that running requests have to finish after SIGTERM or Ctrl-C; a second signal stops at once",
        "limits",
    )  # fmt: skip

    log_format: str = option("text", "Format of log lines", "observability", choices=LOG_FORMATS)
    access_log: bool = option(True, "Log a line for each HTTP request", "observability")
    enable_log_requests: bool = option(
        False, "Also log prompts and sampling parameters; otherwise prompts are never logged", "observability"
    )
    max_log_len: int = option(
        2048, "With enable_log_requests: most characters (or token ids) of a prompt in the log", "observability"
    )
    vllm_metric_names: bool = option(
        True, "Also show metrics under vLLM's names (vllm:), for dashboards and alerts made for it", "observability"
    )
    otlp_traces_endpoint: str | None = option(
        None, "Send a span for each request to this OTLP/HTTP endpoint; needs the extra `traces`", "observability"
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            choices = field.metadata.get("choices")
            if choices and getattr(self, field.name) not in choices:
                value = getattr(self, field.name)
                raise ConfigError(f"{field.name} must be one of {', '.join(choices)}; got {value!r}", field.name, value)
            if field.metadata.get("many"):
                value = getattr(self, field.name)
                object.__setattr__(self, field.name, (value,) if isinstance(value, str) else tuple(value))
        for name in ("allowed_origins", "allowed_methods", "allowed_headers"):
            object.__setattr__(self, name, tuple(_flat(name, getattr(self, name))))
        if not self.api_key and (keys := os.environ.get("QUIRE_API_KEY")):
            object.__setattr__(self, "api_key", tuple(key.strip() for key in keys.split(",")))
        elif not self.api_key and (key := os.environ.get("VLLM_API_KEY")):  # one key, which may contain commas
            object.__setattr__(self, "api_key", (key,))
        self._check_numbers()
        self._check_access()
        self._check_adapters()

    def _check_numbers(self) -> None:
        for name, least in (
            ("max_queued_requests", 0), ("max_queued_tokens", 0), ("max_body_bytes", 1), ("max_open_body_bytes", 1),
            ("max_body_values", 64), ("max_prompt_logprobs", 1), ("max_header_bytes", 256),
            ("max_samples", 1), ("max_prompts", 1), ("port", 0), ("max_stored_responses", 0), ("max_stored_bytes", 1),
            ("max_background_responses", 0), ("max_log_len", 0), ("api_server_count", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}", name, value)
        if self.port > LARGEST_PORT:
            raise ConfigError(f"port is at most {LARGEST_PORT}, got {self.port}", "port", self.port)
        for name in (
            "request_timeout", "stall_timeout", "shutdown_timeout", "reload_timeout", "engine_stall_seconds",
            "engine_hang_timeout", "stored_response_ttl",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                raise ConfigError(f"{name} must be a number of seconds, got {value!r}", name, value)
        for name in ("request_timeout", "stall_timeout", "stored_response_ttl"):
            if getattr(self, name) == 0:
                raise ConfigError(f"{name} must be above 0", name, 0)

    def _check_access(self) -> None:
        for name in ("api_key", "served_model_name", "allowed_origins"):
            if "" in getattr(self, name):
                raise ConfigError(f"{name} holds an empty string", name, "")
        if self.admin_key == "":
            raise ConfigError("admin_key is empty", "admin_key", "")
        if self.admin_key in self.api_key:
            raise ConfigError(
                "admin_key is also an api_key, which would give every user admin rights: choose another", "admin_key"
            )
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"root_path must begin with /, got {self.root_path!r}", "root_path", self.root_path)
        object.__setattr__(self, "root_path", self.root_path.rstrip("/"))
        self._check_tls()

    def _check_adapters(self) -> None:
        requests = self.adapters
        names = [request.name for request in requests] + list(self.served_model_name)
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"{name!r} is the name of two adapters or models", "lora_modules", name)
        if self.allowed_lora_path and not self.admin_key:
            raise ConfigError("allowed_lora_path needs an admin_key, which loads adapters", "allowed_lora_path")
        for folder in self.allowed_lora_path:
            if not os.path.isdir(folder):
                raise ConfigError(f"allowed_lora_path: there is no folder {folder!r}", "allowed_lora_path", folder)

    @property
    def adapters(self) -> list[LoRARequest]:
        """The adapters of `lora_modules`."""
        return [_read_module(given, number) for number, given in enumerate(self.lora_modules, 1)]

    def _check_tls(self) -> None:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_ciphers", "ssl_cert_reqs", "enable_ssl_refresh"):
            if getattr(self, name) and self.ssl_certfile is None:
                raise ConfigError(f"{name} needs ssl_certfile", "ssl_certfile")
        required = self.ssl_cert_reqs
        if required not in (None, 0, 1, 2) or isinstance(required, bool):
            raise ConfigError(f"ssl_cert_reqs must be 0, 1 or 2, got {required!r}", "ssl_cert_reqs", required)
        if required and self.ssl_ca_certs is None:
            raise ConfigError(
                f"ssl_cert_reqs is {required}, but without ssl_ca_certs no client's certificate can be checked",
                "ssl_cert_reqs",
                required,
            )

    @property
    def client_certificates(self) -> int:
        """`ssl_cert_reqs`, or its default."""
        return (2 if self.ssl_ca_certs else 0) if self.ssl_cert_reqs is None else self.ssl_cert_reqs


def _read_module(given: str, number: int) -> LoRARequest:
    """An adapter as vLLM's flag has it: name=folder, or a JSON object."""
    if given.lstrip().startswith("{"):
        try:
            fields = msgspec.json.decode(given, type=LoRAModule)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"lora_modules: {given!r}: {error}", "lora_modules", given) from None
    else:
        name, equals, path = given.partition("=")
        if not equals:
            raise ConfigError(f"lora_modules: {given!r} is not name=folder", "lora_modules", given)
        fields = LoRAModule(name, path)
    try:
        return LoRARequest(fields.name, number, fields.path, fields.base_model_name, pinned=fields.pinned)
    except ValidationError as error:
        raise ConfigError(f"lora_modules: {given!r}: {error}", "lora_modules", given) from None


class LoRAModule(msgspec.Struct, forbid_unknown_fields=True):
    """An adapter of `lora_modules` as JSON."""

    name: str
    path: str
    base_model_name: str | None = None
    pinned: bool = False


def _flat(name: str, values: tuple[str, ...]) -> Iterator[str]:
    """Values of which some are JSON lists, as vLLM's flags have them."""
    for value in values:
        if not value.startswith("["):
            yield value
            continue
        try:
            yield from msgspec.json.decode(value, type=list[str])
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{name}: {value!r} is not a JSON list of strings: {error}", name, value) from None
