"""A GGUF model on a CPU, its weights dense against packed (`cpu_weights`): text, time, memory; and llama.cpp.

    python benchmarks/packed_weights.py [--model M] [--rounds 5] [--llama PYTHON --gguf FILE] [--threads 2]

Text: greedy, 20 prompts x 64 tokens. "equal" counts positions at which both texts have the same token, which all differ
after the first that does; "same choice" lets the packed model choose a token at every position of the dense one's text.
Time: one request of 64 tokens, a prompt of 512, and 16 requests, the engines in turn, each in a process of its own;
medians. `--llama`: the interpreter of an environment with llama-cpp-python, which joins in with the same file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
SUBJECTS = (
    *("the sea", "photosynthesis", "a steam engine", "the French Revolution", "binary search", "sourdough bread"),
    *("the Moon", "interest rates", "penguins", "a compiler", "the water cycle", "chess", "glass", "vaccines"),
    *("a bicycle", "the printing press", "dreams", "coral reefs", "recursion", "honey bees"),
)
ENGINE = """
import json, os, sys, time
from quire import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", max_model_len=1024, disable_log_stats=True, **json.loads(sys.argv[2]))
def generate(prompts, tokens, **more):
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, **more)
    start = time.perf_counter()
    results = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start, results
def ids(prompt):
    return {"prompt_token_ids": prompt}
def one():
    return (generate(["The sea"], 65)[0] - generate(["The sea"], 1)[0]) / 64
def prompt(seed=[0]):
    seed[0] += 1
    return generate([ids([100 + (7 * i * seed[0]) % 40000 for i in range(512)])], 1)[0]
def batch():
    prompts = [ids([50 + i, 60, 70]) for i in range(16)]
    return (generate(prompts, 33)[0] - generate(prompts, 1)[0]) / 32
def texts(prompts):
    return [(list(r.prompt_token_ids), list(r.outputs[0].token_ids)) for r in generate(prompts, 64)[1]]
def choices(pairs):
    found = []
    for start, rest in pairs:
        (result,) = generate([ids(start + rest)], 1, prompt_logprobs=1)[1]
        for token, row in zip(rest, result.prompt_logprobs[len(start):]):
            best = max(row, key=lambda key: row[key].logprob)
            found.append(best == token)
    return sum(found) / len(found)
def memory():
    fields = open("/proc/self/status").read().split("VmRSS:")[1].split()
    return int(fields[0]) * 1024
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    name, *arguments = json.loads(line)
    print(json.dumps(globals()[name](*arguments)), flush=True)
"""
LLAMA = """
import json, sys, time
from llama_cpp import Llama
threads = int(sys.argv[2])
llm = Llama(sys.argv[1], n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False)
def one():
    llm.reset(); llm.eval(llm.tokenize(b"The sea"))
    start = time.perf_counter()
    for _ in range(64):
        llm.eval([llm.sample(temp=0.0)])
    return (time.perf_counter() - start) / 64
def prompt(seed=[0]):
    seed[0] += 1
    llm.reset()
    start = time.perf_counter()
    llm.eval([100 + (7 * i * seed[0]) % 40000 for i in range(512)])
    return time.perf_counter() - start
def memory():
    fields = open("/proc/self/status").read().split("VmRSS:")[1].split()
    return int(fields[0]) * 1024
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    name, *arguments = json.loads(line)
    print(json.dumps(globals()[name](*arguments)), flush=True)
"""


class Child:
    """A process that answers calls, one JSON line each."""

    def __init__(self, python: str, script: str, *arguments: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(HERE)}
        command = [python, "-c", script, *arguments]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"a process ended with {self._process.wait()}")
        return json.loads(line)

    def __call__(self, name: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        print(json.dumps([name, *arguments]), file=self._process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--llama", help="python with llama-cpp-python")
    parser.add_argument("--gguf", help="the file that llama.cpp loads")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="text,time")
    options = parser.parse_args()

    def settings(how: str) -> str:
        cache = {"enable_prefix_caching": False, "kv_cache_memory_bytes": 64 << 20}
        return json.dumps({"cpu_weights": how, "threads": options.threads, **cache})

    engines = {how: Child(sys.executable, ENGINE, options.model, settings(how)) for how in ("packed", "dense")}
    if "text" in options.only:
        prompts = [f"Tell me about {subject}." for subject in SUBJECTS]
        dense, packed = (engines[how]("texts", prompts) for how in ("dense", "packed"))
        pairs = [
            pair for ours, theirs in zip(dense, packed, strict=True) for pair in zip(ours[1], theirs[1], strict=True)
        ]
        equal = sum(a == b for a, b in pairs) / len(pairs)
        whole = sum(ours == theirs for ours, theirs in zip(dense, packed, strict=True))
        same = engines["packed"]("choices", dense)
        print(
            f"text: {equal:.1%} of tokens equal, {whole} of {len(dense)} texts whole, same choice {same:.1%}",
            flush=True,
        )
    if "time" in options.only:
        if options.llama:
            engines["llama.cpp"] = Child(options.llama, LLAMA, options.gguf, str(options.threads))
        for what, title in (("one", "a token, 1 request"), ("prompt", "a prompt of 512"), ("batch", "a step of 16")):
            able = {name: child for name, child in engines.items() if what != "batch" or name != "llama.cpp"}
            times: dict[str, list[float]] = {name: [] for name in able}
            for turn in range(options.rounds + 1):
                for name, child in able.items():
                    seconds = child(what)
                    if turn:  # the first warms up
                        times[name].append(seconds)
            medians = {name: statistics.median(each) for name, each in times.items()}
            cells = [f"{n} {s * 1e3:8.2f} ms ({medians['packed'] / s:4.2f}x)" for n, s in medians.items()]
            print(f"{title:<20} " + " | ".join(cells), flush=True)
        print("resident memory      " + " | ".join(f"{n} {c('memory') / 2**20:.0f} MiB" for n, c in engines.items()))
    for child in engines.values():
        child.close()
    print(f"load {os.getloadavg()[0]:.1f}; in parentheses packed / that one")


if __name__ == "__main__":
    main()
