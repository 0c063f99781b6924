"""Train a draft head for a model on one GPU, in a given time, from nothing but the model: prompts are made here.

    python benchmarks/gpu/train_draft.py MODEL --minutes 4 -o OUT

MODEL: a folder, a GGUF file, or a folder with the parts of one (as `split` writes them), which are joined. Writes the
head's files to OUT, in pieces of at most 15 MiB (join with cat), and prints acceptance by position before and after.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.draft_prompts import prompts, write
from quire.cli.main import main as quire

PIECE_BYTES = 15 << 20


def joined(model: Path, scratch: Path) -> Path:
    """The model; a GGUF file in parts as one file."""
    parts = sorted(path for path in model.iterdir() if path.name.startswith("part")) if model.is_dir() else []
    if not parts:
        return model
    whole = scratch / "model.gguf"
    with whole.open("wb") as file:
        for part in parts:
            file.write(part.read_bytes())
    return whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--prompts", type=int, default=10000)
    parser.add_argument("--answer-tokens", type=int, default=320)
    parser.add_argument("--quick", action="store_true", help="a minute, to see that it runs")
    args, rest = parser.parse_known_args()
    if args.quick:
        args.minutes, args.prompts, args.answer_tokens = 1.0, 600, 128
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        made = write(scratch / "prompts.jsonl", prompts(args.prompts))
        held = write(scratch / "held-out.jsonl", prompts(200, held_out=True))
        print(f"{made} prompts, {held} held out", flush=True)
        code = quire(
            ["train-draft", str(joined(args.model, scratch)), "--data", str(scratch / "prompts.jsonl"),
             "--held-out", str(scratch / "held-out.jsonl"), "--regenerate", str(args.answer_tokens),
             "--max-length", "512", "--minutes", str(args.minutes), "-o", str(scratch / "head"), "--max-num-seqs",
             "512", "--gpu-memory-utilization", "0.5", "--answers", "3", "--debug", *rest]
        )  # fmt: skip
        if code == 0:
            args.output.mkdir(parents=True, exist_ok=True)
            for path in (scratch / "head").iterdir():
                if path.stat().st_size <= PIECE_BYTES:
                    shutil.copy(path, args.output / path.name)
                    continue
                data = path.read_bytes()
                for number, start in enumerate(range(0, len(data), PIECE_BYTES)):
                    (args.output / f"{path.name}.{number}").write_bytes(data[start : start + PIECE_BYTES])
    return code


if __name__ == "__main__":
    sys.exit(main())
