"""Log-probabilities of each token: of the model's answer, and of a given sentence."""

import math

from quire import LLM, SamplingParams


def main(max_tokens: int = 5, **settings) -> None:
    with LLM(**settings) as llm:
        (output,) = llm.generate("The capital of France is", SamplingParams(max_tokens=max_tokens, logprobs=3, seed=1))
        for token, position in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
            others = {entry.decoded_token: round(math.exp(entry.logprob), 3) for entry in position.values()}
            print(f"drew {position[token].decoded_token!r} (rank {position[token].rank}); probabilities {others}")

        for sentence in ("The cat sat on the mat.", "The mat sat on the cat."):
            (output,) = llm.generate(sentence, SamplingParams(max_tokens=1, prompt_logprobs=0))
            # The first token has nothing before it, and so no probability.
            scores = [next(iter(position.values())).logprob for position in output.prompt_logprobs[1:]]
            print(f"{sentence!r}: perplexity {math.exp(-sum(scores) / len(scores)):.1f}")


if __name__ == "__main__":
    main()
