"""`quire run-batch`: runs OpenAI batch files through the server's routes, without a server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import secrets
import socket
from typing import TYPE_CHECKING

from quire import vllm_arguments
from quire.api import vllm_environment
from quire.cli.engine_flags import (
    add_common,
    add_config_flags,
    add_engine_flags,
    add_foreign_flags,
    add_model,
    engine_settings,
)
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
Run a file of requests in OpenAI's batch format: each line a JSON object with custom_id, method (POST), url and body.
Results are written in the order of the lines; a line that fails gets an error and does not stop the others. The exit
code is 0 unless a line is no request. Run again with the same files to continue with lines that have no result."""
EXAMPLES = """
  quire run-batch -i questions.jsonl -o answers.jsonl
  quire run-batch qwen3-0.6b -i in.jsonl -o out.jsonl --served-model-name my-model
  cat in.jsonl | quire run-batch -i - -o - > out.jsonl
"""
SERVER_SETTINGS = (
    "served_model_name", "lora_modules", "accept_any_model_name", "enable_auto_tool_choice", "tool_call_parser",
    "enable_tool_preamble",
    "reasoning_parser", "exclude_tools_when_tool_choice_none", "trust_request_chat_template",
    "default_chat_template_kwargs", "max_samples", "max_prompts", "request_timeout", "host", "port",
)  # fmt: skip
"""Server settings that apply to batches; the last two to their metrics."""
logger = logging.getLogger(__name__)
NO_LIMIT = 1 << 40
"""No queue limit is needed: --max-concurrency limits the requests."""


def configure(parser: Parser) -> None:
    """The flags of `quire run-batch`."""
    parser.describe(run, WHAT, EXAMPLES, "[MODEL] -i FILE -o FILE")
    add_model(parser)
    files = parser.add_argument_group("files")
    files.add_argument("-i", "--input-file", required=True, metavar="FILE", help="requests; - is standard input")
    files.add_argument("-o", "--output-file", required=True, metavar="FILE", help="responses; - is standard output")
    files.add_argument("--overwrite", action="store_true", help="replace the output file instead of continuing it")
    files.add_argument(
        "--max-concurrency", "--max-inflight", type=positive, metavar="N",
        help="requests at once (default: twice the engine's max_num_seqs)",
    )  # fmt: skip
    watching = parser.add_argument_group("metrics")
    watching.add_argument(
        "--enable-metrics",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="answer HTTP requests at --host and --port with metrics meanwhile",
    )
    watching.add_argument("--url", dest="host", metavar="HOST", default=argparse.SUPPRESS, help="same as --host")
    add_config_flags(parser, ServerConfig, "server: ", {}, only=SERVER_SETTINGS)
    add_engine_flags(parser)
    add_foreign_flags(parser, {**vllm_arguments.BATCH, **vllm_arguments.SERVER})
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Run the file."""
    from quire.api.async_llm import AsyncLLM
    from quire.cli.batch.files import BatchInput, BatchOutput
    from quire.server.serve import check_modules, listening, load_modules

    key = secrets.token_hex(16)  # independent of API keys in the environment
    environment = vllm_environment.read(os.environ)
    environment.report(logger)
    settings = {**environment.of(ServerConfig), **vars(args)}
    given = {name: settings[name] for name in SERVER_SETTINGS if name in settings}
    config = ServerConfig(
        api_key=(key,),
        max_queued_requests=NO_LIMIT,
        max_queued_tokens=NO_LIMIT,
        max_body_bytes=NO_LIMIT,
        max_body_values=NO_LIMIT,
        max_prompt_logprobs=NO_LIMIT,
        **given,
    )
    engine = EngineConfig(**environment.of(EngineConfig) | engine_settings(args))
    check_modules(engine, config)
    # A port in use ends the command here, before the model is loaded.
    metrics = listening(config) if args.enable_metrics else contextlib.nullcontext()
    with (
        metrics as bound,
        BatchInput(args.input_file) as source,
        BatchOutput(args.output_file, args.overwrite) as output,
    ):
        say("loading the model …")
        llm = AsyncLLM.from_config(engine, spares_torch=True)
        try:
            load_modules(llm, config)
            batch, was_stopped = asyncio.run(_run_batch(llm, config, key, args.max_concurrency, bound, source, output))
        finally:
            llm.shutdown()
    return _report(batch, was_stopped)


async def _run_batch(
    llm: AsyncLLM,
    config: ServerConfig,
    key: str,
    concurrency: int | None,
    bound: tuple[socket.socket, str] | None,
    source: BatchInput,
    output: BatchOutput,
) -> tuple[BatchRunner, bool]:
    """`bound`: where metrics are asked for, and the address."""
    from quire.cli.batch.metrics_listener import metrics_listener
    from quire.cli.batch.runner import BatchRunner
    from quire.cli.bench.load.client import RunCounters
    from quire.cli.bench.load.drive import LoadProgress
    from quire.server.app import make_app
    from quire.server.context import ServerContext

    server = ServerContext(llm, config)
    rows = llm.info.max_num_seqs * len(llm.replicas)
    batch = BatchRunner(make_app(server), key, concurrency or 2 * rows, RunCounters())
    await server.start()
    was_stopped = False
    try:
        async with contextlib.AsyncExitStack() as around:
            if bound is not None:
                sock, address = bound
                await around.enter_async_context(metrics_listener(sock, server.metrics.page))
                say(f"metrics at {address}/metrics")
            await around.enter_async_context(LoadProgress(batch.counters, source.total, "running"))
            with cancelled_by_interrupt():
                await batch.run(source, output)
    except asyncio.CancelledError:
        was_stopped = True
    finally:
        await server.stop()
    return batch, was_stopped


def _report(batch: BatchRunner, was_stopped: bool) -> int:
    counters = batch.counters
    already = f", {batch.skipped} done before" if batch.skipped else ""
    say(f"{counters.done - counters.failed} completed, {counters.failed} failed{already}")
    if was_stopped:
        say("stopped; run the same command again to continue")
        return 130
    if batch.invalid:
        say(f"{batch.invalid} lines are no requests")
        return 1
    return 0
