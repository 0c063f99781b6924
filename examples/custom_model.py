"""A custom model: Llama with the soft cap that Gemma 2 puts on its logits."""

import torch

from quire import LLM, SamplingParams
from quire.models.llama import LlamaForCausalLM
from quire.models.registry import register

CAP = 15.0


class CappedLlamaForCausalLM(LlamaForCausalLM):
    """Logits saturate at ±15. Everything else, weight names included, is Llama's."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return CAP * torch.tanh(super().logits(hidden) / CAP)


def main(max_tokens: int = 8, **settings) -> float:
    register("CappedLlamaForCausalLM", f"{__name__}.CappedLlamaForCausalLM")
    # A checkpoint of this model would name it in its config.json; here the default model's weights are borrowed.
    overrides = {**settings.pop("hf_overrides", {}), "architectures": ["CappedLlamaForCausalLM"]}
    with LLM(hf_overrides=overrides, **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=0)
        (output,) = llm.generate("The capital of France is", params)
    print(f"{output.outputs[0].text!r}, log-probability {output.outputs[0].cumulative_logprob:.2f}")
    return output.outputs[0].cumulative_logprob


if __name__ == "__main__":
    main()
