"""Examines a checkpoint by its headers alone: how each layer is stored, what does not fit, and which kernels will run.

It builds the model without memory and compares it with the checkpoint by the functions that loading uses: what is
refused here is refused there, in the same words.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from quire.config import EngineConfig
from quire.distributed.groups import Ranks
from quire.kernels.weights.base import QuantizedWeight, SplitWeight
from quire.layers.build_context import collect_targets, quantized_weights
from quire.loading.files import ModelFiles
from quire.loading.load import Misfits, compare, open_checkpoint
from quire.loading.model_config import ModelConfig
from quire.loading.weights import AnyTarget, Assembly, AssemblyPart, Target, match_layouts
from quire.models.base import CausalLM
from quire.platforms.base import Platform
from quire.worker.building import build_model, ignored_tensors

_LAYER = re.compile(r"^(?P<before>.*?)\.(?P<number>\d+)\.(?P<inner>.+)$")
_OWNERS = re.compile(r"^(self_attn|mlp|block_sparse_moe|attn|attention)\.")


@dataclass
class FormatUse:
    """Everything that a model holds in one format."""

    format: str
    layout: str
    """What it is re-laid into; empty: a plain tensor."""
    kernels: str
    matrices: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class LayerFormat:
    """Modules that have one format in these layers; in none: modules outside any layer."""

    layers: tuple[int, ...]
    modules: tuple[str, ...]
    format: str

    def __str__(self) -> str:
        where = ""
        if self.layers:
            where = f"layer{'s' if len(self.layers) > 1 else ''} {_ranges(self.layers)}: "
        return f"{where}{_joined(self.modules)}: {self.format}"


@dataclass
class Examination:
    """What the headers of a checkpoint say."""

    scheme: str | None
    """How it is quantized; None: it is not."""
    layers: list[LayerFormat]
    formats: list[FormatUse]
    disagreements: list[str] = field(default_factory=list)
    """Where the description and the tensors disagree, and the tensors are believed."""
    misfits: Misfits = field(default_factory=Misfits)
    """Why loading would be refused."""

    @property
    def nbytes(self) -> int:
        return sum(use.nbytes for use in self.formats)


def examine(
    config: EngineConfig, files: ModelFiles, model: ModelConfig, platform: Platform, max_model_len: int
) -> Examination:
    """Examine the first rank's part of a checkpoint (with several pipeline stages, of all of them together)."""
    ranks = Ranks(0, config.tensor_parallel_size)
    built = build_model(config, files, model, platform, max_model_len, ranks, torch.device("meta"))
    targets: Mapping[str, Sequence[AnyTarget]] = collect_targets(built)  # type: ignore[arg-type]
    misfits = Misfits()
    if config.load_format != "dummy" and files.kind is not None:
        checkpoint = open_checkpoint(files, config.load_format)
        misfits = compare(targets, ignored_tensors(built), checkpoint)[1]
        targets = match_layouts(targets, {weight.name for weight in checkpoint})
    scheme = built.build.scheme
    return Examination(
        scheme=None if scheme is None else scheme.name,
        layers=_layer_formats(targets),
        formats=_format_uses(targets, built, platform),
        disagreements=[] if scheme is None else list(scheme.disagreements),
        misfits=misfits,
    )


def _format_name(target: AnyTarget) -> str:
    assembly = _assembly(target)
    if assembly is not None:
        return assembly.format
    assert isinstance(target, Target)
    return str(target.into.dtype).removeprefix("torch.")


def _assembly(target: AnyTarget) -> Assembly | None:
    return target.assembly if isinstance(target, AssemblyPart) else target.part_of


def _format_uses(targets: Mapping[str, Sequence[AnyTarget]], model: CausalLM, platform: Platform) -> list[FormatUse]:
    kernels = _kernels(model, platform)
    uses: dict[tuple[str, str], FormatUse] = {}
    counted = set()
    for target in itertools.chain.from_iterable(targets.values()):
        assembly = _assembly(target)
        layout = "" if assembly is None else assembly.layout
        key = (_format_name(target), layout)
        use = uses.setdefault(key, FormatUse(*key, kernels.get(layout, kernels[""])))
        if not isinstance(target, AssemblyPart):
            use.nbytes += target.into.nbytes
            use.matrices += assembly is None and len(target.shape) > 1
        elif target.assembly not in counted:
            counted.add(target.assembly)
            use.nbytes += target.assembly.nbytes
            use.matrices += 1
    return sorted(uses.values(), key=lambda use: -use.nbytes)


def _kernels(model: CausalLM, platform: Platform) -> dict[str, str]:
    """What multiplies with each layout, in words; "": with plain tensors."""
    layouts = {type(weight).__name__: weight for weight in _apart(quantized_weights(model))}  # type: ignore[arg-type]
    if not platform.ops.endswith("TritonOps"):
        device = "a CPU" if platform.device.type == "cpu" else "this device"
        return {"": f"products of {device}", **dict.fromkeys(layouts, f"plain torch on {device}")}
    from quire.kernels.triton.quantized.registry import products_of

    return {"": "cuBLAS and quire's GEMMs"} | {
        name: (products_of(weight).__doc__ or products_of(weight).__name__).splitlines()[0].rstrip(".")
        for name, weight in layouts.items()
    }


def _apart(weights: Iterable[QuantizedWeight]) -> Iterable[QuantizedWeight]:
    """Weights, with the parts of those that are made of several in their place."""
    for weight in weights:
        parts = weight.parts if isinstance(weight, SplitWeight) else [weight]
        yield from (part for part in parts if isinstance(part, QuantizedWeight))


def _layer_formats(targets: Mapping[str, Sequence[AnyTarget]]) -> list[LayerFormat]:
    """The modules with a matrix, those of equal layers together."""
    layers: dict[int, dict[str, str]] = {}
    others: dict[str, str] = {}
    for name, wanted in targets.items():
        if not wanted or (len(wanted[0].shape) < 2 and not isinstance(wanted[0], AssemblyPart)):
            continue
        module = name.rpartition(".")[0] if name.endswith(".weight") or isinstance(wanted[0], AssemblyPart) else name
        found = _LAYER.match(module)
        if found is None:
            others[module] = _format_name(wanted[0])
            continue
        inner = _OWNERS.sub("", re.sub(r"\.\d+\.", ".", found["inner"]))
        known = layers.setdefault(int(found["number"]), {})
        # Experts of one layer have one format.
        known.setdefault(inner, _format_name(wanted[0]))
    found_formats = [LayerFormat((), (name,), each) for name, each in others.items()]
    alike: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for number in sorted(layers):
        alike.setdefault(tuple(layers[number].items()), []).append(number)
    for modules_formats, numbers in alike.items():
        for each, modules in _by_format(dict(modules_formats)).items():
            found_formats.append(LayerFormat(tuple(numbers), modules, each))
    return found_formats


def _ranges(numbers: Sequence[int]) -> str:
    """0-2, 4-6, 8 for [0, 1, 2, 4, 5, 6, 8]; of more than six ranges the first three and the last."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    named = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(named if len(named) <= 6 else [*named[:3], "…", named[-1]])


def _by_format(modules: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    grouped: dict[str, tuple[str, ...]] = {}
    for module, each in modules.items():
        grouped[each] = (*grouped.get(each, ()), module)
    return grouped


def _joined(modules: Sequence[str]) -> str:
    """q, k, v, o_proj for q_proj, k_proj, v_proj, o_proj."""
    if len(modules) > 1 and all(name.endswith("_proj") for name in modules):
        return ", ".join(name.removesuffix("_proj") for name in modules[:-1]) + f", {modules[-1]}"
    return ", ".join(modules)
