"""From a configuration to a model without weights: its kernels, attention backend and dtype."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from quire.adapters.device import DeviceAdapters
from quire.config import EngineConfig
from quire.distributed.experts import ExpertRanks
from quire.distributed.groups import Ranks
from quire.errors import ConfigError, UnsupportedModelError
from quire.kernels.base import Ops
from quire.kernels.kv import KVFormat
from quire.layers.adapters import SlotSpace
from quire.layers.attention.base import AttentionBackend, attention_backend
from quire.layers.attention.scales import is_attention_scale
from quire.layers.build_context import BuildContext, create_weights
from quire.layers.caches import LayerCache
from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig, checkpoint_kv_dtype
from quire.messages.media import EncoderLimits
from quire.models.base import CausalLM
from quire.models.registry import implementation, model_class
from quire.platforms.base import Platform
from quire.quantization.find import find_scheme
from quire.registry import resolve
from quire.speculative.config import MTP
from quire.speculative.device import DeviceProposer
from quire.speculative.registry import make_device_proposer
from quire.vision.base import VisionEncoder
from quire.vision.loading import LazyEncoder, encoder_from
from quire.worker.weight_image import WeightImage

logger = logging.getLogger(__name__)

RANK_STEP = 16
"""On a GPU ranks are padded to a multiple of this: a tile of its matrix units."""
DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


def make_ops(config: EngineConfig, platform: Platform) -> Ops:
    """The platform's kernels."""
    kind = resolve("kernels", platform.ops, {})
    ops: Ops = kind(batch_invariant=True) if config.batch_invariant else kind()
    return ops


def _make_attention(config: EngineConfig, platform: Platform) -> AttentionBackend:
    kind: Any = attention_backend(backend_name(config, platform))
    return kind(batch_invariant=True) if config.batch_invariant else kind()


def _check_block_size(config: EngineConfig, platform: Platform) -> None:
    if backend_name(config, platform) == "triton" and config.block_size & (config.block_size - 1):
        raise ConfigError(
            f"block_size must be a power of two for the attention backend 'triton', got {config.block_size}",
            "block_size",
            config.block_size,
        )


def _check_invariance(config: EngineConfig, platform: Platform, dtype: torch.dtype) -> None:
    able = platform.ops.endswith("TritonOps") and backend_name(config, platform) == "triton"
    if config.batch_invariant and not (able and dtype.itemsize == 2):
        raise ConfigError(
            "batch_invariant needs a GPU with quire's own kernels, and bfloat16 or float16 "
            f"(here: {platform.describe()}, {str(dtype).removeprefix('torch.')})",
            "batch_invariant",
            True,
        )


def backend_name(config: EngineConfig, platform: Platform) -> str:
    """The configured attention backend, or the platform's own."""
    return platform.attention if config.attention_backend == "auto" else config.attention_backend


def build_model(
    config: EngineConfig,
    files: ModelFiles,
    model: ModelConfig,
    platform: Platform,
    max_model_len: int,
    ranks: Ranks = Ranks(),
    device: torch.device | None = None,
    replica: int = 0,
    dense: bool = False,
    image: WeightImage | None = None,
) -> CausalLM:
    """The model's layers, their weights not filled. `device`: if not the platform's, such as "meta" for
    shapes only.

    `replica`: this engine's number among those that share the experts. `dense`: all matrices in `dtype`, also those
    of a GGUF file that could stay packed. `image`: where its weights may be already.
    """
    dtype = choose_dtype(config.dtype, model, files, platform)
    _check_invariance(config, platform, dtype)
    _check_block_size(config, platform)
    kv_format = choose_kv_format(config, files, model, dtype)
    _check_kv_format(kv_format, dtype, platform)
    build = BuildContext(
        config=model,
        ranks=ranks,
        dtype=dtype,
        device=device or platform.device,
        ops=make_ops(config, platform),
        attention=_make_attention(config, platform),
        max_model_len=max_model_len,
        experts=_expert_ranks(config, ranks, replica),
        kv_format=kv_format,
        scheme=None if dense else find_scheme(config, files, model, on_cpu=platform.device.type == "cpu"),
    )
    if image is not None:
        build.memory.begin_image(image.data)
    if implementation(model.architecture, config.model_impl) == "transformers":
        check_through_transformers(config, files, model)
        _warn_once(
            f"{model.architecture} runs through the transformers library, with quire's attention, matrices and cache: "
            "slower than an implementation of quire's own, which fuses more (docs/transformers-models.md)"
        )
    built: CausalLM = model_class(model.architecture, config.model_impl)(build)  # type: ignore[call-arg]
    create_weights(built, build)  # type: ignore[arg-type]
    return built


