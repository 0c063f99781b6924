"""The `quire` command: runs a subcommand, and turns errors into one line and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from quire import __version__
from quire.cli.init_process import fork_if_first
from quire.cli.parser import Parser
from quire.errors import QuireError
from quire.resource_limits import out_of_memory_reason

COMMANDS = {
    "serve": "serve a model over HTTP with OpenAI's API",
    "chat": "chat with a model in the terminal",
    "generate": "complete prompts",
    "run-batch": "run a file of requests in OpenAI's batch format",
    "bench": "measure throughput, latency or KV cache waste, or load-test a server",
    "simulate": "predict throughput and latency of a load on a fleet, without a device",
    "calibrate": "measure how long steps take on this device, for simulate",
    "pull": "download a model and print where it is",
    "bundle": "write a model into one file that needs no network",
    "inspect": "describe a model and the memory it needs, or show the memory of a server",
    "top": "watch a server: rates, rows, blocks, and why requests wait",
    "quantize": "write a model's checkpoint in few bits",
    "train-draft": "train a head that drafts tokens for a model, for speculative decoding",
    "eval": "measure the perplexity of a model, and its distance from another",
    "sessions": "list, show, delete, export or import stored sessions",
    "replay": "rerun the steps of a recorded run and compare the sampled tokens",
    "tune": "measure which GPU kernels are fastest for a model, and store the result",
    "env": "show versions, devices and caches, for a bug report",
}
"""Each is a module of this package, imported only when it runs."""

DESCRIPTION = "An inference engine for large language models."
EXAMPLES = """\
examples:
  quire chat                                  chat with the default model, smollm2-135m
  quire chat qwen3-0.6b                       an alias; or a Hub id, a folder, a .gguf file
  quire serve                                 serve it with OpenAI's API on http://127.0.0.1:8000
  quire generate "Once upon a time" --max-tokens 50
  quire inspect llama3.2-1b

`quire COMMAND --help` shows a command's own flags."""

OK, UNEXPECTED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def make_parser(command: str | None) -> Parser:
    """The parser with all commands; only `command` gets its flags, so that help needs no slow imports."""
    parser = Parser(prog="quire", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, summary in COMMANDS.items():
        subparser = commands.add_parser(name, help=summary)
        if name == command:
            import_module("quire.cli." + name.replace("-", "_")).configure(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `quire` with these arguments (None: those of the process); returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        return _run(arguments)
    except QuireError as error:
        if debug:
            traceback.print_exc()
        _print_error(f"error: {error}")
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has exited; avoid an error when the interpreter flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNEXPECTED
    except Exception as error:
        if debug:
            raise
        if reason := out_of_memory_reason(error):
            _print_error(f"error: {reason}")
            return BAD_INPUT
        _print_error(f"unexpected error: {type(error).__name__}: {error} (--debug shows where)")
        return UNEXPECTED


def _run(arguments: list[str]) -> int:
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    if command == "serve":
        fork_if_first()
    parser = make_parser(command)
    args = parser.parse(arguments)
    if args.command is None:
        parser.print_help()
        return OK
    if hasattr(args, "log_level"):
        from quire.cli.terminal import set_up_logging

        set_up_logging(args.log_level)
    code: int = args.run(args)
    return code


def _print_error(message: str) -> None:
    sys.stdout.flush()
    print(f"quire: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
