"""What keeping keys and values in 8 bits in host memory and on disk (`kv_tier_dtype`) costs in quality.

python benchmarks/tier_codes.py                           # the default model: some minutes on two cores
python benchmarks/tier_codes.py --device cuda --dtype bfloat16

A text is read in windows. The first half of each is computed, copied to host memory and back, as when a session wakes
or a swapped row returns; then the second half is computed over it and scored, against the same with blocks that stayed
on the device. Prints perplexities, the share of equal most likely tokens, mean KL divergence in nats, and bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from quire.api.evaluate import WINDOW, TextReader
from quire.config import EngineConfig
from quire.worker.batch import StepInputs
from quire.worker.page_copies import page_copies
from quire.worker.sequences import LOGIT_ROWS, sequence_inputs
from quire.worker.worker import Worker


class Halves:
    """Computes a window in two parts, with its first blocks moved to host memory and back in between, or not."""

    def __init__(self, reader: TextReader) -> None:
        self._worker: Worker = reader.model._worker
        runner = self._worker._runner
        assert runner is not None
        self._kv = runner.batch.kv
        self.copies = page_copies("int8_per_token_head", self._worker.geometry)
        blocks = reader.window // self._kv.block_size
        self.copies.connect(self._kv, torch.empty(blocks, self.copies.slot_bytes, dtype=torch.uint8))

    @torch.inference_mode()
    def hidden(self, tokens: Sequence[int], moves: bool) -> torch.Tensor:
        """Hidden states of the second half."""
        half = len(tokens) // 2 // self._kv.block_size * self._kv.block_size
        self._run(tokens[:half], 0)
        if moves:
            pairs = [(1 + i, i) for i in range(half // self._kv.block_size)]
            self.copies.out(pairs)
            self._kv.data[1:].zero_()
            self.copies.back([(slot, page) for page, slot in pairs])
        return self._run(tokens[half:], half)

    def _run(self, tokens: Sequence[int], start: int) -> torch.Tensor:
        device = self._kv.data.device
        positions, (step,) = sequence_inputs(len(tokens), self._worker.geometry, device)
        end, size = start + len(tokens), self._kv.block_size
        table = torch.arange(1, 1 - (-end // size), dtype=torch.int32, device=device).unsqueeze(0)
        step = replace(
            step, slots=step.slots + start, context_lens=step.context_lens + start, block_tables=table,
            max_context_len=end, plans={},
        )  # fmt: skip
        ids = torch.tensor(tokens, dtype=torch.int64, device=device)
        return self._worker.run_sequence(StepInputs(ids, positions + start, (step,)))

    @torch.inference_mode()
    def logprobs(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, vocabulary] in float64."""
        return self._worker.model.logits(hidden).double().log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EngineConfig.model)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--text", type=Path, help="the text to predict, instead of Python's manual")
    parser.add_argument("--tokens", type=int, default=20480, help="of the text")
    parser.add_argument("--window", type=int, default=WINDOW)
    args = parser.parse_args()
    topics = pydoc_data.topics.topics
    text = args.text.read_text() if args.text else "\n\n".join(topics[name] for name in sorted(topics))
    dense = "dense" if args.device in ("auto", "cpu") and not torch.cuda.is_available() else "auto"
    config = EngineConfig(args.model, device=args.device, dtype=args.dtype, cpu_weights=dense, swap_space=0.01)
    reader = TextReader(config, args.window)
    tokens = reader.encode(text)[: args.tokens]
    halves, window = Halves(reader), reader.window
    count = agreed = 0
    loss = exact_loss = divergence = 0.0
    for start in range(0, len(tokens) - window, window // 2):
        ids = tokens[start : start + window + 1]
        exact, moved = (halves.hidden(ids[:-1], moves).split(LOGIT_ROWS) for moves in (False, True))
        wanted = torch.tensor(ids[-sum(map(len, exact)) :], device=exact[0].device).split(LOGIT_ROWS)
        for one, other, own in zip(exact, moved, wanted, strict=True):
            true, found = halves.logprobs(one), halves.logprobs(other)
            exact_loss -= float(true.gather(1, own.unsqueeze(-1)).sum())
            loss -= float(found.gather(1, own.unsqueeze(-1)).sum())
            agreed += int((true.argmax(-1) == found.argmax(-1)).sum())
            divergence += float((true.exp() * (true - found)).sum())
            count += len(own)
    pages = halves._kv.geometry
    print(
        json.dumps({
            "model": config.model, "dtype": str(halves._kv.data.dtype), "scored": count,
            "perplexity": math.exp(loss / count), "exact perplexity": math.exp(exact_loss / count),
            "ratio": math.exp((loss - exact_loss) / count), "same greedy token": agreed / count,
            "mean KL": divergence / count, "bytes of a block": halves.copies.slot_bytes,
            "bytes on the device": pages.page_bytes,
        })
    )  # fmt: skip
    reader.model.close()


if __name__ == "__main__":
    main()
