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
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.pytorch_utils import Conv1D

from quire.errors import ConfigError, UnsupportedModelError
from quire.kernels.kv import LayerKV
from quire.layers.attention.base import AttentionInputs, KVSpec
from quire.layers.attention.layer import Attention
from quire.layers.build_context import BuildContext
from quire.layers.caches import AttentionCache, LayerCache
from quire.layers.linear import Heads
from quire.models.transformers_backend.attention import PAGED, AttentionStep, LocalCheck, PagedLayer
from quire.models.transformers_backend.layers import OwnWeights
from quire.models.transformers_backend.library import check_layers, make_model, seen_config
from quire.models.transformers_backend.parallel import Cut
from quire.models.transformers_backend.replacement import Replacement
from quire.models.transformers_backend.rotation import Deferral, deferred_forward
from quire.models.transformers_backend.trial import LayerCall, run_trial

logger = logging.getLogger(__name__)


class TransformersForCausalLM(nn.Module):
    """A causal language model of the transformers library."""

    supports_last_tokens = False
    supports_features = False
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
        self._step = AttentionStep()
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
        library = make_model(build)
        architecture = build.config.architecture
        base = getattr(library, library.base_model_prefix, None)
        if not isinstance(base, nn.Module):
            raise UnsupportedModelError(f"{architecture} cannot run through transformers: it has no base model")
        trial = run_trial(library, base, lambda module: type(module) in (nn.Linear, Conv1D))
        check_layers(library, trial)
        self.graph_safe = not trial.copies
        if trial.copies:
            logger.warning("%s copies from the host in its steps: they run without CUDA graphs", architecture)
        self.build = dataclasses.replace(build, config=seen_config(build.config, library, trial))
        self._replacement = Replacement(self.build, library)
        self._replacement.run(library, base, trial, joins)
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
            or name in self._replacement.tied
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
                cuts = {self._replacement.plan.cut(full), self._replacement.plan.cut(path)}
                if cuts != {Cut.WHOLE} and not is_sinks:  # of sinks each rank takes its own
                    raise UnsupportedModelError(
                        f"{build.config.architecture}: ranks that share {full} are not implemented: set "
                        "tensor_parallel_size to 1"
                    )
                if id(parameter) in made:
                    self._replacement.tied.add(full)
                else:
                    memory = build.memory.zeros(tuple(parameter.shape), self._dtype_of(library, full, parameter.dtype))
                    made[id(parameter)] = nn.Parameter(memory, requires_grad=False)
                    tensors[full] = memory
                module._parameters[name] = made[id(parameter)]
            self._take_buffers(library, path, module, tensors)
        stored = {name: other for name in tensors if (other := self._replacement.names.stored(name)) != name}
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
            try:
                library._init_weights(module)
            except Exception as error:
                raise UnsupportedModelError(
                    f"{self.build.config.architecture} cannot run through transformers here: the library cannot "
                    f"compute the buffer {next(iter(computed))} ({type(error).__name__}: {error})"
                ) from error
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
