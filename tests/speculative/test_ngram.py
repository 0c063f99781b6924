"""The n-gram proposer in torch, C++ and Triton, against a search through all tokens of each row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire.kernels.cpu.build import library
from quire.speculative.ngram import NativeNgramProposer, NgramProposer, TritonNgramProposer

BLOCK, WIDTH = 4, 7
PROPOSERS = ["torch", "native", "triton"]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""On a machine with a GPU the kernels are compiled; elsewhere they run in Triton's interpreter."""


class Batch:
    """Columns of a batch with these rows; the tokens but each row's last are in pages, or by row."""

    def __init__(self, texts: list[list[int]], in_pages: bool) -> None:
        rows = len(texts) + 1  # the last one is padding
        longest = max(map(len, texts)) + 2 * BLOCK
        blocks = -(-longest // BLOCK)
        random = np.random.default_rng(0)
        self.num_tokens = torch.tensor([*map(len, texts), 0])
        self.last_token = torch.tensor([*(text[-1] for text in texts), 0])
        self.drafts = torch.full((rows, WIDTH), -7, dtype=torch.int32)
        self.num_drafts = torch.full((rows,), -7, dtype=torch.int32)
        self.block_table = torch.zeros(rows, blocks, dtype=torch.int32)
        pages = random.permutation(np.arange(1, rows * blocks + 1)).reshape(rows, blocks)
        self.block_table[:] = torch.from_numpy(pages)
        # Garbage that would match, wherever no token is.
        tokens = torch.from_numpy(random.integers(0, 3, (rows * blocks + 1, BLOCK), dtype=np.int32))
        self.token_ids = torch.from_numpy(random.integers(0, 3, (rows, 0 if in_pages else longest), dtype=np.int32))
        for row, text in enumerate(texts):
            for at, token in enumerate(text[:-1]):
                if in_pages:
                    tokens[self.block_table[row, at // BLOCK], at % BLOCK] = token
                else:
                    self.token_ids[row, at] = token
        self.kv = SimpleNamespace(tokens=tokens.to(DEVICE), block_size=BLOCK, has_tokens=in_pages)
        for name, held in vars(self).items():
            if isinstance(held, torch.Tensor):
                setattr(self, name, held.to(DEVICE))

    def row_tokens(self, rows: torch.Tensor, longest: int) -> torch.Tensor:
        if not self.kv.has_tokens:
            return self.token_ids[rows, :longest].long()
        return self.kv.tokens[self.block_table[rows].long()].flatten(1)[:, :longest].long()


def make(which: str, shortest: int, longest: int) -> NgramProposer:
    if which == "triton":
        return TritonNgramProposer(shortest, longest, DEVICE)
    if which == "torch":
        return NgramProposer(shortest, longest)
    if DEVICE.type != "cpu" or (native := library()) is None:
        pytest.skip("needs a CPU and a compiler")
    return NativeNgramProposer(shortest, longest, native)


def proposed(which: str, texts: list[list[int]], in_pages: bool, count: int, shortest: int, longest: int) -> Any:
    batch = Batch(texts, in_pages)
    rows = torch.arange(len(texts) + 1, device=DEVICE)
    bound = SimpleNamespace(max_context_len=max(map(len, texts)) - 1)
    step: Any = SimpleNamespace(batch=batch, rows=rows, count=count, attention=(bound,))
    proposer = make(which, shortest, longest)
    for _ in range(2):  # the second time finds no trace of the first
        proposer.propose(step)
    assert batch.num_drafts[-1] == 0
    return [batch.drafts[row, : batch.num_drafts[row]].tolist() for row in range(len(texts))]


def expected(text: list[int], count: int, shortest: int, longest: int) -> list[int]:
    for n in range(longest, shortest - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                return (text[end:] * count)[:count]
    return []


@pytest.mark.parametrize("in_pages", [True, False], ids=["pages", "by-row"])
@pytest.mark.parametrize("which", PROPOSERS)
def test_the_longest_latest_match(which: str, in_pages: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if which == "triton":
        from quire.kernels.triton import ngram

        monkeypatch.setattr(ngram, "BLOCK", 16)  # several blocks a program, several programs a row
        monkeypatch.setattr(ngram, "SLICE", 32)
    random = np.random.default_rng(1)
    lengths = [1, 2, 3, 4, 9, 17, 32, 33, 34, 65, 90]
    cases = [(2, 5, 3, 7), (1, 1, 4, 3), (3, 4, 3, 1), (3, 6, 40, 5)]
    for shortest, longest, vocabulary, count in cases[:1] if which == "triton" else cases:
        texts = [random.integers(0, vocabulary, length).tolist() for length in lengths]
        texts.append([5, 6, 7, 8, *random.integers(9, 40, 40).tolist(), 5, 6, 7])  # only at the beginning
        found = proposed(which, texts, in_pages, count, shortest, longest)
        assert found == [expected(text, count, shortest, longest) for text in texts]


@pytest.mark.parametrize("which", PROPOSERS)
def test_a_loop_goes_on(which: str) -> None:
    assert proposed(which, [[9, 1, 2, 1, 2], [3, 3, 3]], True, 5, 1, 3) == [[1, 2, 1, 2, 1], [3] * 5]
