"""Latent attention (MLA, arXiv 2405.04434): the cache holds one vector a token, for all heads.

A token's vector is its latent (`rank` values, normed) and one rotated key that all heads share. A head's keys and
values are products of the latent with its part of `kv_b_proj`. So a query may be multiplied with that part instead
(*absorbed*): attention then runs over the vectors themselves, and reads each once for all heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from quire.errors import ConfigError, UnsupportedModelError
from quire.layers.attention.base import AttentionInputs, LastTokens, LatentBackend, LatentShape
from quire.layers.build_context import BuildContext
from quire.layers.caches import LatentCache
from quire.layers.matrices import MatrixPart, formats_of
from quire.loading.model_config import ModelConfig, positive_integer
from quire.loading.weights import AnyTarget, Assembly, AssemblyPart, Target
from quire.quantization.formats.base import Format
from quire.quantization.formats.on_load import OnLoadFormat


def latent_shape(config: ModelConfig) -> LatentShape:
    """The sizes in a model's config."""
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    return LatentShape(*(positive_integer(config.raw, name) for name in names))


def softmax_scale(shape: LatentShape, rope: Mapping[str, Any]) -> float:
    """1 / sqrt(query dimensions); DeepSeek's YaRN puts its magnitude here, squared, instead of into the angles."""
    scale = shape.query**-0.5
    if rope.get("rope_type", "default") == "default" or not rope.get("mscale_all_dim"):
        return scale
    factor = float(rope.get("factor") or 1.0)
    magnitude = 0.1 * float(rope["mscale_all_dim"]) * math.log(factor) + 1.0 if factor > 1 else 1.0
    return scale * magnitude * magnitude


class UpProjection(nn.Module):
    """The rank's heads of `kv_b_proj`: [heads, nope + value, rank], keys' rows then values'.

    Always in the activations' dtype: absorbed queries and outputs are products with its transposes. A checkpoint that
    has it in few bits is dequantized while it is loaded.
    """

    def __init__(self, build: BuildContext, name: str, shape: LatentShape, heads: slice) -> None:
        super().__init__()
        each = shape.nope + shape.value
        rows = slice(heads.start * each, heads.stop * each)
        self.part = MatrixPart(name, (build.config.num_heads * each, shape.rank), rows, slice(0, shape.rank))
        self.weight = build.parameter(heads.stop - heads.start, each, shape.rank)
        self.format: Format | None = None

    def create_weights(self, build: BuildContext, owner: str) -> None:
        """Note the format of the checkpoint's matrix."""
        (found,) = formats_of(build, owner, [self.part])
        self.format = None if isinstance(found, OnLoadFormat) else found

    def targets(self) -> dict[str, list[AnyTarget]]:
        """The matrix: its rows of this rank, or the tensors that hold it in few bits."""
        part, found, into = self.part, self.format, self.weight.flatten(0, 1)
        if found is None:
            keep = () if part.height == part.shape[0] else (part.rows,)
            return {f"{part.name}.weight": [Target(into, part.shape, keep)]}

        def place(read: Mapping[str, torch.Tensor]) -> None:
            def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
                return torch.zeros(shape, dtype=dtype, device=into.device)

            held = found.allocate(tuple(into.shape), into.dtype, zeros)
            found.place(read, held, slice(0, part.height))
            into.copy_(held.dequantize())

        assembly = Assembly(place, into.device, into.nbytes, f"{found.describe()}, dequantized", "tensor")
        stored = found.stored(part.shape, part.rows, part.columns)
        return {
            f"{part.name}.{key}": [
                AssemblyPart(assembly, key, s.shape, s.dtypes, s.keep, s.optional, s.sample, s.also, s.exact)
            ]
            for key, s in stored.items()
        }


class LatentAttention(nn.Module):
    """Norm and rotate, write the token's vector to the cache, attend."""

    def __init__(
        self,
        build: BuildContext,
        shape: LatentShape,
        heads: slice,
        cos_sin: torch.Tensor,
        gain: torch.Tensor,
        up: UpProjection,
        interleaved: bool,
    ) -> None:
        """`heads`: of this rank. `gain`: of the latent's norm. `interleaved`: dimensions 2i and 2i + 1 are rotated
        together, not i and i + rope / 2."""
        super().__init__()
        if build.kv_format.codes is not None:
            raise ConfigError(
                f"kv_cache_dtype {build.kv_format.name} is not implemented for latent attention "
                f"({build.config.architecture}): use auto",
                "kv_cache_dtype",
                build.kv_format.name,
            )
        if not hasattr(build.attention, "latent"):
            raise UnsupportedModelError(
                f"the attention backend {type(build.attention).__name__} has no latent attention, which "
                f"{build.config.architecture} needs"
            )
        self.ops = build.ops
        self.backend: LatentBackend = build.attention.latent(heads.stop - heads.start, shape)
        self.shape = shape
        self.num_heads = heads.stop - heads.start
        self.cos_sin = cos_sin
        self.gain = gain
        self.up = up
        self.interleaved = interleaved
        self.eps = build.config.norm_eps
        self.dtype = build.dtype
        self.scale = softmax_scale(shape, build.config.rope)
        self.cache = LatentCache(shape.width, build.kv_format)

    group = 0
    """The cache group of the layer, set once the model is built."""

    def forward(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        positions: torch.Tensor,
        kv: torch.Tensor,
        inputs: AttentionInputs,
        last: LastTokens | None = None,
    ) -> torch.Tensor:
        """The heads' outputs [T, heads * value]. q [T, heads * query], latent [T, rank + rope], neither normed nor
        rotated. With `last`: only of its tokens, but the vectors of all are written."""
        inputs = inputs.of(self.group)
        attended = inputs if last is None else last.inputs.of(self.group)
        self.backend.prepare(kv, attended)
        q = q.unflatten(-1, (self.num_heads, self.shape.query))
        self.ops.prepare_latent(
            q, latent, positions, self.cos_sin, self.gain, self.eps, kv, inputs.slots, self.interleaved
        )
        if last is not None:
            q, latent = q[last.tokens], latent[last.tokens]
        return self.backend.attend(q, latent, kv, self.up.weight, attended, self.scale)