def make_adapters(config: EngineConfig, model: CausalLM, device: torch.device) -> DeviceAdapters | None:
    """Slots for LoRA adapters in the model's layers; None: the engine serves none."""
    if not config.enable_lora:
        return None
    dtype = model.build.dtype if config.lora_dtype == "auto" else DTYPES[config.lora_dtype]
    rank = config.max_lora_rank
    if device.type == "cuda":
        rank = -(-rank // RANK_STEP) * RANK_STEP
    space = SlotSpace(config.max_loras, rank, dtype, device)
    host = 2 * config.max_loras if config.max_cpu_loras is None else config.max_cpu_loras
    return DeviceAdapters(model, space, host, config.max_lora_rank)


def build_proposer(config: EngineConfig, files: ModelFiles, model: CausalLM) -> DeviceProposer | None:
    """What makes drafts on the device, its weights not filled; None: nothing does. `files`: the model's, whose
    checkpoint may have layers for drafts."""
    speculation = config.speculation
    if speculation is not None and speculation.method == MTP and speculation.model is None:
        speculation = replace(speculation, model=str(files.path))
    return make_device_proposer(speculation, model, model.build, model.build.ranks.pp_size)


def proposer_caches(proposer: DeviceProposer | None) -> list[LayerCache]:
    """What a proposer's own layers keep."""
    return [] if proposer is None else proposer.caches


def load_proposer(proposer: Any, config: EngineConfig, progress: bool) -> None:
    """Fill a proposer's weights, if it has any."""
    if (load := getattr(proposer, "load", None)) is not None:
        load(config.load_format, config.seed, progress)


def load_vision(config: EngineConfig, files: ModelFiles, build: BuildContext) -> VisionEncoder:
    """The model's encoder of images with its weights, or with weights that are read when the first image comes."""

    def make() -> VisionEncoder:
        found = encoder_from(files, build, config.load_format, config.seed)
        assert found is not None
        return found

    return LazyEncoder(build, make) if config.vision == "lazy" else make()


def encoder_limits(config: EngineConfig, model: CausalLM, encoder: VisionEncoder | None) -> EncoderLimits:
    """What requests may have beside token ids."""
    if encoder is None and not config.enable_prompt_embeds:
        return EncoderLimits()
    if not hasattr(model, "embed"):
        if encoder is None:
            raise ConfigError(
                f"enable_prompt_embeds is not implemented for {model.build.config.architecture}",
                "enable_prompt_embeds",
                True,
            )
        raise UnsupportedModelError(f"{model.build.config.architecture} takes no embeddings in place of token ids")
    hidden = model.build.config.hidden_size
    width = hidden if encoder is None else encoder.width
    deep = width // hidden - 1
    first = replace(model.build.ranks, pp_rank=0)
    if deep and deep > len(first.layers(model.build.config.num_layers)):
        raise ConfigError(
            f"{model.build.config.architecture} reads its images in its first {deep} layers, which must be on the "
            "first pipeline stage: use fewer stages",
            "pipeline_parallel_size",
            model.build.ranks.pp_size,
        )
    return EncoderLimits(
        cache_rows=config.encoder_cache_tokens,
        has_encoder=encoder is not None,
        takes_embeds=config.enable_prompt_embeds,
        bidirectional=encoder is not None and bool(getattr(model, "bidirectional_spans", False)),
        mrope=encoder is not None and bool(model.build.config.rope.get("mrope_section")),
        width=width,
        positions=model.build.max_model_len,
    )


def check_through_transformers(config: EngineConfig, files: ModelFiles, model: ModelConfig) -> None:
    """Refuse what models that run through transformers cannot do here."""
    if files.gguf is not None:
        raise ConfigError(
            f"{model.architecture} runs through transformers, and GGUF files need an implementation of quire's own: "
            "use a checkpoint in safetensors",
            "model_impl",
            config.model_impl,
        )
    if config.batch_invariant:
        raise ConfigError(
            f"{model.architecture} runs through transformers, whose own layers are not batch-invariant",
            "batch_invariant",
            True,
        )


def ignored_tensors(model: CausalLM) -> Callable[[str], bool]:
    """Says of a tensor of the checkpoint, by its name, whether the model does without it."""
    scheme = model.build.scheme

    def is_ignored(name: str) -> bool:
        return model.ignores(name) or is_attention_scale(name) or (scheme is not None and scheme.ignores(name))

    return is_ignored


def _expert_ranks(config: EngineConfig, ranks: Ranks, replica: int) -> ExpertRanks | None:
    """The ranks that whole experts are spread over; None without expert parallelism."""
    if not config.enable_expert_parallel:
        return None
    spare = config.num_redundant_experts
    if config.steps_together:
        return ExpertRanks(replica, config.data_parallel_size, spare, exchanges=True)
    return ExpertRanks(ranks.tp_rank, ranks.tp_size, spare, first=ranks.pp_rank * ranks.tp_size)


def choose_dtype(configured: str, model: ModelConfig, files: ModelFiles, platform: Platform) -> torch.dtype:
    """The dtype of weights and activations: the configured one, or the checkpoint's own if the device computes in it.

    A GGUF file names no dtype for its activations: a GPU uses bfloat16, a CPU float32, which keeps every bit of the
    quantized weights. A GPU without bfloat16 uses float16 instead.
    """
    on_cpu = platform.device.type == "cpu"
    if configured != "auto":
        _check_supported(DTYPES[configured], platform, on_cpu)
        return DTYPES[configured]
    own = DTYPES.get(model.dtype or "float32", torch.float32)
    if on_cpu:
        is_slow = own is torch.float16 or not platform.has_bfloat16
        return torch.float32 if is_slow or files.gguf is not None else own
    if own is torch.float16 and files.gguf is None:
        return own
    if platform.has_bfloat16:
        return torch.bfloat16
    _warn_once(f"{platform.describe()} has no bfloat16: float16 is used, whose range is smaller")
    return torch.float16


def choose_kv_format(config: EngineConfig, files: ModelFiles, model: ModelConfig, dtype: torch.dtype) -> KVFormat:
    """How the KV cache is stored, for activations of this dtype."""
    name = resolve_kv_dtype(config, files, model)
    if name in DTYPES and DTYPES[name] is not dtype:
        raise ConfigError(
            f"kv_cache_dtype is {name}, but activations are {str(dtype).removeprefix('torch.')}: use auto, or one of "
            "the 8-bit formats",
            "kv_cache_dtype",
            name,
        )
    found = KVFormat.named(name, dtype)
    if found.codes is not None and model.head_dim % 2:
        raise ConfigError(
            f"kv_cache_dtype {name} needs heads of an even size, and {model.architecture} has {model.head_dim}: use "
            "auto",
            "kv_cache_dtype",
            name,
        )
    return found


def _check_kv_format(kv_format: KVFormat, dtype: torch.dtype, platform: Platform) -> None:
    if kv_format.per_token and dtype is torch.float32 and platform.device.type == "cuda":
        raise ConfigError(
            f"kv_cache_dtype {kv_format.name} with float32 activations is not implemented on a GPU; use bfloat16 or "
            "float16 activations, or fp8",
            "kv_cache_dtype",
            kv_format.name,
        )


def resolve_kv_dtype(config: EngineConfig, files: ModelFiles, model: ModelConfig) -> str:
    """`kv_cache_dtype`; if that is auto, what the checkpoint says."""
    if config.kv_cache_dtype != "auto":
        return config.kv_cache_dtype
    return checkpoint_kv_dtype(files, model) or "auto"


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


def _check_supported(dtype: torch.dtype, platform: Platform, on_cpu: bool) -> None:
    """A CPU computes in any dtype, if slowly; a GPU's kernels need the hardware."""
    if dtype is torch.bfloat16 and not on_cpu and not platform.has_bfloat16:
        raise ConfigError(
            f"dtype is bfloat16, which {platform.describe()} does not have (compute capability 8.0 does); "
            "use float16, float32 or auto",
            "dtype",
            "bfloat16",
        )
