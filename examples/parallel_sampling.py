"""Several samples of one prompt. The prompt is computed once; samples share its blocks until they write their own."""

from quire import LLM, SamplingParams


def main(max_tokens: int = 24, **settings) -> None:
    params = SamplingParams(n=4, temperature=0.9, top_p=0.95, seed=7, max_tokens=max_tokens)
    with LLM(**settings) as llm:
        (output,) = llm.generate("My favourite thing about the sea is", params)
        for sample in output.outputs:
            print(f"{sample.index}: {sample.text!r}")
        figures = {metric.name: metric.value for metric in llm.get_metrics()}
        print(f"{figures['quire:prompt_tokens']:.0f} prompt tokens were computed for {len(output.outputs)} samples")


if __name__ == "__main__":
    main()
