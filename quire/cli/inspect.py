"""`quire inspect`: describes a model and the memory it would need here, or shows the memory of a server."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.cli.engine_flags import add_common, add_engine_flags, add_model, engine_settings
from quire.cli.inspect_memory import add_memory_flags, wants_memory
from quire.cli.parser import Parser
from quire.cli.terminal import table
from quire.cli.values import readable_bytes
from quire.errors import QuireError

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.loading.files import ModelFiles
    from quire.loading.model_config import ModelConfig
    from quire.worker.doctor import Examination
    from quire.worker.memory import MemoryPlan

WHAT = """\
Describe a model, and the memory that its weights and KV cache would need on this machine. Weights are not loaded (but
downloaded if necessary): their headers say what is quantized how, and whether it fits the model. Takes the engine's
flags: try --dtype, --quantization, --block-size, --max-model-len.

With --url, show the memory of a running server instead: how full each tier is, block by block, the blocks of each
request and session, shared blocks, and the load of a mixture's experts. --snapshot shows the same from a file."""
EXAMPLES = """
  quire inspect
  quire inspect qwen3-0.6b --dtype float32
  quire inspect ./my-model --kv-cache-memory-bytes 4G
  quire inspect ./my-model --quantization int4 --json
  quire inspect --url http://127.0.0.1:8000 --api-key ADMIN_KEY --watch 2
  quire inspect --url http://127.0.0.1:8000 --save map.json
  quire inspect --snapshot map.json
"""


