"""A real engine that kills itself at a chosen moment: `AsyncLLM.engine_module = "tests.api.dying_engine"`.

DYING_ENGINE names a file with a line for each engine that is to die; an engine that starts takes the first line, and
lives if there is none. A line has two numbers: the engine begins when so many requests have been added to it, and dies
when a sequence has so many output tokens, before it sends the step's outputs.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.engine_info import EngineInfo
from quire.engine.process import main, make_default
from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig
from quire.messages.outputs import StepOutputs
from quire.messages.request import NewRequest


def make_dying_engine(config: EngineConfig, files: ModelFiles, model: ModelConfig) -> tuple[EngineCore, EngineInfo]:
    core, info = make_default(config, files, model)
    line = _take_line()
    if line is None:
        return core, info
    requests, tokens = map(int, line.split())
    add, step = core.add, core.step
    held: list[NewRequest] = []

    def add_together(request: NewRequest) -> None:
        held.append(request)
        if len(held) >= requests:
            for one in held:
                add(one)
            held.clear()

    def step_or_die() -> StepOutputs:
        outputs = step()
        sequences = (one for key in core.scheduler.requests.ids() for one in core.scheduler.requests.sequences(key))
        if any(len(one.output) >= tokens for one in sequences):
            os.kill(os.getpid(), signal.SIGKILL)
        return outputs

    core.add, core.step = add_together, step_or_die  # type: ignore[method-assign]
    return core, info


def _take_line() -> str | None:
    with open(os.environ["DYING_ENGINE"], "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = file.read().splitlines()
        file.seek(0)
        file.write("".join(f"{line}\n" for line in lines[1:]))
        file.truncate()
    return lines[0] if lines else None


if __name__ == "__main__":
    sys.exit(main(make_dying_engine))
