"""A model one layer at a time: its matrices, what they are multiplied with on calibration text, and new values.

Each layer is built as a pipeline stage of its own, so that any model that can be split into stages can be calibrated,
and memory holds one layer's weights at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from quire.config import EngineConfig
from quire.distributed.groups import Ranks
from quire.errors import UnsupportedModelError
from quire.kernels.base import Ops
from quire.kernels.gates import PLAIN_EXPERTS, ExpertVariant, has_gate
from quire.kernels.kv import KVFormat
from quire.kernels.routing import RouteRule
from quire.kernels.weights.base import Weight
from quire.layers.attention.latent import UpProjection
from quire.layers.attention.layer import Attention
from quire.layers.build_context import collect_targets
from quire.layers.expert_weights import shared_names
from quire.layers.linear import FusedLinear, ReplicatedLinear, RowParallelLinear
from quire.layers.moe import SparseMLP
from quire.loading.files import ModelFiles
from quire.loading.load import load_weights, match_checkpoint
from quire.loading.model_config import ModelConfig
from quire.loading.weights import AnyTarget, Checkpoint, StoredWeight, Target
from quire.models.base import CausalLM
from quire.models.llama import LlamaLayer, LlamaMLP
from quire.platforms.base import Platform
from quire.worker.building import build_model
from quire.worker.geometry import assign_groups, model_geometry
from quire.worker.kv import KVCache
from quire.worker.sequences import blocks_for, sequence_inputs

Arrange = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Matrix:
    """A matrix of the checkpoint, in the layer that holds it."""

    name: str
    """Its module in the checkpoint: model.layers.0.self_attn.q_proj."""
    into: torch.Tensor
    """[out, in], in the layer's memory."""
    fused: torch.Tensor
    """The matrix it is part of, which is multiplied as one."""
    arrange: Arrange | None = None
    """Reorders the checkpoint's rows to those of `into`."""

    def read(self) -> torch.Tensor:
        """Its values, in float32, rows as in the checkpoint."""
        if self.arrange is None:
            return self.into.float().clone()
        values = torch.empty(self.into.shape, device=self.into.device)
        values[self._order()] = self.into.float()
        return values

    def write(self, values: torch.Tensor) -> None:
        """Replace its values."""
        self.into.copy_(values if self.arrange is None else values[self._order()])

    def _order(self) -> torch.Tensor:
        assert self.arrange is not None
        return self.arrange(torch.arange(self.into.shape[0], device=self.into.device))


SAMPLED_ROWS, ROWS_AT_ONCE = 512, 16
"""Inputs of a matrix that are kept as they are, and how many of each sequence."""


