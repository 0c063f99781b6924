"""The cost model of a replica of several ranks, derived from that of one device. Modelled, not measured, and named so.

Tensor-parallel ranks divide weights, attention and arithmetic evenly; every layer adds two all-reduces over its hidden
states. Pipeline stages divide the layers: a step takes as long as before and a hop more for each stage, but the first
stage takes the next step as soon as it is done with its part. Memory that weights no longer take is KV blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from quire.errors import ValidationError
from quire.simulation.costs import CostModel, Line, line_seconds
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

    def all_to_all(self, ranks: int, num_bytes: float) -> float:
        """Seconds of an exchange in which every rank sends so many bytes, most of them to others."""
        return self.latency + (ranks - 1) / ranks * num_bytes / self.rate

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
    if width % tensor:
        raise ValidationError(f"{tensor} tensor-parallel ranks cannot divide a hidden size of {width} evenly")
    if stages > layers:
        raise ValidationError(f"{layers} layers cannot fill {stages} pipeline stages")

    def seconds(tokens: int, alone: float) -> float:
        reduced = 2 * layers * link.all_reduce(tensor, tokens * width * ACTIVATION_BYTES) if tensor > 1 else 0.0
        return alone / tensor + reduced

    def over(line: Line | None) -> Line | None:
        return None if line is None else [(tokens, seconds(tokens, alone)) for tokens, alone in line]

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
        prompt_tokens=over(costs.prompt_tokens),
        captured_tokens=over(costs.captured_tokens),
        shared_seconds=None if costs.shared_seconds is None else costs.shared_seconds / tensor,
        context_seconds=costs.context_seconds / tensor,
        pair_seconds=costs.pair_seconds / tensor,
        row_seconds=costs.row_seconds / tensor,
        num_blocks=blocks,
        error=None,
        watts=None if costs.watts is None else costs.watts * ranks,
        stages=stages,
        hop_seconds=link.latency,
        pipeline_depth=costs.pipeline_depth if stages == 1 else stages - 1,
    )


def share_experts(costs: CostModel, ranks: int, link: RankConnection = RankConnection()) -> CostModel:
    """The cost model of one of `ranks` replicas that share their experts, if all of them compute as many tokens."""
    if ranks == 1:
        return costs
    if costs.moe_layers is None:
        raise ValidationError(
            f"the cost model {costs.name} does not say `moe_layers`: it is not that of a mixture of experts"
        )
    layers, width, weights = costs.moe_layers, _known(costs, "hidden_size"), _known(costs, "weight_bytes")
    experts, copies = _known(costs, "expert_bytes"), _known(costs, "experts_per_token")
    if experts >= weights:
        raise ValidationError(f"{costs.name}: expert_bytes ({experts}) must be below weight_bytes ({weights})")
    share = experts / weights
    """Of a step's time: as of its bytes."""

    def over(line: Line | None) -> Line | None:
        if line is None:
            return None
        places = sorted({at for tokens, _ in line for at in (tokens, max(1, tokens // ranks))})
        return [(tokens, seconds(line, tokens)) for tokens in places]

    def seconds(line: Line, tokens: int) -> float:
        own, expert = line_seconds(line, tokens), line_seconds(line, ranks * tokens) / ranks
        exchange = link.all_to_all(ranks, tokens * min(copies, ranks) * width * ACTIVATION_BYTES)
        return (1 - share) * own + share * expert + 2 * layers * exchange

    freed = experts - experts // ranks
    return msgspec.structs.replace(
        costs,
        name=f"{costs.name}-ep{ranks} (modelled)",
        source=f"{costs.source}; experts over {ranks} replicas are modelled: {1e6 * link.latency:g} µs and "
        f"{link.rate / 1e9:g} GB/s between them, all experts equally often chosen",
        tokens=over(costs.tokens) or costs.tokens,
        prompt_tokens=over(costs.prompt_tokens),
        captured_tokens=over(costs.captured_tokens),
        num_blocks=costs.num_blocks + freed // (costs.block_size * _known(costs, "kv_bytes_per_token")),
        weight_bytes=weights - freed,
        error=None,
    )


def host_link(costs: CostModel, out_rate: float, back_rate: float) -> HostLink:
    """The link to host memory that moves blocks of this model, in bytes a second."""
    return HostLink(_known(costs, "kv_bytes_per_token") * costs.block_size, out_rate, back_rate)


def _known(costs: CostModel, name: str) -> int:
    value = getattr(costs, name)
    if not value:
        raise ValidationError(f"the cost model {costs.name} does not say `{name}`, which ranks and tiers need: add it")
    return int(value)
