"""What each format of weights and KV cache costs in quality: perplexity, agreement and KL divergence against 16 bits.

python benchmarks/quantization_quality.py                         # the default model, every row: an hour on two cores
python benchmarks/quantization_quality.py --rows w4a16-g32-gptq kv-fp8 --tokens 4096
python benchmarks/quantization_quality.py --device cuda --samples 128

The text is the reference manual that comes with Python (`pydoc_data.topics`); calibration is on this repository's own
docs; both may be other files. Prints a line of JSON per row as it comes, and a Markdown table at the end.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from quire.api.evaluate import Evaluation, evaluate
from quire.api.quantize import Calibration, QuantizeSettings, quantize_checkpoint
from quire.config import EngineConfig
from quire.quantization.writer import find_scheme

DOCS = Path(__file__).parents[1] / "docs"


@dataclass(frozen=True)
class Row:
    """A checkpoint to write and measure, or a flag of the engine."""

    label: str
    scheme: str | None = None
    group: int | None = None
    algorithm: str = "rtn"
    kv: str = "auto"
    correct: bool = False


ROWS = {
    "fp8": Row("FP8, a scale per output, rtn", "FP8"),
    "fp8-gptq": Row("FP8, a scale per output, gptq", "FP8", algorithm="gptq"),
    "fp8-smoothquant-gptq": Row("FP8, a scale per output, smoothquant-gptq", "FP8", algorithm="smoothquant-gptq"),
    "fp8-block": Row("FP8, 128x128 blocks, rtn", "FP8_BLOCK"),
    "w8a8": Row("INT8 W8A8, rtn", "W8A8"),
    "w8a8-smoothquant": Row("INT8 W8A8, smoothquant", "W8A8", algorithm="smoothquant"),
    "w8a8-smoothquant-gptq": Row("INT8 W8A8, smoothquant-gptq", "W8A8", algorithm="smoothquant-gptq"),
    **{
        f"w4a16-g{group}-{algorithm}": Row(f"INT4, groups of {group}, {algorithm}", "W4A16", group, algorithm)
        for group in (64, 32)
        for algorithm in ("rtn", "awq", "gptq", "awq-gptq")
    },
    "w4a16-asym-g32-rtn": Row("INT4 with zero points, groups of 32, rtn", "W4A16_ASYM", 32),
    "w4a16-asym-g32-gptq": Row("INT4 with zero points, groups of 32, gptq", "W4A16_ASYM", 32, "gptq"),
    "w4a16-asym-g32-gptq-correct": Row(
        "INT4 with zero points, groups of 32, gptq --correct", "W4A16_ASYM", 32, "gptq", correct=True
    ),
    "nvfp4": Row("NVFP4, rtn", "NVFP4"),
    "nvfp4-gptq": Row("NVFP4, gptq", "NVFP4", algorithm="gptq"),
    "mxfp4": Row("MXFP4, rtn", "MXFP4"),
    "mxfp4-gptq": Row("MXFP4, gptq", "MXFP4", algorithm="gptq"),
    "kv-fp8": Row("KV cache fp8", kv="fp8"),
    "kv-fp8-token": Row("KV cache fp8_per_token_head", kv="fp8_per_token_head"),
    "kv-int8-token": Row("KV cache int8_per_token_head", kv="int8_per_token_head"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EngineConfig.model)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--text", type=Path, help="the text to predict, instead of Python's manual")
    parser.add_argument("--calibration", type=Path, help="the text to calibrate on, instead of docs/")
    parser.add_argument("--memory", type=float, default=0.9, help="gpu_memory_utilization, if several run at once")
    parser.add_argument("--tokens", type=int, default=20480, help="of the text")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--stride", type=int, default=1023)
    parser.add_argument("--samples", type=int, default=32, help="calibration sequences of 512 tokens")
    parser.add_argument("--alone", action="store_true", help="perplexity only: faster, the 16-bit model is read once")
    args = parser.parse_args()
    topics = pydoc_data.topics.topics
    text = args.text.read_text() if args.text else "\n\n".join(topics[name] for name in sorted(topics))
    pages = [args.calibration] if args.calibration else sorted(DOCS.glob("*.md"))
    calibration = "\n\n".join(path.read_text() for path in pages)

    def engine(model: str, kv: str = "auto") -> EngineConfig:
        return EngineConfig(
            model=model, device=args.device, dtype="bfloat16", kv_cache_dtype=kv, gpu_memory_utilization=args.memory
        )

    base = engine(args.model)

    def measure(config: EngineConfig, reference: EngineConfig | None) -> Evaluation:
        return evaluate(config, text, reference, args.window, args.stride, args.tokens)

    plain = measure(base, None)
    lines = [f"| 16 bits (bfloat16) | {plain.perplexity:.3f} | | | |"]
    with tempfile.TemporaryDirectory() as folder:
        for name in args.rows:
            row = ROWS[name]
            config = engine(args.model, row.kv)
            if row.scheme is not None:
                out = Path(folder) / name
                text_used = None if row.algorithm == "rtn" else Calibration(calibration, args.samples)
                settings = QuantizeSettings(
                    find_scheme(row.scheme, row.group), row.algorithm, text_used, correct=row.correct
                )
                quantize_checkpoint(base, out, settings)
                config = engine(str(out))
            found = measure(config, None if args.alone else base)
            print(json.dumps({"row": name, **found.as_dict()}), flush=True)
            near = found.against
            distance = "| |" if near is None else f"{near.greedy_agreement:.1%} | {near.mean_kl:.4f} |"
            change = found.perplexity / plain.perplexity - 1
            lines.append(f"| {row.label} | {found.perplexity:.3f} | {change:+.1%} | {distance}")
    print("\n| | perplexity | change | same greedy token | mean KL, nats |\n|---|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
