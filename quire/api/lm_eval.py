"""Runs tasks of EleutherAI's lm-eval (`pip install lm-eval`) on an engine: an adapter to its `LM` class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.api.inputs import PromptType, TokensPrompt
from quire.api.llm import LLM
from quire.errors import ConfigError
from quire.messages.sampling import SamplingParams

PACKAGE = "lm-eval"
MAX_TOKENS = 256
"""Of a generation whose task gives no limit."""


def run_tasks(
    settings: Mapping[str, Any], tasks: Sequence[str], limit: int | None = None, num_fewshot: int | None = None
) -> dict[str, dict[str, Any]]:
    """The metrics of each task. `settings`: of the engine; `limit`: documents of each task."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.api.model import LM
    except ImportError as error:
        raise ConfigError(f"tasks need the package {PACKAGE}: pip install {PACKAGE} ({error})") from error

    class EngineLM(LM):
        """lm-eval's three kinds of requests, by `Scorer`."""

        def __init__(self, scorer: Scorer) -> None:
            super().__init__()
            self._scorer = scorer

        def loglikelihood(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return self._scorer.continuations([request.args for request in requests])

        def loglikelihood_rolling(self, requests: Any, **_: Any) -> list[float]:
            return self._scorer.texts([request.args[0] for request in requests])

        def generate_until(self, requests: Any, **_: Any) -> list[str]:
            return self._scorer.generations([request.args for request in requests])

    with LLM(**settings) as llm:
        found = simple_evaluate(
            model=EngineLM(Scorer(llm)), tasks=list(tasks), limit=limit, num_fewshot=num_fewshot, bootstrap_iters=0
        )
    results: dict[str, dict[str, Any]] = found["results"]
    return results


class Scorer:
    """Log-likelihoods and greedy continuations of texts, from an engine."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._tokenizer = llm.get_tokenizer()
        self._max_len = llm.llm_engine.info.max_model_len

    def continuations(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """For each (context, continuation): the latter's log-likelihood, and whether greedy decoding yields it."""
        prompts, starts = [], []
        for context, continuation in pairs:
            before, whole = self._split(context, continuation)
            cut = max(0, len(whole) - (self._max_len - 1))  # the context's beginning is dropped
            prompts.append(whole[cut:])
            starts.append(max(1, before - cut))
        return [self._sum(entry, start) for entry, start in zip(self._prompt_logprobs(prompts), starts, strict=True)]

    def texts(self, texts: Sequence[str]) -> list[float]:
        """The log-likelihood of each text, in pieces of the model's length that do not overlap."""
        prefix = self._prefix()
        room = self._max_len - 1 - len(prefix)
        sums = []
        for text in texts:
            tokens = self._encode(text)
            pieces = [prefix + tokens[at : at + room] for at in range(0, len(tokens), room)]
            scored = self._prompt_logprobs(pieces)
            sums.append(sum(self._sum(entry, len(prefix))[0] for entry in scored))
        return sums

    def generations(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """The text that follows each prompt, up to one of its stop strings."""
        prompts: list[PromptType] = []
        params: list[SamplingParams] = []
        for text, options in requests:
            limit = int(options.get("max_gen_toks", options.get("max_new_tokens", MAX_TOKENS)))
            until = options.get("until") or []
            stops = [until] if isinstance(until, str) else list(until)
            sampled = bool(options.get("do_sample", False))
            prompts.append(TokensPrompt(prompt_token_ids=self._prompt(text)[-(self._max_len - limit) :]))
            params.append(
                SamplingParams(
                    temperature=float(options.get("temperature", 0.0)) if sampled else 0.0,
                    max_tokens=limit,
                    stop=stops,
                )
            )
        return [output.outputs[0].text for output in self._llm.generate(prompts, params)]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _prefix(self) -> list[int]:
        """What comes before a text without context: the token that begins texts, else the one that ends them."""
        begin = self._tokenizer.bos_token_id
        return [self._tokenizer.eos_token_id if begin is None else begin]

    def _prompt(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"]) or self._prefix()

    def _split(self, context: str, continuation: str) -> tuple[int, list[int]]:
        """(tokens of the context, tokens of both): spaces at the context's end belong to the continuation's first."""
        kept = context.rstrip()
        before = self._prompt(kept)
        whole = self._prompt(context + continuation) if kept else before + self._encode(context + continuation)
        return min(len(before), len(whole) - 1), whole

    def _prompt_logprobs(self, prompts: Sequence[list[int]]) -> list[Any]:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
        given: list[PromptType] = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = self._llm.generate(given, params)
        return [(output.prompt_token_ids, output.prompt_logprobs) for output in outputs]

    @staticmethod
    def _sum(entry: Any, start: int) -> tuple[float, bool]:
        tokens, logprobs = entry
        own = [logprobs[place][tokens[place]] for place in range(start, len(tokens))]
        return sum(each.logprob for each in own), all(each.rank == 1 for each in own)
