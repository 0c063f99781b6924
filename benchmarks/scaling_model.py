"""An analytical model of an engine over many GPUs: bytes moved, step time, when tensor parallelism stops paying.

python benchmarks/scaling_model.py             # the tables of docs/scaling.md
python benchmarks/scaling_model.py --check     # compared with measurements on one H200

Bytes and operations follow from the shapes; tests/benchmarks/test_scaling_model.py compares them with the engine's own
weights and collectives. Speeds of one card are those measured on an H200 (docs/performance.md). Speeds between cards
are assumptions, named below: they were not measured with this engine.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace

BF16 = 2


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that determine bytes and operations."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    tied: bool = False
    experts: int = 0
    """0: one MLP; otherwise the number of experts of width `mlp`…"""
    top_k: int = 0
    """…and how many of them a token goes to."""

    @property
    def attention_weights(self) -> int:
        """A layer's projections."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def expert_weights(self) -> int:
        """One MLP: gate, up, down."""
        return 3 * self.hidden * self.mlp

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocab

    @property
    def weights(self) -> int:
        """All parameters except norms."""
        mlps = self.experts * (self.expert_weights + self.hidden) if self.experts else self.expert_weights
        return self.layers * (self.attention_weights + mlps) + self.head_weights * (1 if self.tied else 2)

    @property
    def active(self) -> int:
        """Parameters that one token is multiplied with."""
        return self.layers * (self.attention_weights + (self.top_k or 1) * self.expert_weights) + self.head_weights

    @property
    def kv_bytes(self) -> int:
        """KV bytes of one token over all layers."""
        return 2 * BF16 * self.layers * self.kv_heads * self.head_dim

    def read(self, rows: int) -> float:
        """Parameters that a step of `rows` rows reads: of the experts, only those that a row goes to."""
        if not self.experts:
            return self.active
        used = self.experts * (1 - (1 - self.top_k / self.experts) ** rows)
        return self.layers * (self.attention_weights + used * self.expert_weights) + self.head_weights


@dataclass(frozen=True)
class Card:
    """One H200, as this engine uses it (docs/performance.md)."""

    memory: float = 139 * 2**30
    bytes_a_second: float = 4.0e12
    flops: float = 690e12
    layer_seconds: float = 5e-6
    """Norms, sampling and gaps between kernels, per layer."""
    sparse_layer_seconds: float = 24e-6
    """The same with a router, sorting and small GEMMs."""


@dataclass(frozen=True)
class Link:
    """A connection between cards. Assumed."""

    bytes_a_second: float
    """Per card and direction."""
    seconds: float
    """Latency of an empty collective over eight cards."""


NVLINK = Link(370e9, 12e-6)
"""Within a machine: 450 GB/s nominal, NCCL in a captured graph."""
NETWORK = Link(45e9, 25e-6)
"""Between machines: 400 Gb/s per card."""

