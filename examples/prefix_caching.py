"""Requests with a common prefix share its cache blocks, also with requests that finished earlier."""

import time

from quire import LLM, SamplingParams

RULES = "You are the assistant of a small library. " + "Be polite, be exact, and name the shelf of every book. " * 12
QUESTIONS = ["Where is Moby Dick?", "Do you have atlases?", "When do you close?"]


def main(max_tokens: int = 1, **settings) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    with LLM(**settings) as llm:
        for question in QUESTIONS:
            begin = time.perf_counter()
            (output,) = llm.generate(RULES + question, params, use_tqdm=False)
            prompt, cached = len(output.prompt_token_ids), output.num_cached_tokens
            print(f"{time.perf_counter() - begin:6.2f} s, {cached} of {prompt} prompt tokens cached: {question}")


if __name__ == "__main__":
    main()
