"""gpt-oss (arXiv 2508.10925): mixtures of experts in MXFP4, attention with sinks, every other layer with a window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from quire.errors import ConfigError, UnsupportedModelError
from quire.kernels.gates import ExpertVariant
from quire.kernels.weights.base import QuantizedWeight
from quire.layers.attention.layer import Sinks
from quire.layers.build_context import BuildContext
from quire.layers.expert_weights import STACKED_APART, ExpertWeights
from quire.layers.moe import Routing, SparseMLP
from quire.loading.weights import AnyTarget, Assembly, AssemblyPart, Target, TensorLayout
from quire.models.llama import LlamaAttention, LlamaForCausalLM, LlamaVariant
from quire.quantization.formats.fp4 import Mxfp4Experts

_SWIGLU = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
"""What the activation `clamped_swiglu` computes."""


class GptOssAttention(LlamaAttention):
    """Attention with a learned logit a head that takes a share of every softmax."""

    def __init__(self, build: BuildContext, variant: LlamaVariant, layer: int, cos_sin: torch.Tensor | None) -> None:
        super().__init__(build, variant, layer, cos_sin)
        self.sinks = Sinks(build, self.heads, "sinks")
        self.attention.spec = replace(self.attention.spec, sinks=self.sinks.weight)


class GptOssExperts(SparseMLP):
    """Experts whose checkpoint tensors are stacks with the rows of gate and up interleaved.

    In 16 bits the matrices are stored transposed, [experts, in, out].
    """

    def __init__(self, build: BuildContext, routing: Routing, layer: int) -> None:
        super().__init__(build, routing, layer)
        count, hidden = len(self.share.experts), build.config.hidden_size
        self.router_bias = build.parameter(routing.num_experts)
        self.gate_up_bias = build.parameter(count, 2 * self.share.width)
        self.down_bias = build.parameter(count, hidden)
        # Every rank holds the biases, one adds those of partial results: the sum over ranks must have them once.
        adds = self.dispatch is not None or build.ranks.tp_rank == 0
        down_bias = self.down_bias if adds else None
        self.variant = ExpertVariant("clamped_swiglu", self.gate_up_bias, down_bias, self.router_bias)

    def create_weights(self, build: BuildContext, owner: str) -> None:
        """Make the stacks: in MXFP4 if the checkpoint has them so."""
        if getattr(build.scheme, "stacks_experts", False):  # a GGUF file has gate and up apart, one by one or stacked
            self.formats: list[Mxfp4Experts | None] = [None, None]
            super().create_weights(build, owner)
            return
        share, hidden = self.share, build.config.hidden_size
        self._quantized = None
        stacks = [f"{owner}.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
        if build.scheme is not None and any(build.scheme.format_of(stack) is not None for stack in stacks):
            raise UnsupportedModelError("gpt-oss is implemented with experts in MXFP4 or 16 bits, in no other format")
        experts_of = getattr(build.scheme, "experts_of", lambda stack: None)
        found: list[Mxfp4Experts | None] = [experts_of(stack) for stack in stacks]
        self.formats = found
        shapes = (len(share.experts), 2 * share.width, hidden), (len(share.experts), hidden, share.width)
        self.gate_up, self.down = (
            build.parameter(*shape) if each is None else each.allocate(shape, build.dtype, build.memory.zeros)
            for shape, each in zip(shapes, found, strict=True)
        )

    def targets(self) -> dict[str, list[AnyTarget]]:
        """The router, and the rank's part of the stacks and their biases."""
        share, hidden = self.share, self.router.shape[1]
        features, total, width = share.features, share.total, share.total_width
        rows = slice(2 * features.start, 2 * features.stop)
        tall, wide = (total, 2 * width, hidden), (total, hidden, width)
        every = slice(0, hidden)
        collected: dict[str, list[AnyTarget]] = {
            "mlp.router.weight": [Target(self.router, tuple(self.router.shape))],
            "mlp.router.bias": [Target(self.router_bias, tuple(self.router_bias.shape))],
        }
        for name in ("gate_up_proj_bias", "down_proj_bias"):
            collected[f"mlp.experts.{name}"] = []
        apart: Mapping[str, Sequence[AnyTarget]] = {}
        if self._quantized is not None:
            stacks = self._quantized.targets(self.router, (STACKED_APART,))
            collected |= {name: found for name, found in stacks.items() if name != STACKED_APART.router}
        elif self.formats == [None, None]:
            assert isinstance(self.gate_up, torch.Tensor) and isinstance(self.down, torch.Tensor)
            apart = ExpertWeights(self.router, self.gate_up, self.down, share, (STACKED_APART,)).targets()
        for place, run in share.runs:
            experts, into = slice(run.start, run.stop), slice(place, place + len(run))
            keep = () if len(run) == total else (experts,)
            gate_up = Target(self.gate_up_bias[into], tall[:2], (experts, rows), _apart)
            down = Target(self.down_bias[into], wide[:2], keep)
            collected["mlp.experts.gate_up_proj_bias"].append(replace(gate_up, layouts=(self._biases_apart(),)))
            renamed = TensorLayout(("mlp.experts.down_proj.bias",), self._down_biases)
            collected["mlp.experts.down_proj_bias"].append(replace(down, layouts=(renamed,)))
            if self._quantized is not None:
                continue
            parts = ((self.gate_up, tall, rows, every), (self.down, wide, every, features))
            for (weight, shape, kept, columns), found, name in zip(
                parts, self.formats, ("gate_up_proj", "down_proj"), strict=True
            ):
                if found is not None:
                    assert isinstance(weight, QuantizedWeight)
                    named = _packed(self.ranks.tp_size, weight[into], found, shape, experts, kept, columns)
                else:
                    assert isinstance(weight, torch.Tensor)
                    stored = (shape[0], shape[2], shape[1])
                    arrange = _apart_transposed if weight is self.gate_up else _transposed
                    layouts = apart[f"mlp.experts.{name}"][0].layouts
                    named = {name: Target(weight[into], stored, (experts, columns, kept), arrange, layouts)}
                for own, target in named.items():
                    collected.setdefault(f"mlp.experts.{own}", []).append(target)
        return collected

    def _biases_apart(self) -> TensorLayout:
        """Gate and up apart, as GGUF files have them."""
        share, width = self.share, self.share.width

        def targets() -> dict[str, list[AnyTarget]]:
            return {
                f"mlp.experts.{name}_proj.bias": [
                    Target(
                        self.gate_up_bias[place : place + len(run), half * width : (half + 1) * width],
                        (share.total, share.total_width),
                        (slice(run.start, run.stop), share.features),
                    )
                    for place, run in share.runs
                ]
                for half, name in enumerate(("gate", "up"))
            }

        return TensorLayout(("mlp.experts.gate_proj.bias", "mlp.experts.up_proj.bias"), targets)

    def _down_biases(self) -> dict[str, list[AnyTarget]]:
        shape = (self.share.total, self.down_bias.shape[1])
        return {
            "mlp.experts.down_proj.bias": [
                Target(self.down_bias[place : place + len(run)], shape, (slice(run.start, run.stop),))
                for place, run in self.share.runs
            ]
        }


