"""First tokens before others: whoever waits for an answer to begin is told before those who are reading one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from quire.messages.outputs import StepOutputs


def apart(outputs: StepOutputs, requests: Collection[str]) -> tuple[StepOutputs, StepOutputs]:
    """What a step told about the tokens of these requests, and all the rest. For steps with one token a key."""
    first = _columns(outputs, requests, True)
    return StepOutputs(**first), msgspec.structs.replace(outputs, **_columns(outputs, requests, False))


def _columns(outputs: StepOutputs, requests: Collection[str], inside: bool) -> dict[str, Any]:
    rows = [i for i, key in enumerate(outputs.keys) if (key[0] in requests) is inside]
    return {
        "keys": [outputs.keys[i] for i in rows],
        "tokens": [outputs.tokens[i] for i in rows],
        "logprobs": {new: outputs.logprobs[i] for new, i in enumerate(rows) if i in outputs.logprobs},
        "prompt_logprobs": [item for item in outputs.prompt_logprobs if (item[0][0] in requests) is inside],
        "started": [item for item in outputs.started if (item.key[0] in requests) is inside],
        "finished": [item for item in outputs.finished if (item.key[0] in requests) is inside],
    }
