"""Structured output of the default model, a GGUF file with its own tokenizer: text a person would recognise."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema_rs
import pytest

from quire import LLM, AsyncLLM, RequestOutput, SamplingParams, StructuredOutputsParams

Constraint = StructuredOutputsParams
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "hobbies": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "hobbies"],
    "additionalProperties": False,
}
DATE = r"(19|20)\d\d-(0[1-9]|1[0-2])-[0-3]\d"
SUM = 'root ::= number " + " number " = " number\nnumber ::= [1-9] [0-9]{0,2}'
ASKED: list[tuple[str, Constraint]] = [
    ("A person in JSON: ", Constraint(json=PERSON)),
    ("The first man landed on the moon on the date ", Constraint(regex=DATE)),
    ("The capital of France is", Constraint(choice=[" London", " Paris", " Berlin"])),
    ("An easy sum: ", Constraint(grammar=SUM)),
]


def params(constraint: Constraint, **fields: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 100, "structured_outputs": constraint} | fields))


def check(outputs: list[RequestOutput]) -> None:
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop"] * 4, outputs
    person, date, city, total = (output.outputs[0].text for output in outputs)
    assert jsonschema_rs.validator_for(PERSON).is_valid(json.loads(person)), person
    assert re.fullmatch(DATE, date), date
    assert city == " Paris"
    assert re.fullmatch(r"[1-9]\d{0,2} \+ [1-9]\d{0,2} = [1-9]\d{0,2}", total), total


def test_the_default_model_matches_every_grammar(smollm: LLM) -> None:
    check(
        smollm.generate(
            [prompt for prompt, _ in ASKED], [params(constraint) for _, constraint in ASKED], use_tqdm=False
        )
    )


def test_the_grammar_starts_after_a_text(smollm: LLM) -> None:
    constraint = Constraint(choice=["yes", "no"], after=".")
    prompt = "Is the sky blue? First one sentence of thought, then yes or no.\nThe sky"
    (output,) = smollm.generate([prompt], [params(constraint)], use_tqdm=False)
    thought, _, answer = output.outputs[0].text.rpartition(".")
    assert len(thought) > 5 and answer.strip() in ("yes", "no"), output.outputs[0].text


@pytest.mark.slow
def test_the_default_model_matches_every_grammar_in_its_own_process() -> None:
    async def last(llm: AsyncLLM, prompt: str, constraint: Constraint) -> RequestOutput:
        outputs = [output async for output in llm.generate(prompt, params(constraint))]
        return outputs[-1]

    async def main() -> None:
        async with AsyncLLM(
            dtype="float32", num_gpu_blocks_override=384, device="cpu", max_model_len=2048, cpu_weights="dense"
        ) as llm:
            check(await asyncio.gather(*(last(llm, prompt, constraint) for prompt, constraint in ASKED)))

    asyncio.run(main())
