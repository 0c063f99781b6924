"""`quire chat`: a conversation in the terminal, or with questions from a pipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from quire.cli.engine_flags import add_common, add_engine_flags, add_model, engine_settings
from quire.cli.parser import Parser
from quire.cli.sampling_flags import ONLY_FOR_BATCHES, add_sampling_flags, sampling_params
from quire.cli.terminal import say, use_line_editing
from quire.errors import QuireError, UnsupportedModelError

if TYPE_CHECKING:
    from quire.api.llm import LLM
    from quire.cli.conversation import Conversation
    from quire.messages.sampling import SamplingParams

WHAT = """\
Talk with a model in the terminal. Ctrl-C stops a reply, Ctrl-D leaves, /help lists what else there is.
With a pipe, every line is a question; replies go to stdout, remarks to stderr."""
EXAMPLES = """
  quire chat
  quire chat qwen3-0.6b --system "Answer in one sentence."
  quire chat ./my-model --temperature 0
  printf 'Who was Ada Lovelace?\\nWhen did she live?\\n' | quire chat --max-tokens 60
"""
COMMANDS = {
    "/help": "this list",
    "/reset": "forget the conversation",
    "/system TEXT": "set the system prompt; without TEXT, show it",
    "/stats": "what the engine has done so far",
    "/exit": "leave (so do Ctrl-D, and Ctrl-C at the prompt)",
}
GENTLE = {"temperature": 0.7, "top_p": 0.9}
"""For models whose author names no sampling defaults: plain sampling from a small model rambles."""


def configure(parser: Parser) -> None:
    """The flags of `quire chat`."""
    parser.describe(run, WHAT, EXAMPLES, "[MODEL]")
    add_model(parser)
    chat = parser.add_argument_group("chat")
    chat.add_argument("--system", "--system-prompt", metavar="TEXT", help="system prompt")
    chat.add_argument(
        "--stats", action=argparse.BooleanOptionalAction, default=None,
        help="a line about speed after each reply (default: on a terminal)",
    )  # fmt: skip
    add_sampling_flags(
        parser,
        without=ONLY_FOR_BATCHES,
        note="A model without any gets temperature 0.7 and top-p 0.9. Replies may fill the context.",
    )
    add_engine_flags(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Load the model and talk until the user leaves."""
    from quire.api.llm import LLM
    from quire.cli.conversation import Conversation

    interactive = sys.stdin.isatty()
    settings = engine_settings(args)
    if interactive:
        say("loading the model …")
    with LLM(**settings) as llm:
        _need_template(llm)
        conversation = Conversation(llm, _params(args, llm), args.system)
        if interactive:
            _greet(llm)
        show_stats = interactive if args.stats is None else args.stats
        failures = sum(not _answer(conversation, line, show_stats) for line in _lines(interactive))
    return 2 if failures and not interactive else 0


def _params(args: argparse.Namespace, llm: LLM) -> SamplingParams:
    from quire.messages.sampling import RequestOutputKind, SamplingParams

    own = llm.get_default_sampling_params()
    gentle = GENTLE if own == SamplingParams() else {}
    limit = own.max_tokens if own.max_tokens != SamplingParams().max_tokens else None
    return sampling_params(args, own, max_tokens=limit, output_kind=RequestOutputKind.DELTA, **gentle)


def _need_template(llm: LLM) -> None:
    if llm.llm_engine.config.chat_template is None and not getattr(llm.get_tokenizer(), "chat_template", None):
        raise UnsupportedModelError(
            f"{llm.llm_engine.config.model} has no chat template: it completes text rather than answering. "
            "Use `quire generate`, or give a template with --chat-template"
        )


def _greet(llm: LLM) -> None:
    facts = llm.llm_engine.facts
    say(
        f"{facts.files.name} ({facts.dtype}) on {facts.device}; context {facts.max_model_len} tokens. "
        "/help lists commands, Ctrl-C stops a reply, Ctrl-D leaves."
    )


def _lines(interactive: bool) -> Iterator[str]:
    """What the user types, until the end of it."""
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
    """Do what one line asks for; False if that failed. Raises SystemExit for /exit."""
    if not line.strip():
        return True
    if line.startswith("/"):
        return _obey(conversation, line)
    try:
        reply = conversation.ask(line)
    except QuireError as error:
        say(f"quire: {error}")
        return False
    if show_stats:
        say(reply.describe())
    if reply.remark:
        say(reply.remark)
    return reply.error is None


def _obey(conversation: Conversation, line: str) -> bool:
    name, _, rest = line.strip().partition(" ")
    if name == "/exit" or name == "/quit":
        raise SystemExit(0)
    if name == "/help":
        width = max(map(len, COMMANDS))
        say("\n".join(f"  {command:<{width}}  {what}" for command, what in COMMANDS.items()))
    elif name == "/reset":
        conversation.reset()
        say("the conversation is empty again")
    elif name == "/system":
        if rest.strip():
            conversation.system = rest.strip()
        say(f"system prompt: {conversation.system or '(the template’s own)'}")
    elif name == "/stats":
        say(conversation.engine_stats())
    else:
        say(f"there is no {name}; /help lists the commands")
        return False
    return True
