"""transformers' beam search, as the reference for ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import BeamSearchOutput, BeamSearchParams

ENDS = [2, 3, 14, 15, 60]
"""Several end tokens: a random model hardly ever draws its own single one, and nothing would end early."""


def params_of(width: int, tokens: int = 10, ends: list[int] | None = ENDS, **more: Any) -> BeamSearchParams:
    return BeamSearchParams(
        width, tokens, ignore_eos=True, stop_token_ids=ends, include_stop_str_in_output=True, **more
    )


class Model:
    """A checkpoint, and transformers' beam search over it."""

    def __init__(self, folder: Path, reference: Any) -> None:
        self.folder = folder
        self._reference = reference

    @torch.inference_mode()
    def search(
        self, prompt: list[int], params: BeamSearchParams, ends: list[int] | None
    ) -> list[tuple[list[int], float]]:
        """Sequences and scores, best first."""
        found = self._reference.generate(
            torch.tensor([prompt], device=self._reference.device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64, device=self._reference.device),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=ends,
            pad_token_id=-1,
            do_sample=False,
            repetition_penalty=1.0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        sequences = [[token for token in row if token >= 0] for row in found.sequences.tolist()]
        return list(zip(sequences, found.sequences_scores.tolist(), strict=True))

    def assert_found(
        self, output: BeamSearchOutput, prompt: list[int], params: BeamSearchParams, ends: list[int] | None
    ) -> None:
        """The same sequences in the same order. Sequences whose scores are equal but for rounding may be swapped."""
        right = self.search(prompt, params, ends)
        assert output.finished and output.error is None and output.prompt_token_ids == prompt
        assert [one.score for one in output.sequences] == pytest.approx([score for _, score in right], abs=2e-4)
        for one, (tokens, _) in zip(output.sequences, right, strict=True):
            near = [other for other, score in right if abs(score - one.score) < 2e-4]
            assert one.tokens in near, (one.tokens, tokens)
            assert one.cum_logprob == pytest.approx(one.score * (len(tokens) - len(prompt)) ** params.length_penalty)
            reported = zip(one.logprobs, one.tokens[len(prompt) :], strict=True)
            assert sum(entry[token].logprob for entry, token in reported) == pytest.approx(one.cum_logprob)
