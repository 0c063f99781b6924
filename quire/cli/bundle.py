"""`quire bundle`: a model as one file that starts on a machine without network."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.engine_flags import add_common, add_engine_flags, add_model, engine_settings
from quire.cli.parser import Parser
from quire.cli.terminal import say
from quire.cli.values import readable_bytes
from quire.errors import ValidationError

if TYPE_CHECKING:
    from quire.loading.files import ModelFiles

WHAT = """\
Write a model (downloaded if necessary) into one file: its weights as they are, configuration, tokenizer and template,
with a manifest of digests. The file can be given wherever a model can: quire serve FILE, quire chat FILE. Weights are
read from it in place. To bundle weights in few bits, run quire quantize first, or bundle a GGUF file."""
EXAMPLES = """
  quire bundle -o smollm2.quire             the default model
  quire bundle qwen3-0.6b -o qwen3.quire
  quire serve qwen3.quire
  quire inspect qwen3.quire                 compares all digests
"""
FLAGS = ("model", "revision", "hf_token", "download_dir")
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "NOTICE*")
"""Files beside the weights that a model may need, or that must go with it."""


def configure(parser: Parser) -> None:
    """The flags of `quire bundle`."""
    parser.describe(run, WHAT, EXAMPLES, "[MODEL] -o FILE")
    add_model(parser)
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the file to write")
    parser.add_argument("--force", action="store_true", help="overwrite FILE if it exists")
    add_engine_flags(parser, FLAGS)
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Write the bundle and print its path."""
    from quire import __version__
    from quire.config import EngineConfig
    from quire.loading.bundle import write_bundle
    from quire.loading.hub import find_model

    output = Path(args.output)
    if output.exists() and not args.force:
        raise ValidationError(f"{output} exists: give another -o, or --force")
    if not output.parent.is_dir():
        raise ValidationError(f"-o {output}: there is no folder {output.parent}")
    config = EngineConfig(**engine_settings(args))
    sources = bundled_files(find_model(config))
    try:
        name = Path(config.model).name if Path(config.model).exists() else config.model  # no path of this machine
        manifest = write_bundle(output, sources, name, __version__)
    except OSError as error:
        raise ValidationError(f"-o {output}: {error.strerror}") from error
    total = sum(entry["bytes"] for entry in manifest["files"].values())
    say(f"{config.model}: {len(sources)} files, {readable_bytes(total)}")
    print(output)
    return 0


def bundled_files(files: ModelFiles) -> dict[str, Path]:
    """The files of a model, by the names they get in its bundle."""
    if files.bundle is not None:
        raise ValidationError(f"{files.path} is a bundle already")
    if files.kind not in ("safetensors", "gguf"):
        raise ValidationError(
            f"{files.path} has {files.kind or 'no'} weights, and bundles hold safetensors or GGUF: save them as "
            "safetensors first (save_pretrained of transformers does)"
        )
    found = {path.name: path for path in files.weight_files(files.kind)}
    if files.folder is not None:
        found |= {path.name: path for one in SMALL_FILES for path in sorted(files.folder.glob(one)) if path.is_file()}
    return found
