"""A model of the transformers library behind the engine's interface for models.

The library's code computes: norms, rotations, activations, routing, residuals, what it does with logits. The engine's
layers take the place of matrices, experts, embedding, head and attention. What the model computes is not known from its
config but seen in a run without memory (`trial.py`), and checked in the first step with weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from quire.errors import CheckpointError, ConfigError, UnsupportedModelError
from quire.kernels.kv import LayerKV
from quire.layers.attention.base import AttentionInputs, KVSpec
from quire.layers.attention.layer import Attention
from quire.layers.build_context import BuildContext
from quire.layers.caches import AttentionCache, LayerCache
from quire.layers.linear import Heads
from quire.loading.model_config import ModelConfig
from quire.models.transformers_backend.attention import PAGED, TRIAL, LocalCheck, PagedLayer, Step
from quire.models.transformers_backend.layers import (
    Experts,
    GatedMLP,
    GateUp,
    Head,
    JoinedLinear,
    JoinedPart,
    Matrix,
    Norm,
    OwnWeights,
    TokenEmbedding,
    gate_of,
    make_matrix_layer,
    rms_norm_eps,
)
from quire.models.transformers_backend.names import CheckpointNames
from quire.models.transformers_backend.parallel import Cut, ParallelPlan
from quire.models.transformers_backend.rotation import Deferral, deferred_forward
from quire.models.transformers_backend.trial import LayerCall, Trial, run_trial

logger = logging.getLogger(__name__)

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_POSITION_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Kinds of rotation whose frequencies depend on the longest row of a step, so that rows would change each other."""


