"""Microseconds to sample and commit a token for each row, beside torch's ways of sampling alone.

    python benchmarks/gpu/sampling.py

Everything runs in CUDA graphs: the GPU is timed, not Python. Logits resemble a model's (a Zipf tail whose steepness
differs from row to row, so that nuclei have from one to a few hundred tokens) and, for the widest nuclei, are noise.
The bound is reading the logits once at the GPU's bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from triton.testing import do_bench_cudagraph

from quire.kernels.triton.sampling import BatchColumns, draw_and_commit, workspace
from quire.messages.sampling import SamplingParams
from quire.worker.extras import pack_scalars

VOCABULARIES = (151_936, 128_256)
ROWS = (1, 32, 256)
BANDWIDTH = 4.3e12
DEVICE = torch.device("cuda")


def model_like(rows: int, vocab: int) -> torch.Tensor:
    """The r-th best token of a row has a logit of 20 - steepness * log r, give or take."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    steepness = 1.3 + 1.2 * torch.rand(rows, 1, generator=generator, device=DEVICE)
    rank = torch.rand(rows, vocab, generator=generator, device=DEVICE).argsort(-1) + 1
    noise = torch.randn(rows, vocab, generator=generator, device=DEVICE)
    return (20 - steepness * rank.log() + 0.5 * noise).to(torch.bfloat16)


def columns(rows: int, params: SamplingParams) -> BatchColumns:
    """Rows that all want the same, and one of padding."""

    def whole(value: int) -> torch.Tensor:
        return torch.full((rows + 1,), value, dtype=torch.int64, device=DEVICE)

    return BatchColumns(
        last_token=whole(0), num_tokens=whole(10), prompt_len=whole(3), limit=whole(2**40),
        active=torch.ones(rows + 1, dtype=torch.bool, device=DEVICE), seed=torch.arange(rows + 1, device=DEVICE),
        sequence=whole(0), scalars=torch.from_numpy(pack_scalars([params])).to(DEVICE).repeat(rows + 1, 1),
        stop_ids=torch.full((rows + 1, 2), -1, device=DEVICE),
    )  # fmt: skip


def ours(logits: torch.Tensor, **scalars: float) -> Callable[[], object]:
    draws, vocab = logits.shape
    params = SamplingParams(temperature=0.8, **scalars)  # type: ignore[arg-type]
    state = columns(draws, params)
    rows = torch.arange(draws, device=DEVICE)
    results = torch.empty(2, 2, draws, dtype=torch.int32, pin_memory=True)
    slot = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    room = workspace(draws, vocab, DEVICE)
    return lambda: draw_and_commit(logits, rows, state, results, slot, params.has_filters, room)


def torch_plain(logits: torch.Tensor) -> Callable[[], object]:
    return lambda: torch.multinomial((logits.float() / 0.8).softmax(-1), 1)


def torch_sorted(logits: torch.Tensor, top_p: float) -> Callable[[], object]:
    """Sort, drop what is past top_p, draw from what is left."""

    def draw() -> torch.Tensor:
        ordered, tokens = (logits.float() / 0.8).sort(-1, descending=True)
        weights = ordered.softmax(-1)
        weights = torch.where(weights.cumsum(-1) - weights < top_p, weights, 0.0)
        return tokens.gather(1, torch.multinomial(weights, 1))

    return draw


def torch_topk(logits: torch.Tensor, top_k: int, top_p: float) -> Callable[[], object]:
    def draw() -> torch.Tensor:
        best, tokens = logits.topk(top_k)
        weights = (best.float() / 0.8).softmax(-1)
        weights = torch.where(weights.cumsum(-1) - weights < top_p, weights, 0.0)
        return tokens.gather(1, torch.multinomial(weights, 1))

    return draw


def microseconds(run: Callable[[], object]) -> float:
    return 1e3 * do_bench_cudagraph(run, rep=5, return_mode="median")


def main() -> None:
    print("                    read |   plain   torch | k20 p.95    topk |    p.95     sort | wide p.9")
    for vocab in VOCABULARIES:
        for rows in ROWS:
            logits = model_like(rows, vocab)
            wide = (3 * torch.randn(rows, vocab, device=DEVICE)).to(torch.bfloat16)
            bound = 1e6 * logits.nbytes / BANDWIDTH
            print(
                f"{rows:>5} x {vocab:>8,} {bound:7.1f} |"
                f" {microseconds(ours(logits)):7.1f} {microseconds(torch_plain(logits)):7.1f} |"
                f" {microseconds(ours(logits, top_k=20, top_p=0.95)):8.1f}"
                f" {microseconds(torch_topk(logits, 20, 0.95)):7.1f} |"
                f" {microseconds(ours(logits, top_p=0.95)):7.1f} {microseconds(torch_sorted(logits, 0.95)):8.1f} |"
                f" {microseconds(ours(wide, top_p=0.9)):8.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
