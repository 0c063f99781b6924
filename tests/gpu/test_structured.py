"""Structured output on a CUDA device: masks arrive while the forward pass runs, and the device draws with them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire import StructuredOutputsParams as Constraint
from tests.gpu.target import ON_A_GPU

pytestmark = ON_A_GPU

PROMPT = [20 + 3 * i for i in range(30)]
PHONE = r"\(\d{3}\) \d{3}-\d{4}"
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["age"],
}


def params(constraint: Constraint | None, **fields: Any) -> SamplingParams:
    return SamplingParams(
        **({"temperature": 0.9, "seed": 5, "max_tokens": 120, "structured_outputs": constraint} | fields)
    )


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(sample.token_ids) for output in outputs for sample in output.outputs]


WANTED = [
    params(Constraint(regex=PHONE)),
    params(Constraint(regex=PHONE), temperature=0),
    params(Constraint(choice=["red", "blue"]), n=3, top_k=9, top_p=0.9),
    params(Constraint(json=SCHEMA), logprobs=1, presence_penalty=0.5),
    params(None, max_tokens=40),
    params(None, max_tokens=40, temperature=0),
]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
def test_outputs_match_their_grammar_beside_unconstrained_ones(
    engine: Callable[..., LLM], depth: int, settings: dict[str, Any]
) -> None:
    llm = engine(pipeline_depth=depth, **settings)
    outputs = llm.generate([PROMPT[: 8 + 3 * i] for i in range(len(WANTED))], WANTED, use_tqdm=False)
    phone, cold, colours, person, *free = outputs
    assert re.fullmatch(PHONE, phone.outputs[0].text) and re.fullmatch(PHONE, cold.outputs[0].text)
    assert len(colours.outputs) == 3 and all(sample.text in ("red", "blue") for sample in colours.outputs)
    assert 0 <= json.loads(person.outputs[0].text)["age"] <= 120
    assert [output.outputs[0].finish_reason for output in free] == ["length", "length"]


def test_steps_in_flight_change_no_token(engine: Callable[..., LLM]) -> None:
    prompts = [PROMPT[: 8 + 3 * i] for i in range(len(WANTED))]
    serial, overlapped = (
        tokens_of(engine(pipeline_depth=depth).generate(prompts, WANTED, use_tqdm=False)) for depth in (0, 1)
    )
    assert serial == overlapped