class TransformersForCausalLM(nn.Module):
    """A causal language model of the transformers library."""

    supports_last_tokens = False
    graph_safe: bool
    """Whether its steps can be captured."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        architecture = build.config.architecture
        if build.ranks.pp_size > 1:
            raise ConfigError(
                f"{architecture} runs through transformers, which has no pipeline stages here: set "
                "pipeline_parallel_size to 1",
                "pipeline_parallel_size",
                build.ranks.pp_size,
            )
        if build.experts is not None:
            raise ConfigError(
                f"{architecture} runs through transformers, where experts cannot be placed on ranks: leave "
                "enable_expert_parallel out",
                "enable_expert_parallel",
                True,
            )
        self._step = Step()
        self._deferral = Deferral(self._step)
        try:
            library, base, whole = self._make(build, joins=True)
        except UnsupportedModelError as error:
            # Results of a joined product are views that some models cannot reshape.
            logger.debug("matrices are not joined: %s", error)
            library, base, whole = self._make(build, joins=False)
        build = self.build
        self._heads = [_heads(build, whole[i], self.calls[i]) for i in range(len(self.calls))]
        for index, own in enumerate(self._heads):
            call = self.calls[index]
            asked = call.arguments
            attention = Attention(build, own, index, None, scale=asked.scale, soft_cap=asked.softcap)
            call.module.add_module("paged", attention)
            call.module.quire = PagedLayer(attention, asked, index, self._step)  # type: ignore[assignment]
        self._set_attention(library, PAGED)
        # Names of tensors begin with the library's names of its parts; its own class only computes logits.
        for name, part in library.named_children():
            self.add_module(name, part)
        self._base = (base,)
        self._states = _GivenStates()
        library._modules[library.base_model_prefix] = self._states
        self._library = (library,)
        self._ignored = [re.compile(each) for each in library._keys_to_ignore_on_load_unexpected or ()]
        self.own = self._take_weights(library)
        self._give_sinks()
        self._is_checked = build.device.type == "meta"
        self._check_head()

    def _make(self, build: BuildContext, joins: bool) -> tuple[Any, nn.Module, Mapping[int, LayerCall]]:
        """(the library's model with the engine's layers, its base model, how its layers call attention if not split).
        `joins`: matrices that read the same input become one."""
        library = _make_model(build)
        architecture = build.config.architecture
        base = getattr(library, library.base_model_prefix, None)
        if not isinstance(base, nn.Module):
            raise UnsupportedModelError(f"{architecture} cannot run through transformers: it has no base model")
        trial = run_trial(library, base, lambda module: type(module) in (nn.Linear, Conv1D))
        _check_layers(library, trial)
        self.graph_safe = not trial.copies
        if trial.copies:
            logger.warning("%s copies from the host in its steps: they run without CUDA graphs", architecture)
        self.build = dataclasses.replace(build, config=_seen_config(build.config, library, trial))
        self._replace_layers(library, base, trial, joins)
        self.calls = run_trial(library, base, lambda module: False).calls
        return library, base, trial.calls

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[LayerKV],
        inputs: AttentionInputs,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not self._is_checked:
            self._check_first(tokens)
        step = self._step
        step.positions, step.kv, step.inputs = positions, kv, inputs
        hidden = self._run(tokens, positions)
        self._deferral.forget()
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size] -> [S, vocab_size]."""
        self._states.hidden = hidden.unsqueeze(0)
        logits: torch.Tensor = self._library[0](input_ids=None, use_cache=False).logits[0]
        self._states.hidden = None
        return logits

    def ignores(self, name: str) -> bool:
        """A tied head's copy, frequencies that old checkpoints carry, and what the library ignores too."""
        return (
            name.endswith("rotary_emb.inv_freq")
            or name in self._tied
            or any(pattern.search(name) for pattern in self._ignored)
        )

    @property
    def kv_shape(self) -> KVSpec:
        """The cache this rank needs, if all layers have the same heads."""
        first = self._heads[0]
        return KVSpec(len(self._heads), len(first.kv), first.dim)

    @property
    def caches(self) -> list[LayerCache]:
        """What each layer keeps."""
        format, windows = self.build.kv_format, self.build.config.windows
        return [
            AttentionCache(len(heads.kv), heads.dim, format, window)
            for heads, window in zip(self._heads, windows, strict=True)
        ]

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = self._base[0](input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
        return output.last_hidden_state[0]

    def _replace_layers(self, library: Any, base: nn.Module, trial: Trial, joins: bool) -> None:
        """Put the engine's layers in the places of the library's."""
        build = self.build
        plan = _parallel_plan(build, library)
        names = CheckpointNames(library)
        modules = dict(library.named_modules())
        paths = {id(module): path for path, module in modules.items()}
        for path in trial.experts:
            _put(library, path, _experts(build, path, modules[path], names, plan))
        mixtures = {path.rpartition(".")[0]: modules[path].num_experts for path in trial.experts}
        matrices: dict[str, Matrix] = {}
        head = library.get_output_embeddings()
        for path, module in modules.items():
            owner, _, name = path.rpartition(".")
            if module is head or type(module) not in (nn.Linear, Conv1D):
                continue
            transposed = type(module) is Conv1D
            outputs, inputs = reversed(module.weight.shape) if transposed else module.weight.shape
            if any(path.startswith(f"{mixture}.") and outputs == count for mixture, count in mixtures.items()):
                continue  # a router is small, and never in few bits
            stored = names.stored(f"{path}.weight").removesuffix(".weight")
            cut = plan.cut(path)
            has_bias = module.bias is not None
            matrices[path] = Matrix(name, inputs, outputs, has_bias, transposed, cut, "" if stored == path else stored)
        groups = _groups(trial.siblings, matrices) if joins else [[path] for path in matrices]
        owned: dict[str, list[str]] = {}
        for path in matrices:
            owned.setdefault(path.rpartition(".")[0], []).append(path)
        for owner, own in owned.items():
            self._replace_mlp(library, owner, modules[owner], own, groups, matrices)
        for group in groups:
            owner = group[0].rpartition(".")[0]
            if len(group) == 1:
                _put(library, group[0], make_matrix_layer(build, matrices[group[0]]))
                continue
            joined = JoinedLinear(build, [matrices[path] for path in group])
            modules[owner].add_module("_".join(matrices[path].name for path in group), joined)
            for index, path in enumerate(group):
                _put(library, path, JoinedPart(joined, index))
        for path, module in modules.items():
            name = path.rpartition(".")[2]
            eps = rms_norm_eps(module)
            if eps is not None and names.stored(f"{path}.weight") == f"{path}.weight":
                _put(library, path, Norm(build, name, module.weight.shape[0], eps))
        self._tied: set[str] = set()
        self._replace_ends(library, base, names, paths)
        self._names, self._plan = names, plan

    def _replace_mlp(
        self,
        library: Any,
        owner: str,
        module: nn.Module,
        own: list[str],
        groups: list[list[str]],
        matrices: dict[str, Matrix],
    ) -> None:
        """If a module with the matrices `own` is a gated MLP, put the engine's in its place; its groups are removed."""
        inner = next((group for group in groups if group[0] in own and len(group) == len(own) - 1), None)
        if inner is None or len(own) not in (2, 3):
            return
        (outer,) = set(own) - {*inner}
        first, down = [matrices[path] for path in inner], matrices[outer]
        halves = sum(matrix.outputs for matrix in first) == 2 * down.inputs and first[0].inputs == down.outputs
        if not halves or len({matrix.outputs for matrix in first}) > 1:
            return
        if not all(matrix.is_plain for matrix in (*first, down)):
            return
        # One matrix that is cut must be cut in both halves, two matrices each.
        if first[0].cut not in (Cut.WHOLE, Cut.PACKED_OUTPUTS if len(first) == 1 else Cut.OUTPUTS):
            return
        for order in (first, first[::-1])[: len(first)]:
            kind = gate_of(module, [matrix.name for matrix in order], down.name)
            if kind is not None:
                layer = GatedMLP(GateUp(self.build, order, kind), make_matrix_layer(self.build, down), down.name)
                _put(library, owner, layer)
                groups.remove(inner)
                groups.remove([outer])
                return

    def _replace_ends(self, library: Any, base: Any, names: CheckpointNames, paths: dict[int, str]) -> None:
        """Embedding and head."""
        build = self.build
        config = build.config
        embedding, head = base.get_input_embeddings(), library.get_output_embeddings()
        own_embedding = None
        if type(embedding) is nn.Embedding and embedding.weight.shape == (config.vocab_size, config.hidden_size):
            path = paths[id(embedding)]
            if names.stored(f"{path}.weight") == f"{path}.weight":
                own_embedding = TokenEmbedding(build, path.rpartition(".")[2])
                _put(library, path, own_embedding)
        is_plain = type(head) is nn.Linear and head.weight.shape == (config.vocab_size, config.hidden_size)
        if head is None or not is_plain or head.bias is not None:
            if head is not None and head.weight is embedding.weight:
                raise UnsupportedModelError(
                    f"{config.architecture}: a head of this kind with tied weights is not implemented"
                )
            return  # the library's own
        path = paths[id(head)]
        name = path.rpartition(".")[2]
        tied: Any = None
        if head.weight is embedding.weight:
            self._tied.add(f"{path}.weight")
            tied = embedding if own_embedding is None else own_embedding
            if own_embedding is None and build.ranks.tp_size > 1:
                # The library's embedding is whole on every rank, and the head is split: it has a copy.
                tied, name = None, paths[id(embedding)]
        _put(library, path, Head(build, name, tied))

    def _take_weights(self, library: Any) -> OwnWeights:
        """Give memory to the parameters and buffers of layers that stayed, and values to those no checkpoint has."""
        build = self.build
        tensors: dict[str, torch.Tensor] = {}
        made: dict[int, nn.Parameter] = {}
        for path, module in list(self.named_modules()):
            for name, parameter in list(module._parameters.items()):
                if parameter is None or not parameter.is_meta or type(module).__module__.startswith("quire."):
                    continue
                full = f"{path}.{name}" if path else name
                is_sinks = any(call.module is module and call.sinks == name for call in self.calls.values())
                cuts = {self._plan.cut(full), self._plan.cut(path)}
                if cuts != {Cut.WHOLE} and not is_sinks:  # of sinks each rank takes its own
                    raise UnsupportedModelError(
                        f"{build.config.architecture}: ranks that share {full} are not implemented: set "
                        "tensor_parallel_size to 1"
                    )
                if id(parameter) in made:
                    self._tied.add(full)
                else:
                    memory = build.memory.zeros(tuple(parameter.shape), self._dtype_of(library, full, parameter.dtype))
                    made[id(parameter)] = nn.Parameter(memory, requires_grad=False)
                    tensors[full] = memory
                module._parameters[name] = made[id(parameter)]
            self._take_buffers(library, path, module, tensors)
        stored = {name: other for name in tensors if (other := self._names.stored(name)) != name}
        return OwnWeights(tensors, stored)

    def _give_sinks(self) -> None:
        """Attention gets the logits of the rank's own heads."""
        for index, heads in enumerate(self._heads):
            call = self.calls[index]
            if call.sinks is not None:
                sinks: Any = call.module._parameters[call.sinks]
                attention: Any = call.module.paged
                own = sinks[heads.query.start : heads.query.stop]
                attention.spec = dataclasses.replace(attention.spec, sinks=own)

    def _take_buffers(self, library: Any, path: str, module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        """Buffers that checkpoints have are loaded; the library computes the others."""
        computed: dict[str, torch.Tensor] = {}
        for name, buffer in list(module._buffers.items()):
            if buffer is None or not buffer.is_meta:
                continue
            unset: Any = float("nan") if buffer.is_floating_point() else -1
            memory = torch.full_like(buffer, unset, device=self.build.device)
            module._buffers[name] = memory
            full = f"{path}.{name}" if path else name
            if name in module._non_persistent_buffers_set:
                computed[full] = memory
            else:
                tensors[full] = memory
        if computed and self.build.device.type != "meta":
            library._init_weights(module)
            for full, memory in computed.items():
                if bool((memory.isnan() if memory.is_floating_point() else memory == -1).any()):
                    raise UnsupportedModelError(
                        f"{self.build.config.architecture}: the library does not say how to compute the buffer {full}"
                    )

    def _dtype_of(self, library: Any, name: str, own: torch.dtype) -> torch.dtype:
        """The dtype of a parameter: some stay in float32."""
        if not own.is_floating_point:
            return own
        always = library._keep_in_fp32_modules_strict or ()
        in_half = (library._keep_in_fp32_modules or ()) if self.build.dtype is torch.float16 else ()
        kept = any(re.search(rf"((^|\.){re.escape(part)}($|\.))", name) for part in {*always, *in_half})
        return torch.float32 if kept else self.build.dtype

    @staticmethod
    def _set_attention(library: Any, name: str) -> None:
        for module in library.modules():
            config = getattr(module, "config", None)
            if isinstance(config, PretrainedConfig):
                config._attn_implementation = name

    def _check_head(self) -> None:
        """The library must compute logits from hidden states alone."""
        config = self.build.config
        hidden = torch.empty(3, config.hidden_size, device="meta", dtype=self.build.dtype)
        heads = [(m, m._parameters, m._buffers) for m in self._library[0].modules() if m is not self._states]
        with torch.no_grad(), _on_meta(heads):
            try:
                logits = self.logits(hidden)
            except Exception as error:
                raise UnsupportedModelError(
                    f"{config.architecture} cannot run through transformers here: its head needs more than hidden "
                    f"states ({type(error).__name__}: {error})"
                ) from error
        if tuple(logits.shape) != (3, config.vocab_size):
            raise UnsupportedModelError(
                f"{config.architecture}: the head gives {tuple(logits.shape)}, not a logit for each of the "
                f"{config.vocab_size} tokens of the vocabulary"
            )

    @torch.inference_mode()
    def _check_first(self, like: torch.Tensor) -> None:
        """With weights, and with attention in which each token sees only itself: tokens must meet in attention only and
        be placed by their positions only, so that a token's result depends neither on the others nor on its place in
        the step. And rotations are left to attention where that is the same."""
        self._is_checked = True
        a, b, c, d = (number % self.build.config.vocab_size for number in (3, 7, 11, 19))
        last = self.build.max_model_len - 1
        x, y, z = (min(position, last) for position in (2, 9, 5))

        def run(tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
            return self._run(like.new_tensor(tokens), like.new_tensor(positions)).float()

        try:
            self._step.check = LocalCheck()
            first = run((a, b, c, d), (x, y, z, last))
            self._defer_rotations(lambda: run((a, b, c, d), (x, y, z, last)))
            self._step.check = LocalCheck()
            second = run((c, d, a, b), (z, y, x, last))
        finally:
            self._step.check = None
        difference = float((first[[0, 2]] - second[[2, 0]]).norm() / first[[0, 2]].norm())
        if not difference < 0.05:
            raise UnsupportedModelError(
                f"{self.build.config.architecture} cannot run through transformers here: its tokens depend on each "
                f"other outside of attention, or on more than their positions (results differ by {difference:.0%})"
            )

    def _defer_rotations(self, run: Callable[[], object]) -> None:
        """Let attention rotate queries and keys, unless `run` then gives it others than before."""
        check = self._step.check
        assert check is not None
        check.compares = True
        modules = [call.module for call in self.calls.values()]
        forwards = [deferred_forward(module, self._deferral) for module in modules]
        if not any(forwards):
            return
        for module, forward in zip(modules, forwards, strict=True):
            if forward is not None:
                module.forward = forward
        try:
            run()
            is_same = check.error < (1e-3 if self.build.dtype is torch.float32 else 0.02)
        except Exception as error:
            logger.debug("rotations are not deferred: %s", error)
            is_same = False
        if not is_same:
            logger.debug("rotations are not deferred: queries and keys differ by %.2g", check.error)
            for module in modules:
                module.__dict__.pop("forward", None)
            self._step.rotation = None
        self._deferral.forget()


class _GivenStates(nn.Module):
    """Stands for the base model where only the head is to be computed."""

    hidden: Any = None

    @property
    def decoder(self) -> nn.Module:
        """Some heads call this part of the base model (OPT)."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPast:
        return _OnlyStates(last_hidden_state=self.hidden)


class _OnlyStates(BaseModelOutputWithPast):
    """Hidden states; whatever else a base model may return is None."""

    def __getattr__(self, name: str) -> None:
        return None


@contextlib.contextmanager
def _on_meta(modules: Sequence[tuple[nn.Module, Any, Any]]) -> Iterator[None]:
    """With the tensors of these modules on the meta device."""
    for module, parameters, buffers in modules:
        module._parameters = {
            k: None if v is None else nn.Parameter(v.to("meta"), False) for k, v in parameters.items()
        }
        module._buffers = {k: None if v is None else v.to("meta") for k, v in buffers.items()}
    try:
        yield
    finally:
        for module, parameters, buffers in modules:
            module._parameters, module._buffers = parameters, buffers


def _library_config(raw: Mapping[str, Any], architecture: str) -> PretrainedConfig:
    """The library's config object for a config.json. Raises if the library has no such causal language model."""
    family = str(raw.get("model_type"))
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family)
    if family not in CONFIG_MAPPING or architecture not in (known if isinstance(known, (tuple, list)) else (known,)):
        code = "; code that comes with a checkpoint is not run" if raw.get("auto_map") else ""
        raise UnsupportedModelError(
            f"{architecture} with model_type {family!r} is not a causal language model of the installed transformers "
            f"library{code}"
        )
    fields = {key: value for key, value in raw.items() if key not in ("quantization_config", "dtype", "torch_dtype")}
    try:
        return CONFIG_MAPPING[family].from_dict(fields)
    except Exception as error:
        raise CheckpointError(f"the config of {architecture} is refused by transformers: {error}") from error


def _make_model(build: BuildContext) -> Any:
    """The library's model on the meta device. Raises for kinds that are not implemented."""
    architecture = build.config.architecture
    config = _library_config(build.config.raw, architecture)
    kind = getattr(transformers, architecture)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{architecture} is an encoder-decoder, which is not implemented")
    if config.get_text_config() is not config:
        raise UnsupportedModelError(
            f"{architecture} takes more than text (its config has parts), which is not implemented through transformers"
        )
    if kind._is_stateful:
        raise UnsupportedModelError(
            f"{architecture} keeps recurrent states, which are not implemented through transformers"
        )
    if others := sorted({*(getattr(config, "layer_types", None) or ())} - _LAYER_TYPES):
        raise UnsupportedModelError(
            f"{architecture} has layers of the types {', '.join(others)}, which are not implemented through "
            "transformers"
        )
    _check_rope(config, architecture)
    try:
        with torch.device("meta"):
            model = kind._from_config(
                config, dtype=build.dtype, attn_implementation=TRIAL, experts_implementation=TRIAL
            )
    except Exception as error:
        raise UnsupportedModelError(
            f"{architecture} cannot run through transformers here: the library cannot build it with another attention "
            f"({type(error).__name__}: {error})"
        ) from error
    return model.eval().requires_grad_(False)


def _check_rope(config: Any, architecture: str) -> None:
    """Frequencies that depend on the step's longest row are refused by name."""
    given = getattr(config, "rope_parameters", None) or {}
    for each in (given, *(value for value in given.values() if isinstance(value, dict))):
        if each.get("rope_type") in _POSITION_DEPENDENT_ROPE:
            raise UnsupportedModelError(
                f"{architecture} with rope_type {each['rope_type']!r} is not implemented through transformers"
            )


def _check_layers(library: Any, trial: Trial) -> None:
    """Every layer must call attention once."""
    total = library.config.num_hidden_layers
    if sorted(trial.calls) != list(range(total)):
        raise UnsupportedModelError(
            f"{type(library).__name__} cannot run through transformers here: {len(trial.calls)} of its {total} layers "
            "call attention through the library's interface"
        )


def _seen_config(config: ModelConfig, library: Any, trial: Trial) -> ModelConfig:
    """The model's config with what was seen in place of what was read."""
    first = trial.calls[0]
    tied = library.get_output_embeddings()
    shares = tied is not None and tied.weight is library.get_input_embeddings().weight
    return dataclasses.replace(
        config,
        num_layers=len(trial.calls),
        num_heads=first.heads,
        num_kv_heads=first.kv_heads,
        head_dim=first.head_dim,
        hidden_size=library.config.hidden_size,
        vocab_size=library.config.vocab_size,
        tie_embeddings=shares,
        windows=tuple(trial.calls[i].arguments.window for i in sorted(trial.calls)),
    )


def _parallel_plan(build: BuildContext, library: Any) -> ParallelPlan:
    """The library's plan; empty with one rank. Raises if it has none and there are several."""
    architecture, size = build.config.architecture, build.ranks.tp_size
    if size == 1:
        return ParallelPlan(architecture, {})
    if not getattr(library.config, "base_model_tp_plan", None):
        raise ConfigError(
            f"{architecture} runs through transformers, which has no plan to share it between ranks: set "
            "tensor_parallel_size to 1",
            "tensor_parallel_size",
            size,
        )
    return ParallelPlan(architecture, library.tp_plan)


def _heads(build: BuildContext, whole: LayerCall, own: LayerCall) -> Heads:
    """This rank's heads of a layer, from what the whole layer and the rank's part have."""
    if (own.heads, own.kv_heads) == (whole.heads, whole.kv_heads):
        return Heads(range(own.heads), range(own.kv_heads), own.head_dim)
    query, kv = (build.ranks.slice(n, what) for n, what in ((whole.heads, "heads"), (whole.kv_heads, "KV heads")))
    heads = Heads(range(query.start, query.stop), range(kv.start, kv.stop), own.head_dim)
    if (len(heads.query), len(heads.kv)) != (own.heads, own.kv_heads):
        raise UnsupportedModelError(
            f"{build.config.architecture}: a rank has {own.heads} of {whole.heads} heads and {own.kv_heads} of "
            f"{whole.kv_heads} KV heads, which is not implemented"
        )
    return heads


def _experts(build: BuildContext, path: str, module: Any, names: CheckpointNames, plan: ParallelPlan) -> Experts:
    """The engine's experts for the library's. Raises for kinds that its kernels do not compute."""
    refused = [
        word
        for word, is_so in {
            "without a gate": not module.has_gate,
            "with biases": module.has_bias,
            "with transposed weights": module.is_transposed,
            "with interleaved gates": not getattr(module, "is_concatenated", True),
            "with a norm after each": getattr(module, "has_post_expert_norm", False),
        }.items()
        if is_so
    ]
    if not refused and not _is_silu_gate(module):
        refused = ["with another activation than silu"]
    if not refused and (extra := {name for name, _ in module.named_parameters()} - {"gate_up_proj", "down_proj"}):
        refused = [f"with {', '.join(sorted(extra))}"]
    if refused:
        raise UnsupportedModelError(
            f"{build.config.architecture}: experts {refused[0]} are not implemented through transformers"
        )
    count, hidden, width = module.down_proj.shape
    cuts = {plan.cut(f"{path}.gate_up_proj"), plan.cut(f"{path}.down_proj")}
    if cuts not in ({Cut.WHOLE}, {Cut.PACKED_OUTPUTS, Cut.INPUTS}):
        raise UnsupportedModelError(f"{build.config.architecture}: ranks cannot share {path} as its plan says")
    return Experts(build, path.rpartition(".")[2], count, hidden, width, names.experts(path), cuts != {Cut.WHOLE})


def _is_silu_gate(module: Any) -> bool:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    gate, up = x.chunk(2, dim=-1)
    try:
        return torch.allclose(module._apply_gate(x), F.silu(gate) * up, atol=1e-5)
    except Exception:
        return False


def _groups(siblings: Sequence[Sequence[str]], matrices: dict[str, Matrix]) -> list[list[str]]:
    """The matrices, those together that read one input in one module and are cut alike."""
    groups: list[list[str]] = []
    seen: set[str] = set()
    for group in siblings:
        run: list[str] = []
        for path in group:
            if path not in matrices or path in seen:
                run = []
                continue
            seen.add(path)
            previous = run[-1] if run else None
            joins = (
                previous is not None
                and previous.rpartition(".")[0] == path.rpartition(".")[0]
                and matrices[previous].fuses_with == matrices[path].fuses_with
                and matrices[path].cut is not Cut.INPUTS
            )
            if joins:
                run.append(path)
            else:
                groups.append(run := [path])
    return groups + [[path] for path in matrices if path not in seen]


def _put(root: nn.Module, path: str, module: nn.Module) -> None:
    owner, _, name = path.rpartition(".")
    root.get_submodule(owner)._modules[name] = module
