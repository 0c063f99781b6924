"""`quire chat`: a chat in the terminal, or with questions from a pipe."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from quire.cli.adapters import add_lora_flag, lora_requests
from quire.cli.engine_flags import add_common, add_engine_flags, add_model, engine_settings, flag
from quire.cli.images import image_part
from quire.cli.parser import Parser
from quire.cli.sampling_flags import ONLY_FOR_BATCHES, add_sampling_flags, given_sampling, sampling_params
from quire.cli.terminal import say, use_line_editing
from quire.errors import QuireError, UnsupportedModelError

if TYPE_CHECKING:
    from quire.api.llm import LLM
    from quire.cli.conversation import LocalConversation
    from quire.cli.remote_conversation import RemoteConversation
    from quire.messages.sampling import SamplingParams

    Conversation = LocalConversation | RemoteConversation

WHAT = """\
Chat with a model in the terminal. Ctrl-C stops a reply, Ctrl-D exits, /help lists the commands.
With a pipe, every line is a question; replies go to stdout, notes to stderr. With --url, chat with the model of an
OpenAI-compatible server; only the sampling flags given on the command line are sent to it."""
EXAMPLES = """
  quire chat
  quire chat qwen3-0.6b --system "Answer in one sentence."
  quire chat ./my-model --temperature 0
  quire chat qwen3-0.6b --lora ./my-adapter
  quire chat --url http://gpu1:8000
  printf 'Who was Ada Lovelace?\\nWhen did she live?\\n' | quire chat --max-tokens 60
"""
COMMANDS = {
    "/help": "this list",
    "/reset": "forget the conversation",
    "/system TEXT": "set the system prompt; without TEXT, show it",
    "/image PATH": "add an image to the next question",
    "/stats": "metrics of the engine, or of this conversation with --url",
    "/exit": "exit (or Ctrl-D, or Ctrl-C at the prompt)",
}
KEYS = "/help lists commands, Ctrl-C stops a reply, Ctrl-D exits."
FALLBACK_SAMPLING = {"temperature": 0.7, "top_p": 0.9}
"""For models without sampling defaults: plain sampling from a small model rambles."""


def configure(parser: Parser) -> None:
    """The flags of `quire chat`."""
    parser.describe(run, WHAT, EXAMPLES, "[MODEL]")
    add_model(parser)
    chat = parser.add_argument_group("chat")
    chat.add_argument("--system", "--system-prompt", metavar="TEXT", help="system prompt")
    chat.add_argument(
        "--stats", action=argparse.BooleanOptionalAction, default=None,
        help="show the speed after each reply (default: on a terminal)",
    )  # fmt: skip
    server = parser.add_argument_group("server")
    server.add_argument("--url", metavar="URL", help="use this OpenAI-compatible server instead of running a model")
    server.add_argument("--api-key", metavar="KEY", help="API key of that server (default: $OPENAI_API_KEY)")
    add_sampling_flags(
        parser,
        without=ONLY_FOR_BATCHES,
        note="Models without defaults get temperature 0.7 and top-p 0.9. Replies may fill the context.",
    )
    add_lora_flag(parser)
    add_engine_flags(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Load the model and chat until the user exits."""
    if args.url is not None:
        return _run_remote(args)
    from quire.api.llm import LLM
    from quire.cli.conversation import LocalConversation

    if args.api_key is not None:
        args.parser.error("--api-key needs --url: a local model has no API key")
    interactive = sys.stdin.isatty()
    settings = engine_settings(args)
    adapters = lora_requests(args, settings)
    if interactive:
        say("loading the model …")
    with LLM(**settings) as llm:
        _need_template(llm)
        conversation = LocalConversation(llm, _params(args, llm), args.system, adapters)
        if interactive:
            _print_greeting(llm)
        return _chat(args, conversation, interactive)


