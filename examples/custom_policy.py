"""A custom scheduling policy: short prompts may overtake long ones."""

from typing import Any

from quire import LLM, SamplingParams
from quire.messages.request import Request
from quire.scheduler.policies.base import RankedPolicy

TOKENS_A_PLACE = 16


class ShortFirst(RankedPolicy):
    """A prompt moves up one place for every 16 tokens it is shorter.

    Not simply the shortest first: an endless stream of short prompts would then keep a long one waiting forever.
    """

    def rank(self, request: Request) -> Any:
        return (request.arrival_order + len(request.prompt) / TOKENS_A_PLACE, request.arrival_order, request.index)


def main(max_tokens: int = 8, **settings) -> list[str]:
    prompts = ["A long story about a ship: " + "the waves went up and down, " * 20, "Hello,", "Two and two is"]
    order = []
    # max_num_seqs=1: one at a time, so that the order shows. The path could be any "package.module.Class".
    with LLM(scheduling_policy=f"{__name__}.ShortFirst", max_num_seqs=1, **settings) as llm:
        for output in llm.stream(prompts, SamplingParams(temperature=0, max_tokens=max_tokens)):
            if output.finished:
                order.append(output.prompt)
                print(f"{len(output.prompt_token_ids):4} tokens: {output.prompt[:32]!r} → {output.outputs[0].text!r}")
    return order


if __name__ == "__main__":
    main()
