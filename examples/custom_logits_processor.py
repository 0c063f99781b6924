"""A custom logits processor: no n-gram is generated twice."""

import torch

from quire import LLM, SamplingParams


class NoRepeatedNgram:
    """Bans the token that would complete an n-gram that is in the text already; n comes with the request."""

    def applies(self, params: SamplingParams) -> bool:
        return "no_repeat_ngram" in (params.extra_args or {})

    def apply(
        self, logits: torch.Tensor, prompt: torch.Tensor, output: torch.Tensor, params: SamplingParams
    ) -> torch.Tensor:
        n = params.extra_args["no_repeat_ngram"]
        tokens = torch.cat([prompt, output]).tolist()
        tail = tokens[len(tokens) - n + 1 :]
        for start in range(len(tokens) - n + 1):
            if tokens[start : start + n - 1] == tail:
                logits[tokens[start + n - 1]] = float("-inf")
        return logits


def main(max_tokens: int = 24, **settings) -> list[list[int]]:
    plain = SamplingParams(temperature=0, max_tokens=max_tokens)
    without = SamplingParams(temperature=0, max_tokens=max_tokens, extra_args={"no_repeat_ngram": 2})
    with LLM(logits_processors=[NoRepeatedNgram], **settings) as llm:
        outputs = llm.generate(["la la la la", "la la la la"], [plain, without])
    for name, output in zip(("plain", "without repetition"), outputs, strict=True):
        print(f"{name}: {output.outputs[0].text!r}")
    return [list(output.prompt_token_ids) + list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    main()
