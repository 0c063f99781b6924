"""Cost of structured output: time of a step with and without guided rows, and the loop's part of it.

    python benchmarks/grammar_overhead.py --rows 8 --guided 0 1 8 [--device cuda] [--model …]

Rows sample at temperature 1 and never finish. Guided ones write JSON of a schema. `masks` is the loop's time for a
step's masks (requesting, waiting, copying), `advance` its time for sending tokens to the matchers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from quire import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "age", "tags"],
    },
    "minItems": 1000,
}


class Timed:
    """A function whose calls are timed."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.seconds: list[float] = []

    def __call__(self, *arguments: Any) -> Any:
        begin = time.perf_counter()
        try:
            return self._function(*arguments)
        finally:
            self.seconds.append(time.perf_counter() - begin)


def measure(llm: LLM, rows: int, guided: int, forms: int, steps: int) -> dict[str, float]:
    engine = llm.llm_engine
    grammars = engine.core._grammars
    assert grammars is not None
    for i in range(rows):
        schema = SCHEMA | {"title": str(i % forms)}
        form = StructuredOutputsParams(json=schema) if i < guided else None
        params = SamplingParams(max_tokens=10 * steps, ignore_eos=True, seed=i, structured_outputs=form)
        engine.add_request(f"{guided}-{i}", f"Request {i}: a list of people in JSON:", params)
    scheduler = engine.core.scheduler
    while scheduler.rows.used < rows or scheduler.requests.prefilling:
        engine.step()
    for _ in range(10):
        engine.step()
    masks, advance = Timed(grammars.masks), Timed(grammars.advance)
    grammars.masks, grammars.advance = masks, advance  # type: ignore[method-assign]
    step = Timed(engine.step)
    for _ in range(steps):
        step()
    del grammars.masks, grammars.advance  # type: ignore[method-assign]
    engine.abort_request([f"{guided}-{i}" for i in range(rows)])
    while engine.has_unfinished_requests():
        engine.step()
    parts = {"step": step.seconds, "masks": masks.seconds, "advance": advance.seconds}
    return {name: 1e6 * statistics.median(seconds) if seconds else 0.0 for name, seconds in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--guided", type=int, nargs="+", default=[0, 1, 8])
    parser.add_argument("--forms", type=int, default=1, help="different schemas among the guided rows")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load-format", default="auto")
    args = parser.parse_args()
    with LLM(args.model, device=args.device, max_model_len=4096, load_format=args.load_format) as llm:
        for _ in range(args.rounds):
            for guided in args.guided:
                found = measure(llm, args.rows, guided, args.forms, args.steps)
                times = ", ".join(f"{name} {value:.0f} µs" for name, value in found.items())
                print(f"{guided:3d} of {args.rows} rows guided: {times}", flush=True)


if __name__ == "__main__":
    main()
