"""Greedy tokens are compared one by one; where they differ, transformers decides whether that is a near-tie. Another
order of additions may choose the other of two tokens whose logits are within TIE of each other. Near-ties are counted
and printed, and what follows them is not compared; any other difference is an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

TIE = 1e-4


class NearTies:
    """The rule, and how often it applied."""

    def __init__(self, reference: Any) -> None:
        """`reference`: a float32 transformers model."""
        self._reference = reference
        self.found: list[str] = []
        self.compared = 0

    def compare(self, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int], what: str = "") -> None:
        """Raise unless the two continuations are equal up to their end, or up to a near-tie."""
        for at, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
            self.compared += 1
            if mine != other:
                best, gap = self._best_two([*prompt, *theirs[:at]])
                place = f"{what} token {at}: {mine} and {other}, transformers has {best} by {gap:.2e}"
                assert gap < TIE and {mine, other} == set(best), place
                self.found.append(place)
                return
        assert len(ours) == len(theirs), f"{what}: {len(ours)} tokens and {len(theirs)}"

    @torch.inference_mode()
    def _best_two(self, tokens: Sequence[int]) -> tuple[list[int], float]:
        ids = torch.tensor([list(tokens)], device=next(self._reference.parameters()).device)
        best = self._reference(ids).logits[0, -1].float().topk(2)
        return best.indices.tolist(), float(best.values[0] - best.values[1])

    def report(self, what: str, most: int = 1) -> None:
        """Print what was compared; more than `most` near-ties are an error."""
        print(f"\n{what}: {self.compared} tokens compared, {len(self.found)} near-ties (within {TIE})")
        for place in self.found:
            print(f"  {place}")
        assert len(self.found) <= most, "too many differences to be called near-ties"


@torch.inference_mode()
def greedy(reference: Any, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """`count` greedy tokens per prompt by transformers, one prompt at a time, without caching."""
    outputs = []
    for prompt in prompts:
        tokens = torch.tensor([list(prompt)], device=next(reference.parameters()).device)
        for _ in range(count):
            tokens = torch.cat([tokens, reference(tokens).logits[:, -1:].argmax(-1)], dim=1)
        outputs.append(tokens[0, len(prompt) :].tolist())
    return outputs
