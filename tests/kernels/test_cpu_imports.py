"""What the first request costs beside its steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from quire import LLM, SamplingParams
with LLM(sys.argv[1], device="cpu", skip_tokenizer_init=True, num_gpu_blocks_override=32) as llm:
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""


def test_generating_imports_no_compiler(tiny_model: Path) -> None:
    """Torch would import its own within the first decode step, which takes seconds."""
    ran = subprocess.run([sys.executable, "-c", SCRIPT, str(tiny_model)], capture_output=True, text=True, timeout=120)
    assert ran.stdout.splitlines()[-1:] == ["[]"], ran.stderr