class InputMoments:
    """What a matrix was multiplied with: the sum of x x^T, the largest values, and a sample.

    `cross` is the sum of (exact - x) x^T, where exact is the same input in the model before anything was rounded.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self.total = torch.zeros(width, width, device=device)
        self.cross: torch.Tensor | None = None
        self.peaks = torch.zeros(width, device=device)
        self.count = 0
        self._sample: list[torch.Tensor] = []

    def add(self, x: torch.Tensor, exact: torch.Tensor | None = None) -> None:
        wide = x.float()
        self.total.addmm_(wide.t(), wide)
        if exact is not None:
            if self.cross is None:
                self.cross = torch.zeros_like(self.total)
            self.cross.addmm_((exact.float() - wide).t(), wide)
        self.peaks = torch.maximum(self.peaks, wide.abs().amax(0))
        self.count += len(x)
        if len(self._sample) < SAMPLED_ROWS // ROWS_AT_ONCE:
            # The first tokens of a sequence often have the largest values.
            chosen = torch.linspace(0, len(x) - 1, min(ROWS_AT_ONCE, len(x)), device=x.device).long()
            self._sample.append(wide[chosen])

    def scale(self, scales: torch.Tensor) -> None:
        """The inputs have been divided by these numbers [in]."""
        self.total /= torch.outer(scales, scales)
        if self.cross is not None:
            self.cross /= torch.outer(scales, scales)
        self.peaks /= scales
        self._sample = [rows / scales for rows in self._sample]

    @property
    def sample(self) -> torch.Tensor:
        """Some of the inputs [rows, in]."""
        return torch.cat(self._sample)

    @property
    def mean(self) -> torch.Tensor:
        return self.total / max(1, self.count)


@dataclass(frozen=True)
class Scaling:
    """Matrices that read the same inputs, and what produces these: dividing the one and multiplying the columns of the
    other by the same numbers changes no result."""

    readers: torch.Tensor
    """[out, in]"""
    gain: torch.Tensor | None = None
    """[in]: of the norm before."""
    rows: torch.Tensor | None = None
    """[in / repeats, …]: of the matrix before."""
    bias: torch.Tensor | None = None
    """Of those rows."""
    head_dim: int = 0
    repeats: int = 1
    """Query heads that read the same rows: input (kv head, repeat, dimension) comes from row (kv head, dimension)."""

    def tie(self, values: torch.Tensor) -> torch.Tensor:
        """[in], each replaced by the mean over the inputs that come from the same row."""
        if self.repeats == 1:
            return values
        heads = values.unflatten(0, (-1, self.repeats, self.head_dim))
        return heads.mean(1, keepdim=True).expand_as(heads).flatten()

    def apply(self, scales: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
        """Move the scales; returns them as applied. `stored`: dtype of the gain in the checkpoint. The gain is rounded
        to it, and the scales are changed so that the product with it is exact."""
        if self.gain is not None:
            gain = self.gain.float()
            divided = (gain / scales).to(stored).float()
            scales = torch.where(divided == 0, torch.ones_like(scales), gain / divided)
            self.gain.copy_(torch.where(divided == 0, gain, divided))
        else:
            assert self.rows is not None
            once = (
                scales if self.repeats == 1 else scales.unflatten(0, (-1, self.repeats, self.head_dim))[:, 0].flatten()
            )
            self.rows.copy_(self.rows.float() / once.unsqueeze(-1))
            if self.bias is not None:
                self.bias.copy_(self.bias.float() / once)
        self.readers.copy_(self.readers.float() * scales)
        return scales


class ObservedOps:
    """Kernels that show `see` the input of each product: see(matrix, x, whether x has all tokens of the step)."""

    def __init__(self, ops: Ops, see: Callable[[torch.Tensor, torch.Tensor, bool], None]) -> None:
        self._ops, self._see = ops, see

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        self._see(weight, x, True)
        return self._ops.linear(x, weight, *rest, **named)

    def gated_linear(self, x: torch.Tensor, weight: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        self._see(weight, x, True)
        return self._ops.gated_linear(x, weight, *rest, **named)

    def linear_add(
        self, stream: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any, **named: Any
    ) -> torch.Tensor | None:
        self._see(weight, x, True)
        return self._ops.linear_add(stream, x, weight, *rest, **named)

    def norm_linear(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor | None,
        gain: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        gated: bool = False,
        activation: str = "silu",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, stream = self._ops.norm_stream(x, residual, gain, eps)
        product = self.gated_linear(normed, weight, bias, activation) if gated else self.linear(normed, weight, bias)
        return product, stream

    def experts(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        variant: ExpertVariant = PLAIN_EXPERTS,
    ) -> torch.Tensor:
        for expert in experts.unique().tolist():
            if 0 <= expert < len(gate_up):
                own = x[(experts == expert).any(-1)]
                self._see(gate_up[expert], own, False)
                features = self._ops.gated_linear(own, gate_up[expert], variant.biases(expert)[0], variant.activation)
                self._see(down[expert], features, False)
        return self._ops.experts(x, weights, experts, gate_up, down, variant)

    def sparse_mlp(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor | None,
        gain: torch.Tensor,
        eps: float,
        router: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        top_k: int,
        renormalise: bool,
        counts: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
        rule: RouteRule | None = None,
        variant: ExpertVariant = PLAIN_EXPERTS,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, stream = self._ops.norm_stream(x, residual, gain, eps)
        logits = self._ops.linear(normed, router, variant.router_bias)
        weights, experts = self._ops.route(logits, top_k, renormalise, counts, slots, rule)
        return self.experts(normed, weights, experts, gate_up, down, variant), stream


@dataclass
class LayerStage:
    """One layer with its weights, ready to run; the first also embeds."""

    model: CausalLM
    others: list[StoredWeight]
    """Its tensors that are not in `matrices`, as they are now."""
    consumed: list[str]
    """Names of the checkpoint's tensors that `matrices` hold."""
    matrices: list[Matrix]
    unquantized: list[str]
    """Modules with a matrix that stays in 16 bits: routers and gates."""
    config: EngineConfig
    device: torch.device
    moments: dict[int, InputMoments] = field(default_factory=dict)
    """By the address of the fused matrix."""

    def moments_of(self, matrix: torch.Tensor) -> InputMoments | None:
        """What a fused matrix was multiplied with, if anything."""
        return self.moments.get(matrix.data_ptr())

    def run(self, sequences: Sequence[torch.Tensor], hidden: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
        """The layer's outputs, on the host. `hidden`: those of the layer before, None for the first."""
        return list(self._run(sequences, hidden))

    def observe(
        self,
        sequences: Sequence[torch.Tensor],
        hidden: Sequence[torch.Tensor] | None,
        exact: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Collect the moments of all inputs of the layer's matrices.

        `exact`: what `hidden` would be if nothing had been rounded; returns the layer's outputs for these (else for
        `hidden`), on the host.
        """
        fused = {matrix.fused.data_ptr() for matrix in self.matrices}
        held: dict[int, torch.Tensor] = {}

        def keep(weight: torch.Tensor, x: torch.Tensor, whole: bool) -> None:
            if whole and weight.data_ptr() in fused:
                held[weight.data_ptr()] = x.clone()

        def add(weight: torch.Tensor, x: torch.Tensor, whole: bool) -> None:
            if (key := weight.data_ptr()) in fused and len(x):
                if key not in self.moments:
                    self.moments[key] = InputMoments(weight.shape[-1], weight.device)
                self.moments[key].add(x, held.get(key))

        outputs: list[torch.Tensor] = []
        for index, tokens in enumerate(sequences):
            if exact is not None:
                with self._observed(keep):
                    outputs += self._run([tokens], [exact[index]])
            with self._observed(add):
                found = self.run([tokens], None if hidden is None else [hidden[index]])
            outputs += found if exact is None else []
        return outputs

    @contextmanager
    def _observed(self, see: Callable[[torch.Tensor, torch.Tensor, bool], None]) -> Iterator[None]:
        modules = [module for module in self.model.modules() if hasattr(module, "ops")]  # type: ignore[attr-defined]
        before = [module.ops for module in modules]
        for module in modules:
            module.ops = ObservedOps(module.ops, see)
        try:
            yield
        finally:
            for module, ops in zip(modules, before, strict=True):
                module.ops = ops

    @torch.no_grad()
    def _run(self, sequences: Sequence[torch.Tensor], hidden: Sequence[torch.Tensor] | None) -> Iterator[torch.Tensor]:
        geometry = model_geometry(self.model, self.config.block_size, KVFormat(self.matrices[0].into.dtype))
        assign_groups(self.model, geometry)  # type: ignore[arg-type]
        kv = KVCache.of(geometry, blocks_for(max(map(len, sequences)), geometry), self.device)
        for index, tokens in enumerate(sequences):
            positions, (attention, *_) = sequence_inputs(len(tokens), geometry, self.device)
            # A copy: the layer may overwrite it.
            given = None if hidden is None else hidden[index].to(self.device, copy=True)
            yield self.model.forward(tokens.to(self.device), positions, kv.layers, attention, given).cpu()

    def scalings(self) -> list[Scaling]:
        """The pairs of layers that scales can be moved between, in the order in which they are to be scaled."""
        found: list[Scaling] = []
        for module in self.model.modules():  # type: ignore[attr-defined]
            if isinstance(module, LlamaLayer) and isinstance(module.self_attn.attention, Attention):
                found += _scalings(module)
        if not found:
            raise UnsupportedModelError(
                f"AWQ and SmoothQuant scale layers like Llama's; {type(self.model).__name__} has none: use gptq or rtn"
            )
        return found


def load_stage(
    config: EngineConfig,
    files: ModelFiles,
    model: ModelConfig,
    platform: Platform,
    checkpoint: Checkpoint,
    layer: int,
    max_len: int,
) -> LayerStage:
    """Layer number `layer` of the checkpoint. `max_len`: tokens of the longest sequence that it will run."""
    ranks = Ranks(0, 1, layer, model.num_layers)
    built = build_model(config, files, model, platform, max_len, ranks, dense=True)
    targets = collect_targets(built)  # type: ignore[arg-type]
    load_weights(targets, built.ignores, checkpoint, progress=False)
    matrices = list(find_matrices(built))
    spans = [(m.into.data_ptr(), m.into.data_ptr() + m.into.nbytes) for m in matrices]

    def in_matrix(tensor: torch.Tensor) -> bool:
        return any(start < tensor.data_ptr() + tensor.nbytes and tensor.data_ptr() < stop for start, stop in spans)

    pairs = match_checkpoint(targets, built.ignores, checkpoint)
    others = [
        _Held(weight, wanted)
        for weight, wanted in pairs
        if not any(isinstance(t, Target) and in_matrix(t.into) for t in wanted)
    ]
    kept = {other.name for other in others}
    consumed = [weight.name for weight, _ in pairs if weight.name not in kept]
    return LayerStage(built, list(others), consumed, matrices, list(_unquantized(built)), config, platform.device)


class _Held:
    """A checkpoint tensor that a layer holds: its value there, which may have changed since it was loaded."""

    def __init__(self, weight: StoredWeight, wanted: Sequence[AnyTarget]) -> None:
        self.name, self.shape = weight.name, weight.shape
        self._weight, self._wanted = weight, wanted

    def read(self, keep: tuple[slice, ...] = ()) -> torch.Tensor:
        target = self._wanted[0]
        if isinstance(target, Target) and target.arrange is None and tuple(target.into.shape) == tuple(self.shape):
            return target.into[keep] if keep else target.into
        return self._weight.read(keep)


def find_matrices(model: CausalLM) -> Iterator[Matrix]:
    """The matrices of a model that are stored in few bits: all but embeddings, heads, routers and gates."""
    for path, module in model.named_modules():  # type: ignore[attr-defined]
        owner = path.rpartition(".")[0]
        if isinstance(module, (FusedLinear, RowParallelLinear)):
            weight = _dense(module.weight)
            start = 0
            for part in module.parts if isinstance(module, FusedLinear) else [module.part]:
                if part.transposed:
                    raise UnsupportedModelError(
                        f"{path}: {type(model).__name__} stores its matrices transposed, which compressed-tensors "
                        "cannot describe"
                    )
                yield Matrix(f"{owner}.{part.name}", weight[start : start + part.height], weight, part.arrange)
                start += part.height
        elif isinstance(module, SparseMLP):
            yield from _expert_matrices(owner, module)


def _expert_matrices(owner: str, module: SparseMLP) -> Iterator[Matrix]:
    if not has_gate(module.variant.activation):
        raise UnsupportedModelError(f"the experts of {owner} have no gates: they are implemented in 16 bits alone")
    naming, width = module.namings[0], module.share.width
    for expert in range(module.routing.num_experts):
        fused, down = _dense(module.gate_up)[expert], _dense(module.down)[expert]
        for name, rows in ((naming.gate, fused[:width]), (naming.up, fused[width:])):
            yield Matrix(f"{owner}.{name.format(expert)}".removesuffix(".weight"), rows, fused)
        yield Matrix(f"{owner}.{naming.down.format(expert)}".removesuffix(".weight"), down, down)


def _dense(weight: Weight) -> torch.Tensor:
    assert isinstance(weight, torch.Tensor)
    return weight


def _unquantized(model: CausalLM) -> Iterator[str]:
    for path, module in model.named_modules():  # type: ignore[attr-defined]
        owner = path.rpartition(".")[0]
        if isinstance(module, (ReplicatedLinear, UpProjection)):
            yield f"{owner}.{module.part.name}"
        elif isinstance(module, SparseMLP):
            yield f"{owner}.{module.namings[0].router}".removesuffix(".weight")
            if module.choices > module.routing.top_k:
                yield from (f"{owner}.{name}".removesuffix(".weight") for name in shared_names(module.shared_name))


def _scalings(layer: LlamaLayer) -> Iterator[Scaling]:
    attention, mlp = layer.self_attn, layer.mlp
    bias, qkv, out = attention.qkv_proj.bias, _dense(attention.qkv_proj.weight), _dense(attention.o_proj.weight)
    yield Scaling(qkv, gain=layer.input_layernorm.weight)
    inner = attention.attention
    v_rows = slice(qkv.shape[0] - inner.num_kv_heads * inner.head_dim, None)
    yield Scaling(
        out, rows=qkv[v_rows], bias=None if bias is None else bias[v_rows], head_dim=inner.head_dim,
        repeats=inner.num_heads // inner.num_kv_heads,
    )  # fmt: skip
    if isinstance(mlp, LlamaMLP):
        bias, gate_up, down = mlp.gate_up_proj.bias, _dense(mlp.gate_up_proj.weight), _dense(mlp.down_proj.weight)
        up_rows = slice(down.shape[1], None)
        yield Scaling(gate_up, gain=layer.post_attention_layernorm.weight)
        yield Scaling(down, rows=gate_up[up_rows], bias=None if bias is None else bias[up_rows])
    elif isinstance(mlp, SparseMLP):
        for gate_up, down in zip(_dense(mlp.gate_up), _dense(mlp.down), strict=True):
            yield Scaling(down, rows=gate_up[down.shape[1] :])
