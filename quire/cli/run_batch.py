"""`quire run-batch`: OpenAI batch files, answered by the server's own routes without a server."""

from __future__ import annotations

import argparse
import asyncio
import secrets
from typing import TYPE_CHECKING

from quire.cli.engine_flags import add_common, add_config_flags, add_engine_flags, add_model, engine_settings
from quire.cli.interrupts import cancelled_by_interrupt
from quire.cli.parser import Parser
from quire.cli.terminal import say
from quire.cli.values import positive
from quire.config import EngineConfig
from quire.server.config import ServerConfig

if TYPE_CHECKING:
    from quire.api.async_llm import AsyncLLM
    from quire.cli.batch.files import BatchInput, BatchOutput
    from quire.cli.batch.runner import BatchRunner

WHAT = """\
Answer a file of requests in OpenAI's batch shape: each line a JSON object with custom_id, method (POST), url and body.
Answers are written as they come, a line each; a line that is wrong gets an error and does not stop the others.
Run again with the same files, and only what has no answer yet is asked."""
EXAMPLES = """
  quire run-batch -i questions.jsonl -o answers.jsonl
  quire run-batch qwen3-0.6b -i in.jsonl -o out.jsonl --served-model-name my-model
  cat in.jsonl | quire run-batch -i - -o - > out.jsonl
"""
SERVER_SETTINGS = (
    "served_model_name", "enable_auto_tool_choice", "tool_call_parser", "enable_tool_preamble", "reasoning_parser",
    "exclude_tools_when_tool_choice_none", "trust_request_chat_template", "default_chat_template_kwargs",
    "max_samples", "max_prompts", "request_timeout",
)  # fmt: skip
"""The settings of the server that mean something without one."""
NO_LIMIT = 1 << 40
"""What waits is ours alone, and bounded by --max-concurrency."""


def configure(parser: Parser) -> None:
    """The flags of `quire run-batch`."""
    parser.describe(run, WHAT, EXAMPLES, "[MODEL] -i FILE -o FILE")
    add_model(parser)
    files = parser.add_argument_group("files")
    files.add_argument("-i", "--input-file", required=True, metavar="FILE", help="requests; - is standard input")
    files.add_argument("-o", "--output-file", required=True, metavar="FILE", help="answers; - is standard output")
    files.add_argument("--overwrite", action="store_true", help="begin the output anew instead of continuing it")
    files.add_argument(
        "--max-concurrency", type=positive, metavar="N",
        help="requests at once (default: twice what the engine runs at once)",
    )  # fmt: skip
    add_config_flags(parser, ServerConfig, "server: ", {}, only=SERVER_SETTINGS)
    add_engine_flags(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Answer the file."""
    from quire.api.async_llm import AsyncLLM
    from quire.cli.batch.files import BatchInput, BatchOutput

    key = secrets.token_hex(16)  # whatever the environment says of keys, we have one
    given = {name: getattr(args, name) for name in SERVER_SETTINGS if hasattr(args, name)}
    config = ServerConfig(
        api_key=(key,), max_queued_requests=NO_LIMIT, max_queued_tokens=NO_LIMIT, max_body_bytes=NO_LIMIT, **given
    )
    engine = EngineConfig(**engine_settings(args))
    with BatchInput(args.input_file) as source, BatchOutput(args.output_file, args.overwrite) as output:
        say("loading the model …")
        llm = AsyncLLM.from_config(engine, spares_torch=True)
        try:
            batch, was_stopped = asyncio.run(_answer(llm, config, key, args.max_concurrency, source, output))
        finally:
            llm.shutdown()
    return _report(batch, was_stopped)


async def _answer(
    llm: AsyncLLM, config: ServerConfig, key: str, concurrency: int | None, source: BatchInput, output: BatchOutput
) -> tuple[BatchRunner, bool]:
    from quire.cli.batch.runner import BatchRunner
    from quire.cli.bench.load.client import RunCounters
    from quire.cli.bench.load.drive import LoadProgress
    from quire.server.app import make_app
    from quire.server.serve import make_server

    server = await make_server(llm, config)
    rows = llm.info.max_num_seqs * len(llm.replicas)
    batch = BatchRunner(make_app(server), key, concurrency or 2 * rows, RunCounters())
    await server.start()
    was_stopped = False
    try:
        async with LoadProgress(batch.tally, source.total, "answering"):
            with cancelled_by_interrupt():
                await batch.run(source, output)
    except asyncio.CancelledError:
        was_stopped = True
    finally:
        await server.stop()
    return batch, was_stopped


def _report(batch: BatchRunner, was_stopped: bool) -> int:
    tally = batch.tally
    already = f", {batch.skipped} had been before" if batch.skipped else ""
    say(f"{tally.done - tally.failed} answered, {tally.failed} failed{already}")
    if was_stopped:
        say("stopped; the same command goes on where this ended")
        return 130
    return 1 if tally.failed else 0
