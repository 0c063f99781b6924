"""Engines whose answers are compared with those of PEFT on transformers, over tiny random models."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PretrainedConfig

from quire import LLM, SamplingParams
from quire.messages.lora import LoRARequest
from tests.models.harness import random_reference

TOP = 5
"""Logprobs that are compared at each position."""


class Base:
    """A random model in a folder, and adapters for it that PEFT has written."""

    def __init__(self, folder: Path, config: PretrainedConfig, seed: int = 0) -> None:
        self._begin(folder, random_reference(config, seed))
        self.reference.config.architectures = [type(self.reference).__name__]
        self.reference.save_pretrained(folder / "base")

    @classmethod
    def of(cls, folder: Path, reference: Any) -> Base:
        """Of a transformers model that is saved in `folder`/base already."""
        made = cls.__new__(cls)
        made._begin(folder, reference)
        return made

    def _begin(self, folder: Path, reference: Any) -> None:
        self.folder, self.reference = folder, reference
        self._tuned: dict[str, PeftModel] = {}
        self.loras: dict[str, LoRARequest] = {}

    @property
    def path(self) -> str:
        return str(self.folder / "base")

    def adapter(
        self, name: str, rank: int = 4, seed: int | None = None, size: float = 1 / 3, **settings: Any
    ) -> LoRARequest:
        """An adapter with random values of this size, large enough to change what is generated."""
        number = len(self.loras) + 1
        torch.manual_seed(number if seed is None else seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tuned = get_peft_model(copy.deepcopy(self.reference), LoraConfig(r=rank, **settings)).eval()
            for key, parameter in tuned.named_parameters():
                if parameter.requires_grad:
                    noise = torch.randn_like(parameter)
                    if "magnitude" in key:
                        parameter.data = parameter.data * (1 + noise.abs() / 2)
                    else:
                        parameter.data = parameter.data + noise * size
            tuned.save_pretrained(str(self.folder / name))
        self._tuned[name] = tuned
        self.loras[name] = LoRARequest(name, number, str(self.folder / name))
        return self.loras[name]

    @torch.no_grad()
    def logprobs(self, name: str | None, tokens: Sequence[int]) -> torch.Tensor:
        """[len(tokens), vocab], in one pass."""
        model = self.reference if name is None else self._tuned[name]
        return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].float().log_softmax(-1)

    def llm(self, **settings: Any) -> LLM:
        defaults: dict[str, Any] = {
            "skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 64,
            "block_size": 4, "max_model_len": 64, "enable_lora": True, "max_loras": 4, "max_lora_rank": 8,
            "max_logprobs": TOP,
        }  # fmt: skip
        return LLM(self.path, **(defaults | settings))


def greedy(count: int = 8, **changes: Any) -> SamplingParams:
    return SamplingParams(
        **({"temperature": 0, "max_tokens": count, "ignore_eos": True, "logprobs": TOP, "detokenize": False} | changes)
    )


def assert_as_peft(base: Base, name: str | None, output: Any, tolerance: float = 2e-3) -> None:
    """The tokens of a greedy answer are PEFT's best at every position, and the logprobs are PEFT's."""
    prompt = list(output.prompt_token_ids)
    for sample in output.outputs:
        tokens = list(sample.token_ids)
        expected = base.logprobs(name, prompt + tokens)[len(prompt) - 1 : -1]
        logprobs = sample.logprobs or [{}] * len(tokens)  # captured steps report none
        for place, (token, found) in enumerate(zip(tokens, logprobs, strict=True)):
            theirs = expected[place]
            assert token == int(theirs.argmax()), (name, place, token)
            _compare({t: entry.logprob for t, entry in found.items()}, theirs, tolerance, (name, place))


def _compare(ours: Mapping[int, float], theirs: torch.Tensor, tolerance: float, where: object) -> None:
    for token, value in ours.items():
        assert abs(value - float(theirs[token])) < tolerance, (where, token, value, float(theirs[token]))


def check(
    base: Base, llm: LLM, names: Sequence[str | None], prompts: Sequence[Sequence[int]], count: int = 8, **changes: Any
) -> None:
    """Every name with every prompt, all at once."""
    pairs = [(name, prompt) for prompt in prompts for name in names]
    outputs = llm.generate(
        [{"prompt_token_ids": list(prompt)} for _, prompt in pairs],
        greedy(count, **changes),
        lora_request=[None if name is None else base.loras[name] for name, _ in pairs],
    )
    for (name, _), output in zip(pairs, outputs, strict=True):
        assert_as_peft(base, name, output)
