"""Several sequences of one prompt. The prompt is computed once; sequences share its blocks until they write."""

from quire import LLM, SamplingParams


def main(max_tokens: int = 24, **settings) -> None:
    params = SamplingParams(n=4, temperature=0.9, top_p=0.95, seed=7, max_tokens=max_tokens)
    with LLM(**settings) as llm:
        (output,) = llm.generate("My favourite thing about the sea is", params)
        for sequence in output.outputs:
            print(f"{sequence.index}: {sequence.text!r}")
        metrics = {metric.name: metric.value for metric in llm.get_metrics()}
        print(f"{metrics['quire:prompt_tokens']:.0f} prompt tokens were computed for {len(output.outputs)} sequences")


if __name__ == "__main__":
    main()
