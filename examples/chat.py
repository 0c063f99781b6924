"""Answer a conversation through the model's chat template, then ask a second question."""

from quire import LLM, SamplingParams

QUESTIONS = ["Name a river in Africa.", "Which sea does it flow into?"]


def main(max_tokens: int = 48, **settings) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    messages = [{"role": "system", "content": "Answer in one short sentence."}]
    with LLM(**settings) as llm:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            (output,) = llm.chat(messages, params)
            answer = output.outputs[0].text
            messages.append({"role": "assistant", "content": answer})
            print(f"> {question}\n{answer}\n  ({output.num_cached_tokens} prompt tokens came from the cache)")


if __name__ == "__main__":
    main()
