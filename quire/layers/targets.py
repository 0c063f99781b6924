"""From a tree of layers to the checkpoint tensors that fill it."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from quire.loading.weights import Target


def collect_targets(model: nn.Module) -> dict[str, list[Target]]:
    """Every checkpoint tensor `model` needs, by its full Hugging Face name, with the places its parts go.

    A layer that holds weights names them relative to the module that owns it (`targets()`); here each is given the
    path of that owner.
    """
    collected: dict[str, list[Target]] = {}
    for path, module in model.named_modules():
        if not hasattr(module, "targets"):
            continue
        owner = path.rpartition(".")[0]
        for name, targets in module.targets().items():
            if owner:
                targets = [_owned(target, owner) for target in targets]
            collected.setdefault(f"{owner}.{name}" if owner else name, []).extend(targets)
    return collected


def _owned(target: Target, owner: str) -> Target:
    if not target.layouts:
        return target
    return replace(target, layouts=tuple(layout.under(owner) for layout in target.layouts))
