"""`quire quantize`: writes a checkpoint in few bits that quire, vLLM and transformers read."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from quire.cli.engine_flags import add_common, add_engine_flags, add_model, engine_settings
from quire.cli.parser import Parser
from quire.cli.terminal import say, table
from quire.cli.values import positive, readable_bytes, size
from quire.errors import ValidationError

WHAT = """\
Write a model's checkpoint in few bits, in the compressed-tensors format that quire, vLLM and transformers read. Works
on one layer at a time. GGUF models, also quantized ones, are dequantized first.

schemes:
  FP8 (FP8_DYNAMIC)   8-bit floats, a scale per output; activations in FP8 too, a scale per token
  FP8_BLOCK           8-bit floats, a scale per 128x128 block; activations in FP8, a scale per token and 128 inputs
  W8A8 (INT8)         8-bit integers, a scale per output; activations in INT8 too, a scale per token
  W8A16               8-bit integers in groups; activations stay in 16 bits, as with all that follow
  W4A16 (INT4)        4-bit integers in groups
  W4A16_ASYM          4-bit integers in groups, with zero points
  MXFP4 (MXFP4A16)    4-bit floats in groups of 32, scales are powers of two
  NVFP4 (NVFP4A16)    4-bit floats in groups of 16, scales are 8-bit floats

algorithms:
  rtn                 round to nearest
  gptq                let the columns that follow take up a column's rounding errors
  awq                 integers in groups: scale inputs, so that large ones get finer weights
  smoothquant         W8A8, FP8: scale inputs, so that they are more even and can be rounded too
  awq-gptq, smoothquant-gptq
                      both; all but rtn need --calibration"""
EXAMPLES = """
  quire quantize qwen3-0.6b -o qwen3-fp8 --scheme FP8
  quire quantize ./my-model -o my-model-int4 --scheme W4A16 --algorithm gptq --calibration notes.txt
  quire quantize -o smollm2-int4 --scheme W4A16 --group-size 32 --algorithm awq --calibration a.txt --text b.txt
"""
FLAGS = ("model", "tokenizer", "revision", "hf_token", "download_dir", "trust_remote_code", "load_format", "device")


def configure(parser: Parser) -> None:
    """The flags of `quire quantize`."""
    parser.describe(run, WHAT, EXAMPLES, "[MODEL] -o FOLDER --scheme SCHEME")
    add_model(parser)
    how = parser.add_argument_group("quantization")
    how.add_argument("-o", "--output", required=True, metavar="FOLDER", help="new or empty folder for the checkpoint")
    how.add_argument("--scheme", required=True, metavar="SCHEME", help="one of the schemes above")
    how.add_argument("--group-size", type=positive, metavar="N", help="inputs per group, of integers (default: 128)")
    how.add_argument("--algorithm", default="rtn", metavar="NAME", help="one of the algorithms above (default: rtn)")
    how.add_argument(
        "--ignore", action="extend", nargs="+", default=[], metavar="NAME",
        help="matrices to leave in 16 bits: names as in the checkpoint, or re: and a regular expression; embeddings, "
        "lm_head, norms and routers always are",
    )  # fmt: skip
    how.add_argument("--search", action="store_true", help="with rtn: search the group scales of least squared error")
    how.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto",
        help="of what stays unquantized, and of scales (default: auto, the checkpoint's; bfloat16 for GGUF)",
    )  # fmt: skip
    how.add_argument("--shard-size", type=size, default=size("5g"), metavar="SIZE", help="of a file (default: 5g)")
    text = parser.add_argument_group("text")
    text.add_argument("--calibration", metavar="FILE", help="text to measure the layers' inputs on; not for rtn")
    text.add_argument("--samples", type=positive, default=128, metavar="N", help="sequences of it (default: 128)")
    text.add_argument("--sample-length", type=positive, default=512, metavar="N", help="their tokens (default: 512)")
    text.add_argument("--text", metavar="FILE", help="measure the perplexity before and after on this text")
    gptq = parser.add_argument_group("gptq")
    gptq.add_argument(
        "--damping", type=float, default=0.01, metavar="X",
        help="added to the diagonal of the inputs' moments, relative to its mean (default: 0.01)",
    )  # fmt: skip
    gptq.add_argument(
        "--actorder", choices=("weight", "none"), default="weight",
        help="order of the columns: weight: those with large inputs first; the file's layout is the same",
    )  # fmt: skip
    gptq.add_argument(
        "--correct", action="store_true",
        help="aim at the outputs of the unquantized model: layers make up for the errors of those before; half as long "
        "again",
    )  # fmt: skip
    add_engine_flags(parser, FLAGS)
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Quantize, and report."""
    from quire.api.evaluate import evaluate
    from quire.api.quantize import Calibration, QuantizeSettings, quantize_checkpoint
    from quire.config import EngineConfig
    from quire.quantization.writer import find_scheme

    config = EngineConfig(**engine_settings(args))
    calibration = None
    if args.calibration is not None:
        calibration = Calibration(read_text(args.calibration), args.samples, args.sample_length)
    settings = QuantizeSettings(
        find_scheme(args.scheme, args.group_size), args.algorithm, calibration if args.algorithm != "rtn" else None,
        tuple(args.ignore), args.search, args.damping, args.actorder == "weight", args.correct, args.shard_size,
    )  # fmt: skip
    text = None if args.text is None else read_text(args.text)
    output = Path(args.output)
    report = quantize_checkpoint(config, output, settings)
    described = settings.scheme.name + (f", groups of {settings.scheme.group}" if settings.scheme.group else "")
    rows = [
        ("scheme", f"{described}, {args.algorithm}"),
        ("matrices", f"{report.matrices} in few bits, {len(report.ignored)} left as they were"),
        ("size", readable_bytes(report.num_bytes)),
        ("error", f"{report.relative_error:.2%} of the matrices' root mean square"),
    ]
    if report.calibration_tokens:
        rows.append(("calibration", f"{report.calibration_tokens} tokens"))
    if text is not None:
        say("measuring the perplexity before and after")
        before = evaluate(dataclasses.replace(config, dtype=report.dtype), text)
        after = evaluate(dataclasses.replace(config, dtype=report.dtype, model=args.output), text)
        change = after.perplexity / before.perplexity - 1
        rows.append(("perplexity", f"{before.perplexity:.3f} before, {after.perplexity:.3f} after ({change:+.2%})"))
    print(table(rows, str(output)))
    return 0


def read_text(path: str) -> str:
    """The text of a file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValidationError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValidationError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