def _run_remote(args: argparse.Namespace) -> int:
    """The same with the model of a server."""
    from quire.cli.remote_conversation import RemoteConversation

    settings = engine_settings(args)
    model, seed = settings.pop("model", None), settings.pop("seed", None)
    if settings:
        args.parser.error(
            f"{flag(next(iter(settings)))} is for a local model; with --url the server has its own setting"
        )
    if args.lora:
        args.parser.error("--lora is for a local model; with --url give the adapter's name as the model")
    fields = given_sampling(args)
    if fields.get("max_tokens") == -1:
        del fields["max_tokens"]
    if seed is not None:
        fields["seed"] = seed
    interactive = sys.stdin.isatty()
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    conversation = RemoteConversation(args.url, model, key, fields, args.system)
    try:
        if interactive:
            say(f"{conversation.model} at {conversation.url}. {KEYS}")
        return _chat(args, conversation, interactive)
    finally:
        conversation.close()


def _chat(args: argparse.Namespace, conversation: Conversation, interactive: bool) -> int:
    show_stats = interactive if args.stats is None else args.stats
    failures = sum(not _answer(conversation, line, show_stats) for line in _lines(interactive))
    return 2 if failures and not interactive else 0


def _params(args: argparse.Namespace, llm: LLM) -> SamplingParams:
    from quire.messages.sampling import RequestOutputKind, SamplingParams

    own = llm.get_default_sampling_params()
    fallback = FALLBACK_SAMPLING if own == SamplingParams() else {}
    limit = own.max_tokens if own.max_tokens != SamplingParams().max_tokens else None
    return sampling_params(args, own, max_tokens=limit, output_kind=RequestOutputKind.DELTA, **fallback)


def _need_template(llm: LLM) -> None:
    if llm.llm_engine.config.chat_template is None and not getattr(llm.get_tokenizer(), "chat_template", None):
        raise UnsupportedModelError(
            f"{llm.llm_engine.config.model} has no chat template: it completes text instead of answering. "
            "Use `quire generate`, or give a template with --chat-template"
        )


def _print_greeting(llm: LLM) -> None:
    info = llm.llm_engine.info
    say(f"{info.files.name} ({info.dtype}) on {info.device}; context {info.max_model_len} tokens. {KEYS}")


def _lines(interactive: bool) -> Iterator[str]:
    """Lines of input until it ends."""
    if not interactive:
        yield from (line.rstrip("\r\n") for line in sys.stdin)
        return
    use_line_editing([name.split()[0] for name in COMMANDS])
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            say()
            return


def _answer(conversation: Conversation, line: str, show_stats: bool) -> bool:
    """Run a command or answer a question; False if that failed. Raises SystemExit for /exit."""
    if not line.strip():
        return True
    if line.startswith("/"):
        return _run_command(conversation, line)
    try:
        reply = conversation.ask(line)
    except QuireError as error:
        say(f"quire: {error}")
        return False
    if show_stats:
        say(reply.describe())
    if reply.note:
        say(reply.note)
    return reply.error is None


def _run_command(conversation: Conversation, line: str) -> bool:
    name, _, rest = line.strip().partition(" ")
    if name == "/exit" or name == "/quit":
        raise SystemExit(0)
    if name == "/help":
        width = max(map(len, COMMANDS))
        say("\n".join(f"  {command:<{width}}  {what}" for command, what in COMMANDS.items()))
    elif name == "/reset":
        conversation.reset()
        say("the conversation is empty")
    elif name == "/system":
        if rest.strip():
            conversation.system = rest.strip()
        say(f"system prompt: {conversation.system or '(the template’s own)'}")
    elif name == "/image":
        return _add_image(conversation, rest.strip())
    elif name == "/stats":
        say(conversation.engine_stats())
    else:
        say(f"unknown command {name}; /help lists the commands")
        return False
    return True


def _add_image(conversation: Conversation, path: str) -> bool:
    try:
        conversation.images.append(image_part(path))
    except QuireError as error:
        say(f"quire: {error}")
        return False
    count = len(conversation.images)
    say(f"the next question has {count} image{'' if count == 1 else 's'}")
    return True
