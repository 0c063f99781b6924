"""`quire generate`: completes prompts from the command line or a pipe."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from quire.cli.adapters import add_lora_flag, lora_requests
from quire.cli.engine_flags import add_common, add_engine_flags, engine_settings
from quire.cli.images import image_part, with_images
from quire.cli.parser import Parser
from quire.cli.sampling_flags import add_sampling_flags, sampling_params
from quire.cli.terminal import say
from quire.errors import ValidationError

if TYPE_CHECKING:
    from quire.api.inputs import PromptType
    from quire.api.llm import LLM, Message
    from quire.messages.lora import LoRARequest
    from quire.messages.outputs import CompletionOutput, RequestOutput
    from quire.messages.sampling import SamplingParams

WHAT = """\
Complete prompts. One prompt streams its text to stdout; several prompts or sequences are printed when all are done.
The prompt - reads standard input."""
EXAMPLES = """
  quire generate "The capital of France is" --temperature 0 --max-tokens 8
  quire generate "Once upon a time" --n 3 --seed 7
  quire generate "One prompt" "Another" --json | jq -r '.outputs[0].text'
  quire generate "What is in the picture?" --chat --image cat.png --model qwen2.5-vl-3b
  cat question.txt | quire generate - --chat --model qwen3-0.6b
"""
MAX_TOKENS = 128


def configure(parser: Parser) -> None:
    """The flags of `quire generate`."""
    parser.describe(run, WHAT, EXAMPLES, "PROMPT...")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="text to complete; - is standard input")
    how = parser.add_argument_group("prompts and output")
    how.add_argument("--chat", action="store_true", help="each prompt is a question: use the model's chat template")
    how.add_argument("--system", metavar="TEXT", help="system prompt, with --chat")
    how.add_argument(
        "--image", metavar="FILE", action="append", default=[],
        help="an image of every question, with --chat; may be given several times. Without --chat, prompts have the "
        "model's own placeholders",
    )  # fmt: skip
    how.add_argument("--json", action="store_true", help="one line of JSON per prompt, with token ids and logprobs")
    add_sampling_flags(parser, note=f"max-tokens is {MAX_TOKENS}; -1: as many as the context allows.")
    add_lora_flag(parser)
    add_engine_flags(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Generate and print."""
    from quire.api.llm import LLM

    if args.system is not None and not args.chat:
        args.parser.error("--system needs --chat: a plain prompt has no system message")
    prompts = [_read(prompt) for prompt in args.prompts]
    settings = engine_settings(args)
    adapters = lora_requests(args, settings)
    with LLM(**settings) as llm:
        params = sampling_params(args, llm.get_default_sampling_params(), max_tokens=MAX_TOKENS)
        images = [image_part(file) for file in args.image] if args.chat else []
        conversations = [_conversation(prompt, args.system, images) for prompt in prompts] if args.chat else None
        given = [_with_files(prompt, args.image) for prompt in prompts]
        if len(prompts) == 1 and params.n == 1 and not args.json:
            return _stream(llm, given[0], conversations, params, adapters)
        loras = [adapters] * len(prompts)
        if conversations is None:
            outputs = llm.generate(given, params, lora_request=loras)
        else:
            outputs = llm.chat(conversations, params, lora_request=loras)
    for prompt, output in zip(prompts, outputs, strict=True):
        if args.json:
            print(json.dumps(_as_dict(prompt, output), ensure_ascii=False))
        else:
            _print(prompt, output)
    return 1 if any(output.error for output in outputs) else 0


def _read(prompt: str) -> str:
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise ValidationError("the prompt is empty" + (": standard input is empty" if prompt == "-" else ""))
    return text


def _conversation(prompt: str, system: str | None, images: list[dict[str, Any]]) -> list[Message]:
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*opening, {"role": "user", "content": with_images(prompt, images)}]


def _with_files(prompt: str, images: list[str]) -> PromptType:
    return {"prompt": prompt, "multi_modal_data": {"image": list(map(Path, images))}} if images else prompt


def _stream(
    llm: LLM,
    prompt: PromptType,
    conversations: list[list[Message]] | None,
    params: SamplingParams,
    adapters: list[LoRARequest] | None,
) -> int:
    from quire.messages.sampling import RequestOutputKind

    params.output_kind = RequestOutputKind.DELTA
    if conversations is None:
        outputs = llm.stream(prompt, params, lora_request=[adapters])
    else:
        outputs = llm.chat_stream(conversations[0], params, lora_request=[adapters])
    error = None
    for output in outputs:
        print(output.outputs[0].text, end="", flush=True)
        error = output.error
    print()
    if error is not None:
        say(f"quire: error: {error}")
    return 1 if error else 0


def _print(prompt: str, output: RequestOutput) -> None:
    for sequence in output.outputs:
        which = f" (sequence {sequence.index + 1})" if len(output.outputs) > 1 else ""
        print(f"── {_one_line(prompt)}{which}")
        print(sequence.text.strip("\n"))
        if sequence.finish_reason == "error":
            say(f"quire: error: {output.error}")


def _one_line(text: str, width: int = 72) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def _as_dict(prompt: str, output: RequestOutput) -> dict[str, Any]:
    """An output for --json."""
    result: dict[str, Any] = {
        "prompt": prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "num_cached_tokens": output.num_cached_tokens,
        "outputs": [_sequence_as_dict(sequence) for sequence in output.outputs],
    }
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = [_position(position) for position in output.prompt_logprobs]
    if output.error is not None:
        result["error"] = output.error
    return result


def _sequence_as_dict(sequence: CompletionOutput) -> dict[str, Any]:
    result: dict[str, Any] = {
        "index": sequence.index,
        "text": sequence.text,
        "token_ids": list(sequence.token_ids),
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.stop_reason,
    }
    if sequence.logprobs is not None:
        result["cumulative_logprob"] = sequence.cumulative_logprob
        result["logprobs"] = [_position(position) for position in sequence.logprobs]
    return result


def _position(logprobs: dict[int, Any] | None) -> list[dict[str, Any]] | None:
    """Tokens of one position, the actual one first."""
    return None if logprobs is None else [{"token_id": token} | asdict(entry) for token, entry in logprobs.items()]