def configure(parser: Parser) -> None:
    """The flags of `quire inspect`."""
    parser.describe(run, WHAT, EXAMPLES, "[MODEL]")
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="print a model's description as JSON")
    add_memory_flags(parser)
    add_engine_flags(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Print the description, then the memory plan. An unsupported model is described before the error."""
    if wants_memory(args):
        from quire.cli.inspect_memory import run as show_memory

        return show_memory(args)
    from quire.config import EngineConfig
    from quire.loading.hub import find_model
    from quire.loading.model_config import read_model_config, read_raw_config
    from quire.models.registry import implementation, model_class
    from quire.speculative.resolve_draft import describe_head

    config = EngineConfig(**engine_settings(args))
    if args.json:
        return _print_json(config)
    files = find_model(config)
    raw = {**read_raw_config(files), **(config.hf_overrides or {})}
    architecture = next(iter(raw.get("architectures") or []), None)
    print(table([("architecture", str(architecture)), *_file_rows(files)], config.model), flush=True)
    if (head := describe_head(raw, files.name)) is not None:
        print(table(list(head.items())))
        return 0
    if architecture is not None:
        model_class(architecture, config.model_impl)  # raises if it is not supported
        print(table([("implementation", implementation(architecture, config.model_impl))]), flush=True)
    model = read_model_config(files, config.hf_overrides)
    print(table(_shape_rows(model)), flush=True)
    print(table([("tokenizer", _describe_tokenizer(config, files))]), flush=True)
    config = _resolved(config, files, model)
    found = _examine(config, files, model)
    _print_formats(found)
    found.misfits.raise_if_any()
    _print_estimate(config, files, model)
    return 0


def _examine(config: EngineConfig, files: ModelFiles, model: ModelConfig) -> Examination:
    from quire.engine.setup import model_len
    from quire.platforms import choose
    from quire.worker.doctor import examine

    return examine(config, files, model, choose(config.device), model_len(config, model))


def _resolved(config: EngineConfig, files: ModelFiles, model: ModelConfig) -> EngineConfig:
    """With --quantization auto:BITS, the table that it stands for: measured, as an engine would at its start."""
    if not (config.quantization or "").startswith("auto"):
        return config
    from quire.platforms import choose
    from quire.worker.sensitivity import resolve_auto

    return resolve_auto(config, files, model, choose(config.device))


def _print_formats(found: Examination) -> None:
    rows = [("quantization", found.scheme or "none")]
    rows += [("" if index else "formats", str(each)) for index, each in enumerate(found.layers)]
    total = readable_bytes(found.nbytes)
    for index, use in enumerate(found.formats):
        held = f" as {use.layout}" if use.layout else ""
        count = f"{use.matrices} matri{'x' if use.matrices == 1 else 'ces'}"
        share = f"{readable_bytes(use.nbytes)}: {use.format}, {count}{held}; {use.kernels}"
        rows.append(("" if index else f"{total} in all", share))
    rows += [("" if index else "disagreement", each) for index, each in enumerate(found.disagreements)]
    print(table(rows), flush=True)


def _print_json(config: EngineConfig) -> int:
    """The same as one JSON object. Status 1 if loading would be refused."""
    import dataclasses
    import json

    from quire.loading.hub import find_model
    from quire.loading.model_config import read_model_config, read_raw_config
    from quire.models.registry import implementation
    from quire.speculative.resolve_draft import describe_head

    files = find_model(config)
    if (head := describe_head(read_raw_config(files), files.name)) is not None:
        print(json.dumps({"model": config.model, "path": str(files.path), "draft": head}, indent=2))
        return 0
    model = read_model_config(files, config.hf_overrides)
    config = _resolved(config, files, model)
    found = _examine(config, files, model)
    problems = found.misfits.described
    report: dict[str, Any] = {
        "model": config.model,
        "path": str(files.path),
        "architecture": model.architecture,
        "implementation": implementation(model.architecture, config.model_impl),
        "quantization": found.scheme,
        "layers": [dataclasses.asdict(each) for each in found.layers],
        "formats": [dataclasses.asdict(each) for each in found.formats],
        "bytes": found.nbytes,
        "disagreements": found.disagreements,
        "problems": problems,
    }
    if not problems:
        estimate = estimate_memory(config, files, model)
        memory = estimate.memory
        report |= {
            "device": estimate.device,
            "dtype": estimate.dtype,
            "parameters": estimate.parameters,
            "kv_cache_dtype": config.kv_cache_dtype,
            "kv_bytes_per_token": estimate.token_bytes,
            "max_model_len": estimate.max_model_len,
            "memory": {
                "weights": memory.weights, "activations": memory.activations, "reserve": memory.reserve,
                "kv_cache": memory.cache, "kv_tokens": memory.cache_tokens, "free": memory.free,
            },
        }  # fmt: skip
    print(json.dumps(report, indent=2))
    return 1 if problems else 0


def _file_rows(files: ModelFiles) -> list[tuple[str, str]]:
    from quire.loading.bundle import locate, read_bundle

    rows = [("path", str(files.path))]
    if files.bundle is not None:
        bundle = read_bundle(files.bundle)
        bundle.check()
        manifest = bundle.manifest
        rows.append(("bundle", f"{manifest['model']}, written by quire {manifest['quire']}; all digests match"))
    paths = files.weight_files(files.kind) if files.kind else ()
    if not paths:
        return [*rows, ("weights", "none")]
    total = readable_bytes(sum(locate(path).size for path in paths))
    rows.append(("weights", f"{files.kind}, {len(paths)} file{'s' if len(paths) > 1 else ''}, {total}"))
    if len(paths) > 1:
        rows += [("", f"{path.name}  {readable_bytes(locate(path).size)}") for path in paths]
    return rows


def _heads(model: ModelConfig) -> str:
    if rank := model.raw.get("kv_lora_rank"):
        return f"{model.num_heads} query, latent attention over {rank} + {model.head_dim} values a token"
    return f"{model.num_heads} query, {model.num_kv_heads} KV, {model.head_dim} each"


def _shape_rows(model: ModelConfig) -> list[tuple[str, str]]:
    from quire.engine.setup import longest_position

    windows = sorted({window for window in model.windows if window is not None})
    window = f", sliding window {windows[0]} in {sum(w is not None for w in model.windows)} layers" if windows else ""
    return [
        ("layers", f"{model.num_layers} of width {model.hidden_size}, MLP {model.intermediate_size}"),
        *_expert_rows(model),
        ("heads", _heads(model)),
        ("context", f"{longest_position(model)} tokens{window}"),
        ("vocabulary", f"{model.vocab_size} tokens{', tied embeddings' if model.tie_embeddings else ''}"),
        ("dtype", f"{model.dtype or 'not given'} in the checkpoint"),
    ]


def _expert_rows(model: ModelConfig) -> list[tuple[str, str]]:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((model.raw[name] for name in names if model.raw.get(name)), None)
    if not count or not model.raw.get("num_experts_per_tok"):
        return []
    width = model.raw.get("moe_intermediate_size") or model.intermediate_size
    shared = model.raw.get("shared_expert_intermediate_size") if model.architecture.startswith("Qwen2Moe") else None
    beside = f", a shared one of width {shared}" if shared else ""
    return [("experts", f"{count} of width {width}, {model.raw['num_experts_per_tok']} per token{beside}")]


def _describe_parameters(total: int, active: int) -> str:
    share = f", {active / 1e6:.1f} million of them per token" if active < total else ""
    return f"{total / 1e6:.1f} million{share}"


def _describe_tokenizer(config: EngineConfig, files: ModelFiles) -> str:
    from quire.loading.tokenizer import tokenizer_of

    try:
        tokenizer = tokenizer_of(config, files)
    except QuireError as error:
        return f"cannot be loaded: {error}"
    template = "with" if getattr(tokenizer, "chat_template", None) else "without"
    return f"{len(tokenizer)} tokens, {template} a chat template"


def _print_estimate(config: EngineConfig, files: ModelFiles, model: ModelConfig) -> None:
    estimate = estimate_memory(config, files, model)
    plan = estimate.memory
    full = (plan.num_blocks - 1) / plan.blocks_for(estimate.max_model_len)
    fixed = (plan.blocks_for(0) + sum(plan.window_blocks)) * plan.cache // plan.num_blocks
    held = f"{plan.cache_tokens} tokens" if plan.full_groups else "requests of any length"
    each = f"{readable_bytes(estimate.token_bytes)} per token in {estimate.kv_format}"
    print(
        table(
            [
                ("parameters", _describe_parameters(estimate.parameters, estimate.active_parameters)),
                ("weights", f"{readable_bytes(plan.weights)} in {estimate.dtype}"),
                (
                    "KV cache",
                    f"{each}{f', {readable_bytes(fixed)} per request' if fixed else ''}; "
                    f"{readable_bytes(plan.cache)} in total",
                ),
                ("capacity", f"{held} in {plan.num_blocks - 1} blocks of {config.block_size}"),
                ("", f"{full:.1f} sequences of the full {estimate.max_model_len} tokens"),
                ("per step", f"at most {estimate.max_num_seqs} requests, {plan.step_tokens} tokens"),
            ],
            f"\non {estimate.device}, with {readable_bytes(estimate.free_bytes)} free",
        )
    )
    print(f"\nmemory plan\n{plan}")


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated memory and limits of an engine that is not started."""

    device: str
    dtype: str
    free_bytes: int
    parameters: int
    active_parameters: int
    token_bytes: float
    kv_format: str
    max_model_len: int
    max_num_seqs: int
    memory: MemoryPlan


def estimate_memory(config: EngineConfig, files: ModelFiles, model: ModelConfig) -> MemoryEstimate:
    """Estimate the engine's memory from a model without weights. Raises as the engine would if it does not fit."""
    from quire.engine.setup import budgets, model_len
    from quire.executor.base import StepLimits
    from quire.executor.estimate import estimate_needs
    from quire.platforms import choose

    platform = choose(config.device)
    longest = model_len(config, model)
    rows, tokens = budgets(config, platform, longest)
    free = platform.free_memory()
    needs = estimate_needs(config, files, model, platform, StepLimits(longest, rows, tokens))
    memory = needs.plan(config, platform, free)
    return MemoryEstimate(
        device=platform.describe(),
        dtype=str(needs.dtype).removeprefix("torch."),
        free_bytes=free,
        parameters=needs.parameters,
        active_parameters=needs.active_parameters,
        token_bytes=memory.full_groups * needs.block_bytes / config.block_size,
        kv_format=str(needs.dtype).removeprefix("torch.") if needs.kv_format is None else needs.kv_format.name,
        max_model_len=longest,
        max_num_seqs=rows,
        memory=memory,
    )
