"""The cost model of a replica of several ranks, derived from that of one device. Modelled, not measured, and named so.

Tensor-parallel ranks divide weights, attention and arithmetic evenly; every layer adds two all-reduces over its hidden
states. Pipeline stages divide the layers: a step takes as long as before and a hop more for each stage, but the first
stage takes the next step as soon as it is done with its part. Memory that weights no longer take is KV blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from quire.errors import ValidationError
from quire.simulation.costs import CostModel
from quire.simulation.device import HostLink

ACTIVATION_BYTES = 2
"""Of one value of the hidden states that ranks exchange."""


@dataclass(frozen=True)
class RankConnection:
    """The connection between ranks."""

    latency: float = 8e-6
    """Seconds of an all-reduce, or a hop, of little data."""
    rate: float = 400e9
    """Bytes a second that a rank sends while it receives as many."""

    def all_reduce(self, ranks: int, num_bytes: float) -> float:
        """Seconds of an all-reduce over a ring."""
        return self.latency + 2 * (ranks - 1) / ranks * num_bytes / self.rate


def over_ranks(costs: CostModel, tensor: int, stages: int, link: RankConnection = RankConnection()) -> CostModel:
    """The cost model of a replica of `tensor` × `stages` such devices."""
    if tensor == stages == 1:
        return costs
    if costs.stages > 1:
        raise ValidationError(f"{costs.name} is a model of several ranks already")
    layers, width = _known(costs, "layers"), _known(costs, "hidden_size")
    weights, token_bytes = _known(costs, "weight_bytes"), _known(costs, "kv_bytes_per_token")
    if stages > layers:
        raise ValidationError(f"{layers} layers cannot fill {stages} pipeline stages")

    def seconds(tokens: int, alone: float) -> float:
        reduced = 2 * layers * link.all_reduce(tensor, tokens * width * ACTIVATION_BYTES) if tensor > 1 else 0.0
        return alone / tensor + reduced

    ranks = tensor * stages
    memory = costs.num_blocks * costs.block_size * token_bytes + weights
    blocks = int((ranks * memory - weights) // (costs.block_size * token_bytes))
    name = costs.name + (f"-tp{tensor}" if tensor > 1 else "") + (f"-pp{stages}" if stages > 1 else "")
    return msgspec.structs.replace(
        costs,
        name=f"{name} (modelled)",
        source=f"{costs.source}; {tensor} tensor-parallel ranks and {stages} pipeline stages are modelled: "
        f"{1e6 * link.latency:g} µs and {link.rate / 1e9:g} GB/s between ranks",
        tokens=[(tokens, seconds(tokens, alone)) for tokens, alone in costs.tokens],
        context_seconds=costs.context_seconds / tensor,
        pair_seconds=costs.pair_seconds / tensor,
        num_blocks=blocks,
        error=None,
        watts=None if costs.watts is None else costs.watts * ranks,
        stages=stages,
        hop_seconds=link.latency,
        pipeline_depth=costs.pipeline_depth if stages == 1 else stages - 1,
    )


def host_link(costs: CostModel, out_rate: float, back_rate: float) -> HostLink:
    """The link to host memory that moves blocks of this model, in bytes a second."""
    return HostLink(_known(costs, "kv_bytes_per_token") * costs.block_size, out_rate, back_rate)


def _known(costs: CostModel, name: str) -> int:
    value = getattr(costs, name)
    if not value:
        raise ValidationError(f"the cost model {costs.name} does not say `{name}`, which ranks and tiers need: add it")
    return int(value)
