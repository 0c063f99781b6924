"""Starts one engine, runs workloads, prints a JSON line for each. `table.py` runs this as a process."""

import time

BORN = time.time()  # start time counts from here, imports included

import argparse  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import random  # noqa: E402
from dataclasses import dataclass, field, replace  # noqa: E402
from typing import Any  # noqa: E402

MAX_TOKEN_ID = 10_000
"""Random token ids are at most this, below the special ones of every model here."""


@dataclass(frozen=True)
class Workload:
    """Requests of a benchmark: how many, and how long their prompts and outputs are (from, to)."""

    requests: int
    inputs: tuple[int, int]
    outputs: tuple[int, int]
    params: dict[str, Any] = field(default_factory=dict)
    """Further sampling parameters of every request."""

    def generate(self, seed: int = 0, max_token_id: int = MAX_TOKEN_ID) -> tuple[list[list[int]], list[int]]:
        """Prompts and output lengths; the same for the same seed."""
        rng = random.Random(seed)
        prompts = [
            [rng.randint(0, max_token_id) for _ in range(rng.randint(*self.inputs))] for _ in range(self.requests)
        ]
        shortest, longest = self.outputs
        fixed = shortest == longest
        return prompts, [shortest if fixed else rng.randint(shortest, longest) for _ in prompts]


WORKLOADS = {
    "bs1": Workload(1, (512, 512), (256, 256)),
    "nano": Workload(256, (100, 1024), (100, 1024)),
    "decode256": Workload(256, (128, 128), (512, 512)),
    "prefill": Workload(128, (2048, 2048), (1, 1)),
    "bs8": Workload(8, (512, 512), (256, 256)),
    "bs32": Workload(32, (512, 512), (256, 256)),
    "plain": Workload(256, (128, 128), (256, 256)),
    "filtered": Workload(256, (128, 128), (256, 256), {"top_k": 50, "top_p": 0.9}),
    "listed": Workload(256, (128, 128), (256, 256), {"logit_bias": {5: 1.0, 9: -2.0}, "min_tokens": 64}),
    "penalised": Workload(256, (128, 128), (256, 256), {"presence_penalty": 0.5, "repetition_penalty": 1.1}),
    "logprobs": Workload(256, (128, 128), (256, 256), {"logprobs": 5}),
    "prompts": Workload(128, (1024, 1024), (1, 1)),
    "prompt_logprobs": Workload(128, (1024, 1024), (1, 1), {"prompt_logprobs": 1}),
}
TABLE = ["bs1", "nano", "decode256", "prefill"]
"""Workloads of the table; the others run only if named."""
QUICK = {name: replace(work, requests=4, inputs=(16, 16), outputs=(64, 64)) for name, work in WORKLOADS.items()} | {
    "bs1": Workload(1, (16, 16), (8, 8)),
    "nano": Workload(4, (4, 16), (4, 16)),
    "decode256": Workload(4, (8, 8), (8, 8)),
    "prefill": Workload(4, (32, 32), (1, 1)),
}
WARM_UP = Workload(4, (64, 64), (16, 16))


def run(llm: Any, work: Workload, seed: int = 0) -> dict[str, float]:
    """One run from an empty prefix cache."""
    from quire import SamplingParams

    llm.reset_prefix_cache()
    prompts, outputs = work.generate(seed, min(MAX_TOKEN_ID, llm.llm_engine.info.model.vocab_size - 1))
    fixed = {"temperature": 0.6, "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(max_tokens=count, **fixed, **work.params) for count in outputs]
    begin = time.perf_counter()
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    produced = sum(len(sample.token_ids) for result in results for sample in result.outputs)
    if produced != sum(outputs):
        raise RuntimeError(f"{produced} tokens were generated instead of {sum(outputs)}")
    return {"seconds": seconds, "in_tokens": sum(map(len, prompts)), "out_tokens": produced}


def describe(llm: Any) -> dict[str, Any]:
    """The engine's device, settings and memory."""
    import torch

    info = llm.llm_engine.info
    driver = ""
    if torch.cuda.is_initialized():
        from quire.platforms.cuda import driver_version

        driver = driver_version()
    return {
        "device": info.device,
        "dtype": info.dtype,
        "driver": driver,
        "cuda": torch.version.cuda,
        "max_num_seqs": info.max_num_seqs,
        "max_num_batched_tokens": info.max_num_batched_tokens,
        "cache_tokens": info.cache_tokens,
        "memory": str(info.memory).splitlines(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("workloads", nargs="*")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--settings", type=json.loads, default={})
    parser.add_argument(
        "--without", nargs="*", default=[], metavar="MODULE.SWITCH",
        help="kernels to turn off, to compare: quire.kernels.triton.quantized.expert_hopper.USE_HOPPER",
    )  # fmt: skip
    args = parser.parse_args()
    for switch in args.without:
        module, _, name = switch.rpartition(".")
        owner = importlib.import_module(module)
        if not isinstance(getattr(owner, name, None), bool):
            parser.error(f"--without: {switch} is not a switch (True or False)")
        setattr(owner, name, False)
    from quire import LLM

    fixed = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096, "seed": 0}
    if args.quick:
        fixed["max_model_len"] = 128
    llm = LLM(args.model, **{**fixed, **args.settings})
    print(json.dumps({"start": time.time() - BORN, "engine": describe(llm)}), flush=True)
    works = QUICK if args.quick else WORKLOADS
    if args.workloads:
        run(llm, WARM_UP, seed=9)
    for name in args.workloads:
        for _ in range(args.repeats):
            print(json.dumps({"workload": name, **run(llm, works[name])}), flush=True)
    llm.shutdown()


if __name__ == "__main__":
    main()
