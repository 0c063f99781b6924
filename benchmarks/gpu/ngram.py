"""The n-gram proposer's kernels on a GPU: microseconds for rows of some length, and whether the drafts are right.

    python benchmarks/gpu/ngram.py [--quick]

Both launches are repeated inside a CUDA graph over several batches, so that tokens come from memory and not from L2.
The rows' tokens are random, but the last 4 of each occur once before, at a random place. `bound` is the longest row the
graph is captured for; a graph for longer rows has programs that find nothing to do.
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import torch
from triton.testing import do_bench_cudagraph

from quire.speculative.ngram import TritonNgramProposer

BLOCK_SIZE, WIDTH, COUNT = 16, 7, 3
COLD_BYTES = 120 << 20
CASES = (
    (1, 1000, 4096), (1, 1000, 131072), (1, 131072, 131072), (64, 1000, 4096), (64, 1000, 131072), (64, 32768, 32768),
    (256, 1000, 4096), (256, 1000, 131072), (256, 8192, 8192),
)  # fmt: skip
"""(rows, tokens of each, bound)."""


def make_step(rows: int, tokens: int, bound: int, seed: int) -> tuple[Any, torch.Tensor]:
    """A step, and the drafts that its rows should get."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    blocks = -(-(bound + 1) // BLOCK_SIZE)
    used = -(-tokens // BLOCK_SIZE)
    text = torch.randint(100, 1 << 17, (rows, tokens), dtype=torch.int32, device="cuda", generator=generator)
    place = torch.randint(4, tokens - 4 - COUNT, (rows, 1), device="cuda", generator=generator)
    before = place - 4 + torch.arange(4, device="cuda")
    text[:, -4:] = text.gather(1, before)
    expected = text.gather(1, place + torch.arange(COUNT, device="cuda"))
    pages = torch.zeros(rows * used + 1, BLOCK_SIZE, dtype=torch.int32, device="cuda")
    table = torch.zeros(rows, blocks, dtype=torch.int32, device="cuda")
    table[:, :used] = 1 + torch.randperm(rows * used, device="cuda", generator=generator).view(rows, used)
    padded = torch.nn.functional.pad(text, (0, used * BLOCK_SIZE - tokens))
    pages[table[:, :used].long()] = padded.view(rows, used, BLOCK_SIZE)
    batch = SimpleNamespace(
        num_tokens=torch.full((rows,), tokens, device="cuda"),
        last_token=text[:, -1].long(),
        drafts=torch.zeros(rows, WIDTH, dtype=torch.int32, device="cuda"),
        num_drafts=torch.zeros(rows, dtype=torch.int32, device="cuda"),
        block_table=table,
        token_ids=torch.zeros(rows, 0, dtype=torch.int32, device="cuda"),
        kv=SimpleNamespace(tokens=pages, block_size=BLOCK_SIZE, has_tokens=True),
    )
    pages[table[:, (tokens - 1) // BLOCK_SIZE].long(), (tokens - 1) % BLOCK_SIZE] = -5  # the last is in its column
    attention = (SimpleNamespace(max_context_len=bound - 1),)
    return SimpleNamespace(
        batch=batch, rows=torch.arange(rows, device="cuda"), count=COUNT, attention=attention
    ), expected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    proposer = TritonNgramProposer(3, 5, torch.device("cuda"))
    lines = []
    for rows, tokens, bound in CASES[:4] if args.quick else CASES:
        copies = 1 if args.quick else max(1, min(8, COLD_BYTES // (4 * rows * tokens)))
        made = [make_step(rows, tokens, bound, seed) for seed in range(copies)]
        for step, expected in made:
            proposer.propose(step)
            assert (step.batch.num_drafts == COUNT).all(), "no match was found"
            assert torch.equal(step.batch.drafts[:, :COUNT], expected), "the drafts are wrong"

        def run(made: Any = made) -> None:
            for step, _ in made:
                proposer.propose(step)

        micro = 1e3 * do_bench_cudagraph(run, rep=20) / copies
        lines.append(f"{rows:5} rows {tokens:7} tokens {bound:7} bound {micro:8.2f} us")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
