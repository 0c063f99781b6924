"""A run of a model on the meta device, which shows what it computes: no memory is needed, no values are.

It shows how each attention layer calls attention, which matrices read the same input, and which experts there are. A
model that has to read values on the host to decide what to compute fails here, so that every model that passes can
also be captured in a graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import AttentionMaskInterface

from quire.errors import QuireError, UnsupportedModelError
from quire.models.transformers_backend.attention import TRIAL, AttentionArguments

_TOKENS = 6
_QUERIES = (0, 1, 2, 3, 5, 17, 63, 127, 130, 511, 1023, 1031, 4095, 4099, 8191, 8209, 33331, 131071, 131101)
"""Positions whose masks are looked at: on both sides of usual windows and chunks."""


@dataclass(frozen=True)
class LayerCall:
    """How a layer calls attention."""

    module: nn.Module
    heads: int
    kv_heads: int
    head_dim: int
    arguments: AttentionArguments
    sinks: str | None
    """The name of the module's parameter with a logit for each head."""


@dataclass
class Trial:
    """What a run has shown."""

    calls: dict[int, LayerCall] = field(default_factory=dict)
    """By layer."""
    siblings: list[list[str]] = field(default_factory=list)
    """Matrices that read the same tensor, one after the other; by name."""
    experts: set[str] = field(default_factory=set)
    """Modules of experts that ran."""
    copies: bool = False
    """Whether tensors are copied from the host, which a captured graph cannot do."""
    _last: tuple[torch.Tensor, int] | None = None

    def saw_matrix(self, name: str, x: torch.Tensor) -> None:
        if self._last is not None and self._last[0] is x and self._last[1] == x._version:
            self.siblings[-1].append(name)
        else:
            self.siblings.append([name])
        self._last = (x, x._version)

    def saw_attention(self, module: nn.Module, call: LayerCall) -> None:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in self.calls:
            raise UnsupportedModelError(f"{type(module).__name__} calls attention twice, or does not know its layer")
        self.calls[layer] = call


_running: Trial | None = None


def run_trial(model: nn.Module, base: nn.Module, is_matrix: Callable[[nn.Module], bool]) -> Trial:
    """Run `base`, part of `model`, whose config names `TRIAL` as attention and experts."""
    global _running
    trial = Trial()

    def watch(name: str) -> Callable[..., None]:
        return lambda module, args, *_: trial.saw_matrix(name, args[0])

    hooks = [m.register_forward_pre_hook(watch(name)) for name, m in model.named_modules() if is_matrix(m)]
    names = {id(module): name for name, module in model.named_modules()}
    _running = trial
    try:
        with torch.no_grad(), _WatchCopies(trial):
            shape: Any = {"device": "meta", "dtype": torch.int64}
            base(
                input_ids=torch.zeros(1, _TOKENS, **shape),
                attention_mask=torch.ones(1, _TOKENS, **shape),
                position_ids=torch.zeros(1, _TOKENS, **shape),
                use_cache=False,
            )
    except QuireError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot run through transformers here: a run without values failed "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''})"
        ) from error
    finally:
        _running = None
        for hook in hooks:
            hook.remove()
    trial.experts = {names[key] for key in _seen_experts if key in names}
    _seen_experts.clear()
    return trial


_seen_experts: set[int] = set()


class _WatchCopies(TorchDispatchMode):
    """Notes copies from the host."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self._trial = trial

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[0] if function is torch.ops.aten._to_copy.default else args[1]
            self._trial.copies |= source.device.type == "cpu" and result.device.type == "meta"
        return result


class _Mask(torch.Tensor):
    """Stands for a mask that lets a query see itself and the `window` - 1 tokens before it."""

    window: int | None
    refused: str
    """Why the mask is not implemented. Raised when a layer uses it: models may make masks that no layer uses."""


def _trial_mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Called by the library's functions that make masks."""
    function = kwargs["mask_function"]
    mask = torch.empty(1, 1, kwargs["q_length"], kwargs["kv_length"], device="meta").as_subclass(_Mask)
    mask.window, mask.refused = None, ""
    try:
        mask.window = _window_of(function)
    except ValueError as error:
        mask.refused = str(error)
    return mask


def _window_of(visible: Callable[..., torch.Tensor]) -> int | None:
    """The window of a causal mask. Raises ValueError if it is something else."""
    counts: dict[int, int] = {}
    zero = torch.zeros((), dtype=torch.int64)
    for query in _QUERIES:
        keys = torch.arange(query + 3)
        seen = torch.broadcast_to(visible(zero, zero, torch.tensor(query), keys), keys.shape)
        count = int(seen.sum())
        if not count or not torch.equal(seen, (keys <= query) & (keys > query - count)):
            raise ValueError("a mask other than causal or sliding is not implemented")
        counts[query] = count
    window = max(counts.values())
    if any(count != min(query + 1, window) for query, count in counts.items()):
        raise ValueError("a mask in chunks is not implemented")
    return None if window == _QUERIES[-1] + 1 else window


def _trial_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    kind = type(module).__name__
    if not isinstance(attention_mask, _Mask) or not hasattr(attention_mask, "window"):
        what = "no mask" if attention_mask is None else "a mask of its own"
        raise UnsupportedModelError(f"{kind} calls attention with {what}: what a token sees cannot be told")
    if attention_mask.refused:
        raise UnsupportedModelError(f"{kind}: {attention_mask.refused}")
    _, heads, tokens, dim = query.shape
    if key.shape[-1] != dim or value.shape[-1] > dim:
        raise UnsupportedModelError(
            f"{kind} has queries of size {dim}, keys of {key.shape[-1]}, values of {value.shape[-1]}: values larger "
            "than keys are not implemented"
        )
    if key.shape[1] != value.shape[1] or heads % key.shape[1] or key.shape[2] != tokens:
        raise UnsupportedModelError(f"{kind} attends to keys {tuple(key.shape)} of other tokens or heads")
    asked = AttentionArguments.read(module, dim, arguments)
    window = attention_mask.window
    if asked.window not in (None, window):
        raise UnsupportedModelError(
            f"{kind} asks for sliding_window = {asked.window} and makes a mask with {window or 'no window'}"
        )
    sinks = next((name for name, each in module._parameters.items() if each is asked.sinks), None)
    if asked.sinks is not None and (sinks is None or asked.sinks.dim() != 1):
        raise UnsupportedModelError(f"{kind} calls attention with s_aux that is not a parameter of the layer")
    assert _running is not None
    asked = dataclasses.replace(asked, window=window)
    call = LayerCall(module, heads, key.shape[1], dim, asked, None if asked.sinks is None else sinks)
    _running.saw_attention(module, call)
    return query[..., : value.shape[-1]].transpose(1, 2).contiguous(), None


def _trial_experts(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    _seen_experts.add(id(module))
    return torch.empty_like(hidden_states)


AttentionInterface.register(TRIAL, _trial_attention)
AttentionMaskInterface.register(TRIAL, _trial_mask)
ALL_EXPERTS_FUNCTIONS.register(TRIAL, _trial_experts)
