"""How a router's logits become a choice of experts and their weights, beyond a softmax and its largest."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class RouteRule:
    """What `Ops.route` does differently from choosing the largest logits and weighting by their softmax."""

    sigmoid: bool = False
    """An expert's score is the sigmoid of its logit; if not, the softmax over all experts."""
    groups: int = 1
    """Experts are in this many groups of adjacent ones; a token is routed within the best `top_groups` of them."""
    top_groups: int = 1
    group_top: int = 1
    """A group is as good as the sum of this many of its best experts: 1 or 2."""
    scale: float = 1.0
    """Factor on the weights of the chosen experts."""
    shared: int = 0
    """Experts after the routed ones that every token also goes through, with weight 1."""
    gated: bool = False
    """The weight of a shared expert is the sigmoid of a logit of its own; these follow the routed experts' logits."""
    bias: torch.Tensor | None = field(default=None, compare=False)
    """[experts] float32: added to the scores for the choice, not for the weights."""

    @property
    def gates(self) -> int:
        """Logits of a token that are not of routed experts."""
        return self.shared if self.gated else 0


def route_by_rule(
    logits: torch.Tensor, top_k: int, renormalise: bool, rule: RouteRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights [tokens, top_k] float32, experts [tokens, top_k] int64), without the shared experts."""
    wide = logits.float()
    scores = wide.sigmoid() if rule.sigmoid else wide.softmax(dim=-1)
    # The order of softmax scores is that of the logits, which are not rounded to zero.
    choice = scores if rule.bias is None else scores + rule.bias
    choice = wide if rule.bias is None and not rule.sigmoid and rule.group_top == 1 else choice
    if rule.groups > 1:
        grouped = choice.unflatten(1, (rule.groups, -1))
        quality = grouped.topk(rule.group_top, dim=-1).values.sum(dim=-1)
        best = quality.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_groups]
        kept = torch.zeros_like(quality, dtype=torch.bool).scatter_(1, best, True)
        choice = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)
    chosen = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, chosen)
    if renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * rule.scale, chosen


def add_shared(
    weights: torch.Tensor, experts: torch.Tensor, rule: RouteRule, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with the shared experts, numbered after the routed ones, last."""
    if not rule.shared:
        return weights, experts
    routed = logits.shape[1] - rule.gates
    gates = logits[:, routed:].float().sigmoid() if rule.gated else weights.new_ones(len(weights), rule.shared)
    numbers = torch.arange(routed, routed + rule.shared, dtype=experts.dtype, device=experts.device)
    shared = torch.where(experts[:, :1] < 0, -1, numbers)  # padding goes through none
    return (
        torch.cat((weights, gates), dim=1),
        torch.cat((experts, shared), dim=1),
    )
