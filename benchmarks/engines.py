"""The engines that are compared: each runs a `Work` and returns its seconds."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from workloads import Work

from quire import LLM, SamplingParams
from quire.loading.hub import DEFAULT_MODEL, resolve
from quire.loading.load import open_checkpoint
from quire.loading.model_config import read_model_config, read_raw_config


class Quire:
    """quire in this process. The prefix cache is reset before every run."""

    def __init__(self, **settings: Any) -> None:
        self.drawn: list[list[int]] = []
        self.llm = LLM(dtype="float32", device="cpu", max_model_len=1024, disable_log_stats=True, **settings)

    def run(self, work: Work) -> float:
        self.llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts]
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in work.outputs]
        begin = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
        elapsed = time.perf_counter() - begin
        self.drawn = [list(output.outputs[0].token_ids) for output in outputs]
        if [len(tokens) for tokens in self.drawn] != work.outputs:
            raise RuntimeError(f"quire generated other numbers of tokens than the {work.outputs} requested")
        return elapsed


class Transformers:
    """transformers' `generate`: all requests in one left-padded batch, until the longest is done."""

    def __init__(self) -> None:
        self.model = transformers_model()
        self.drawn: list[list[int]] = []

    @torch.inference_mode()
    def run(self, work: Work) -> float:
        longest, steps = max(map(len, work.prompts)), max(work.outputs)
        ids = torch.zeros(len(work.prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(work.prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        begin = time.perf_counter()
        out = self.model.generate(
            ids, attention_mask=mask, max_new_tokens=steps, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        elapsed = time.perf_counter() - begin
        if out.shape[1] != longest + steps:
            raise RuntimeError(f"transformers generated {out.shape[1] - longest} tokens instead of {steps}")
        new = out[:, longest:].tolist()
        self.drawn = [tokens[:count] for tokens, count in zip(new, work.outputs, strict=True)]
        return elapsed


def transformers_model() -> Any:
    """The default model's dequantized weights in a float32 transformers model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    files = resolve(DEFAULT_MODEL)
    raw = read_raw_config(files)
    config = LlamaConfig(**{name: value for name, value in raw.items() if name not in ("architectures", "model_type")})
    model = LlamaForCausalLM(config)
    tensors = {weight.name: weight.read().float() for weight in open_checkpoint(files)}
    if read_model_config(files).tie_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors)
    return model.eval()


class VllmCpu:
    """vLLM for CPUs, in its own interpreter: the same weights, from a folder, and the same token ids."""

    def __init__(self, python: str, model: Any, threads: int, **settings: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="quire-bench-")
        model.save_pretrained(self._folder.name)
        script = Path(__file__).with_name("vllm_cpu.py")
        command = [python, str(script), self._folder.name, str(threads), json.dumps(settings)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, work: Work) -> float:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the vLLM process has no pipes")
        print(json.dumps({"prompts": work.prompts, "outputs": work.outputs}), file=stdin, flush=True)
        for line in stdout:
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise RuntimeError(f"vLLM ended with status {self._process.wait()}; see its messages above")

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=60)
        self._folder.cleanup()
