"""`quire pull`: download a model."""

from __future__ import annotations

import argparse

from quire.cli.engine_flags import add_common, add_engine_flags, add_model, engine_settings
from quire.cli.parser import Parser
from quire.cli.terminal import say
from quire.cli.values import readable_bytes

WHAT = "Download a model if necessary, and print the path of its file or folder."
EXAMPLES = """
  quire pull                            the default model
  quire pull qwen3-0.6b
  quire pull bartowski/Llama-3.2-1B-Instruct-GGUF:Q8_0
"""
FLAGS = ("model", "revision", "hf_token", "download_dir", "trust_remote_code")


def configure(parser: Parser) -> None:
    """The flags of `quire pull`."""
    parser.describe(run, WHAT, EXAMPLES, "[MODEL]")
    add_model(parser)
    add_engine_flags(parser, FLAGS)
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Find or download the model and print its path."""
    from quire.config import EngineConfig
    from quire.loading.bundle import locate
    from quire.loading.hub import find_model

    config = EngineConfig(**engine_settings(args))
    files = find_model(config)
    weights = files.weight_files(files.kind) if files.kind else ()
    say(f"{config.model}: {files.kind or 'no'} weights, {readable_bytes(sum(locate(path).size for path in weights))}")
    print(files.path)
    return 0