LLAMA_8B = Shape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256)
LLAMA_70B = Shape("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128256)
LLAMA_405B = Shape("Llama-3.1-405B", 126, 16384, 128, 8, 128, 53248, 128256)
QWEN_30B = Shape("Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 768, 151936, experts=128, top_k=8)
QWEN_235B = Shape("Qwen3-235B-A22B", 94, 4096, 64, 4, 128, 1536, 151936, experts=128, top_k=8)


@dataclass(frozen=True)
class Layout:
    """How one replica is split: `stages` stages of `tensor` cards."""

    tensor: int = 1
    stages: int = 1

    @property
    def cards(self) -> int:
        return self.tensor * self.stages


# Bytes


def weight_bytes(shape: Shape, layout: Layout) -> float:
    """Weights of one card of the first stage; with fewer KV heads than ranks, several ranks hold the same."""
    kv = max(shape.kv_heads, layout.tensor)
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * kv) / layout.tensor
    mlps = shape.experts * shape.expert_weights / layout.tensor + shape.experts * shape.hidden
    mlp = mlps if shape.experts else shape.expert_weights / layout.tensor
    ends = shape.head_weights / layout.tensor * (1 if shape.tied or layout.stages > 1 else 2)
    return BF16 * (math.ceil(shape.layers / layout.stages) * (attention + mlp) + ends)


def cache_tokens(shape: Shape, layout: Layout, card: Card, use: float = 0.92) -> int:
    """Tokens that fit in a replica's KV cache."""
    kv = max(shape.kv_heads, layout.tensor) / shape.kv_heads * shape.kv_bytes / layout.cards
    return max(0, int((use * card.memory - 4 * 2**30 - weight_bytes(shape, layout)) / kv))


def reduced_bytes(shape: Shape, rows: int) -> int:
    """Bytes all-reduced in a step: after the embedding, and twice per layer. Tensor sizes, not network traffic."""
    return (2 * shape.layers + 1) * rows * shape.hidden * BF16


def gathered_bytes(shape: Shape, rows: int, tensor: int) -> int:
    """A rank's part of the logits, which all ranks gather."""
    return rows * shape.vocab // tensor * BF16


def exchanged_bytes(shape: Shape, rows: int, ranks: int) -> float:
    """Bytes a rank sends to other ranks' experts and gets back in a step, with data-parallel attention: each of its
    tokens once to every other rank that holds one of its experts."""
    elsewhere = (ranks - 1) * (1 - (1 - 1 / ranks) ** shape.top_k)
    return 2 * shape.layers * rows * elsewhere * shape.hidden * BF16


# Time


def all_reduce_seconds(size: float, cards: int, link: Link) -> float:
    if cards == 1:
        return 0.0
    return link.seconds * math.log2(cards) / 3 + 2 * (cards - 1) / cards * size / link.bytes_a_second


def step_seconds(shape: Shape, layout: Layout, rows: int, context: float, card: Card, link: Link = NVLINK) -> float:
    """One decode step of a replica, through all stages."""
    reading = shape.read(rows) * BF16 / layout.tensor / card.bytes_a_second
    computing = 2 * shape.active * rows / layout.tensor / card.flops
    held = max(1.0, layout.tensor / shape.kv_heads)  # KV heads that several ranks hold are read by each
    kv = rows * context * shape.kv_bytes * held / layout.tensor / card.bytes_a_second
    between = shape.layers * (card.sparse_layer_seconds if shape.experts else card.layer_seconds)
    size = rows * shape.hidden * BF16
    sums = (2 * shape.layers + 1) * all_reduce_seconds(size, layout.tensor, link)
    hops = (layout.stages - 1) * (NETWORK.seconds + size / layout.tensor / NETWORK.bytes_a_second)
    return math.hypot(reading, computing) + kv + between + sums + hops


def tokens_a_second(shape: Shape, layout: Layout, rows: int, context: float, card: Card, link: Link = NVLINK) -> float:
    """Throughput of a replica with `rows` rows in every stage."""
    seconds = step_seconds(shape, layout, rows, context, card, link)
    return rows * layout.stages / seconds


def most_rows(shape: Shape, layout: Layout, context: float, card: Card, seconds: float, link: Link = NVLINK) -> int:
    """The most rows of a stage within `seconds` per token and its share of the cache; 0 if not even one fits."""
    room = int(cache_tokens(shape, layout, card) / context / layout.stages)
    low, high = 0, min(room, 4096)
    while low < high:
        middle = (low + high + 1) // 2
        if step_seconds(shape, layout, middle, context, card, link) <= seconds:
            low = middle
        else:
            high = middle - 1
    return low


# Tables


def print_tensor_table() -> None:
    print(
        "| model | cards | ms a token, 1 row | tok/s a card, 64 rows | tok/s a card within 25 ms | "
        "summed a step, 64 rows |"
    )
    print("|---|---|---|---|---|---|")
    card, context = Card(), 2048
    for shape in (LLAMA_8B, LLAMA_70B, LLAMA_405B, QWEN_30B, QWEN_235B):
        for tensor in (1, 2, 4, 8):
            layout = Layout(tensor)
            if cache_tokens(shape, layout, card) < 64 * context:
                print(f"| {shape.name} | {tensor} | does not fit | | | |")
                continue
            one = step_seconds(shape, layout, 1, context, card)
            many = tokens_a_second(shape, layout, 64, context, card) / tensor
            rows = most_rows(shape, layout, context, card, 0.025)
            best = tokens_a_second(shape, layout, rows, context, card) / tensor if rows else 0
            moved = reduced_bytes(shape, 64) / 2**20 if tensor > 1 else 0
            print(
                f"| {shape.name} | {tensor} | {1e3 * one:.2f} | {many:,.0f} | {best:,.0f} ({rows} rows) | "
                f"{moved:,.0f} MiB |"
            )


def print_fleet_table() -> None:
    print(
        "| model, layout of a replica | GPUs | replicas | output tok/s | ms a token | KV blocks | router's index | "
        "front's cores | choices a second, ms each |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    card, context = Card(), 2048
    for shape, layout in (
        (LLAMA_8B, Layout(1)), (LLAMA_70B, Layout(4)), (LLAMA_405B, Layout(8, 2)), (QWEN_235B, Layout(8)),
    ):  # fmt: skip
        link = NVLINK
        rows = most_rows(shape, layout, context, card, 0.05, link)
        seconds = step_seconds(shape, layout, rows, context, card, link)
        for cards in (8, 64, 256, 1024):
            replicas = cards // layout.cards
            if not replicas:
                continue
            total = replicas * tokens_a_second(shape, layout, rows, context, card, link)
            blocks = replicas * cache_tokens(shape, layout, card) // 16
            choices = total / OUTPUT_TOKENS
            print(
                f"| {shape.name}, {layout.tensor} × {layout.stages} | {cards:,} | {replicas:,} | {total:,.0f} | "
                f"{1e3 * seconds:.1f} | {blocks / 1e6:.1f} M | {blocks * INDEX_BYTES / 2**30:.1f} GiB | "
                f"{total / FRONT_TOKENS:,.1f} | {choices:,.0f}, {CHOICE_MS * replicas / 16:.2f} |"
            )


OUTPUT_TOKENS = 300
"""Average per request."""
INDEX_BYTES = 170
"""Bytes of a block in the router's index."""
FRONT_TOKENS = 25_000
"""Tokens per second that one core of the front streams (benchmarks/front_overhead.py)."""
CHOICE_MS = 0.11
"""Choosing among 16 replicas for a prompt of 8,192 tokens, and recording it (benchmarks/router.py --choose)."""


def checks() -> list[tuple[str, float, float]]:
    """(workload, measured on one H200, by this model), in milliseconds or tokens a second."""
    card, alone = Card(), Layout()
    decode = step_seconds(LLAMA_8B, alone, 1, 640, card)
    prompt = 2 * LLAMA_8B.active * 512 / card.flops
    sparse = step_seconds(QWEN_30B, alone, 1, 640, card)
    steps = [step_seconds(LLAMA_8B, alone, 256, 128 + i, card) for i in range(512)]
    crowd = 256 * 512 / (sum(steps) + 256 * 128 * 2 * LLAMA_8B.active / card.flops)
    without_head = replace(LLAMA_8B, vocab=0)
    attention = 2 * 2 * LLAMA_8B.layers * LLAMA_8B.heads * LLAMA_8B.head_dim * 1024 / 300e12
    prompts = 1 / (2 * without_head.active / card.flops + attention)
    return [
        ("Llama-3.1-8B, 1 request, 512 in, 256 out: ms a token", 3.922, 1e3 * (decode + prompt / 256)),
        ("Llama-3.1-8B, 256 requests, 128 in, 512 out: tok/s", 20_968, crowd),
        ("Llama-3.1-8B, 128 requests, 2,048 in, 1 out: tok/s", 43_910, prompts),
        ("Qwen3-30B-A3B, 1 request: ms a token", 2.61, 1e3 * sparse),
    ]


def print_checks() -> None:
    print("| workload | measured | model | model ÷ measured |")
    print("|---|---|---|---|")
    for name, measured, modelled in checks():
        print(f"| {name} | {measured:,g} | {modelled:,.5g} | {modelled / measured:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare the model with measurements")
    if parser.parse_args().check:
        print_checks()
        return
    print_tensor_table()
    print()
    print_fleet_table()


if __name__ == "__main__":
    main()
