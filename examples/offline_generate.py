"""Complete a batch of prompts: all of them share every step of the engine."""

from quire import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "The three primary colours are",
]


def main(max_tokens: int = 24, **settings) -> None:
    with LLM(**settings) as llm:
        for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=max_tokens)):
            sample = output.outputs[0]
            print(f"{output.prompt!r} → {sample.text!r} ({sample.finish_reason})")


if __name__ == "__main__":
    main()
