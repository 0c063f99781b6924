"""`quire calibrate`: measures how long steps take on this machine, and writes a cost model for `quire simulate`."""

from __future__ import annotations

import argparse
import re
import time

from quire.cli.engine_flags import add_common, add_engine_flags, engine_settings
from quire.cli.parser import Parser
from quire.cli.values import output_file, positive
from quire.errors import ValidationError

WHAT = """\
Load a model, run batches of many sizes and context lengths, and fit the cost model that `quire simulate` takes with
--profile. Leave the machine alone meanwhile: other load is measured too."""
SWAP_SPACE = 1.0
"""GiB of host memory, if the user names none: so that copies to and from it are measured."""
EXAMPLES = """
  quire calibrate -o laptop.json
  quire calibrate --model qwen3-0.6b --max-model-len 8K -o qwen3.json
  quire simulate --profile laptop.json --request-rate 0.5 --num-prompts 50
"""


def configure(parser: Parser) -> None:
    """The flags of `quire calibrate`."""
    from quire.simulation.calibration import DEFAULT_SECONDS, DEFAULT_TOKENS

    parser.describe(run, WHAT, EXAMPLES)
    parser.add_argument("-o", "--output", type=output_file, required=True, metavar="FILE", help="where to write it")
    parser.add_argument("--name", metavar="NAME", help="name of the cost model (default: device and model)")
    tokens = f"most prompt tokens to compute in each part (default: {DEFAULT_TOKENS})"
    parser.add_argument("--tokens", type=positive, default=DEFAULT_TOKENS, metavar="N", help=tokens)
    seconds = f"about how long to measure, without loading the model (default: {DEFAULT_SECONDS:g})"
    parser.add_argument("--seconds", type=positive, default=DEFAULT_SECONDS, metavar="S", help=seconds)
    cpu_time = "time steps by this process's CPU seconds: for a CPU that others use too, with --threads 1"
    parser.add_argument("--cpu-time", action="store_true", help=cpu_time)
    add_engine_flags(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, fit, write."""
    from quire import LLM
    from quire.simulation.calibration import calibrate
    from quire.simulation.costs import write_profile

    settings = engine_settings(args)
    if settings.get("data_parallel_size", 1) > 1:
        raise ValidationError("a cost model is that of one replica: leave out --data-parallel-size")
    if settings.get("load_format") == "dummy":
        settings.setdefault("skip_tokenizer_init", True)
    settings.setdefault("swap_space", SWAP_SPACE)
    clock = time.process_time if args.cpu_time else time.perf_counter
    if args.cpu_time and (settings.get("device") == "cuda" or settings.get("threads") != 1):
        raise ValidationError("--cpu-time measures one thread of a CPU: add --threads 1, and leave out GPUs")
    llm = LLM(**settings)
    try:
        info = llm.llm_engine.info
        made = re.sub(r"[^a-z0-9.]+", "-", f"{info.device}-{info.files.name}".lower())
        name = args.name or re.sub(r"^(nvidia|amd|intel)-", "", made)
        source = f"quire calibrate, {info.files.name} on {info.device} in {info.dtype}"
        if args.cpu_time and "cuda" in info.device.lower():
            raise ValidationError("--cpu-time does not measure a GPU: add --device cpu")
        source += ", one thread, in CPU seconds" if args.cpu_time else ""
        model = calibrate(llm, name, source, args.tokens, args.seconds, clock=clock)
    finally:
        llm.shutdown()
    write_profile(args.output, model)
    print(f"{args.output}: median error {100 * (model.error or 0.0):.1f}% over the measured steps")
    return 0
