"""Print text as it is generated, and stop in the middle: leaving the loop aborts the request."""

from quire import LLM, RequestOutputKind, SamplingParams


def main(max_tokens: int = 60, **settings) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA)
    with LLM(**settings) as llm:
        for output in llm.stream("Once upon a time, there was a", params):
            print(output.outputs[0].text, end="", flush=True)
        print()

        words = 0
        for output in llm.stream("Count: one, two, three,", params):
            words += output.outputs[0].text.count(",")
            print(output.outputs[0].text, end="", flush=True)
            if words == 3:
                break
        print(" …")
        llm.llm_engine.check_idle()  # the aborted request holds no blocks any more


if __name__ == "__main__":
    main()