class GptOssForCausalLM(LlamaForCausalLM):
    """gpt-oss-20b and gpt-oss-120b."""

    def __init__(self, build: BuildContext) -> None:
        config = build.config
        for key, value in _SWIGLU.items():
            if config.raw.get(key, value) != value:
                raise UnsupportedModelError(
                    f"{config.architecture} with {key} {config.raw[key]!r} is not implemented; only {value} is"
                )
        routing = Routing.from_config(config, "intermediate_size", renormalise=True)

        def experts(build: BuildContext, layer: int) -> nn.Module:
            return GptOssExperts(build, routing, layer)

        bias = bool(config.raw.get("attention_bias", True))
        super().__init__(build, LlamaVariant(bias, bias, attention=GptOssAttention, mlp=experts))


def _packed(
    ranks: int,
    weight: QuantizedWeight,
    found: Mxfp4Experts,
    shape: tuple[int, int, int],
    experts: slice,
    rows: slice,
    columns: slice,
) -> Mapping[str, AnyTarget]:
    """The tensors of a stack in MXFP4."""
    try:
        found.check_cut(shape, rows, columns)
    except ValueError as error:
        raise ConfigError(
            f"{found.name} ({found.describe()}) cannot be split over {ranks} tensor-parallel ranks: {error}",
            "tensor_parallel_size",
            ranks,
        ) from error
    assembly = Assembly(
        lambda read: found.place(read, weight), weight.device, weight.nbytes, found.describe(), type(weight).__name__
    )
    return {
        key: AssemblyPart(assembly, key, stored.shape, stored.dtypes, stored.keep, exact=stored.exact)
        for key, stored in found.stored(shape, experts, rows, columns).items()
    }


def _apart(rows: torch.Tensor) -> torch.Tensor:
    """[experts, 2 * width, ...] with gate and up interleaved, as gate first, then up."""
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1)


def _transposed(stack: torch.Tensor) -> torch.Tensor:
    return stack.transpose(1, 2)


def _apart_transposed(stack: torch.Tensor) -> torch.Tensor:
    return _apart(stack.transpose(1, 2))
