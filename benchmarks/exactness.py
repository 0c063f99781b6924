"""Tokens with drafts against tokens without, on real text: every answer must be the same, greedy and seeded.

    python benchmarks/exactness.py                            # 200 prompts, all methods, about 15 minutes on two cores
    python benchmarks/exactness.py --prompts 20 --methods ngram suffix

The default model in float32 on a CPU. Half of the requests are greedy, half are sampled with a seed, in batches as the
scheduler makes them, which are others with drafts than without. Prompts are work that repeats its prompt, open chat,
and questions. `draft_model` has the default model as its own draft; `eagle3` has a random head, all of whose drafts are
wrong. Drafts are not tuned: decodes verify all that there are.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from draft_prompts import prompts as questions
from repeating_prompts import CHAT, REPEATING
from safetensors.torch import save_file

from quire import LLM, SamplingParams
from quire.loading.hub import DEFAULT_MODEL

METHODS = ("ngram", "suffix", "draft_model", "eagle3")
Answers = list[list[int]]


def main() -> int:
    """Compare and print; returns how many answers differ, at most 1."""
    args = parse()
    asked = [*REPEATING.values(), *CHAT, *questions(args.prompts)][: args.prompts]
    begin = time.perf_counter()
    expected, _ = answer(args, None, asked)
    count = sum(map(len, expected))
    print(f"none: {len(expected)} answers, {count} tokens, {time.perf_counter() - begin:.0f} s", flush=True)
    differing = 0
    with tempfile.TemporaryDirectory() as folder:
        for method in args.methods:
            begin = time.perf_counter()
            found, drafts = answer(args, config_of(method, args.model, Path(folder)), asked)
            wrong = [i for i in range(len(expected)) if found[i] != expected[i]]
            differing += len(wrong)
            print(f"{method}: {len(wrong)} of {len(expected)} answers differ; {drafts}; "
                  f"{time.perf_counter() - begin:.0f} s", flush=True)  # fmt: skip
            for i in wrong[:5]:
                place = next((j for j, (a, b) in enumerate(zip(found[i], expected[i], strict=False)) if a != b), -1)
                kind = "seeded" if i % 2 else "greedy"
                print(f"  {kind} answer to {asked[i // 2][:60]!r} differs from token {place} on")
    return int(differing > 0)


def answer(args: argparse.Namespace, drafts: Mapping[str, Any] | None, asked: list[str]) -> tuple[Answers, str]:
    """Answers to all prompts, a greedy one and a seeded one each, and what became of the drafts."""
    chats = [[{"role": "user", "content": prompt}] for prompt in asked for _ in range(2)]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, top_p=0.95 if i % 2 else 1.0, max_tokens=args.tokens)
        for i in range(len(chats))
    ]
    settings = {"dtype": "float32", "device": "cpu", "max_model_len": 2048, "max_num_seqs": args.rows}
    with LLM(args.model, speculative_config=drafts, disable_log_stats=True, **settings) as llm:
        outputs = llm.chat(chats, params, use_tqdm=False)
        stats = llm.llm_engine.core.scheduler.stats.drafts
        return [list(output.outputs[0].token_ids) for output in outputs], (
            f"{stats.accepted} of {stats.tokens} drafts accepted"
        )


def config_of(method: str, model: str, folder: Path) -> dict[str, Any]:
    """The `speculative_config` of a method."""
    config: dict[str, Any] = {"method": method, "tune": False}
    if method == "draft_model":
        config |= {"model": model, "num_speculative_tokens": 3}
    if method == "eagle3":
        config |= {"model": random_head(folder / "head"), "num_speculative_tokens": 3}
    return config


def random_head(folder: Path, size: int = 576, vocab: int = 49152, drafts: int = 512) -> str:
    """An EAGLE-3 head of the default model's shape that knows nothing."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": size, "vocab_size": vocab,
        "intermediate_size": size, "num_hidden_layers": 1, "num_attention_heads": 9, "num_key_value_heads": 3,
        "draft_vocab_size": drafts, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    wide, kv = 2 * size, size // 3
    shapes = {"fc.weight": (size, 3 * size), "lm_head.weight": (drafts, size)}
    rows = {"q": size, "k": kv, "v": kv}
    shapes |= {f"midlayer.self_attn.{name}_proj.weight": (count, wide) for name, count in rows.items()}
    shapes |= {f"midlayer.mlp.{name}_proj.weight": (size, size) for name in ("gate", "up", "down")}
    shapes["midlayer.self_attn.o_proj.weight"] = (size, size)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) * shape[1] ** -0.5 for name, shape in shapes.items()}
    norms = ("norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "midlayer.hidden_norm")
    tensors |= {f"{name}.weight": torch.ones(size) for name in norms}
    tensors["d2t"] = torch.zeros(drafts, dtype=torch.int64)
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=40, help="most tokens of an answer")
    parser.add_argument("--rows", type=int, default=16, help="most requests at a time")
    parser.add_argument("--methods", nargs="*", default=METHODS, choices=METHODS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
