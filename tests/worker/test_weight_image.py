"""`weight_cache`: weights kept as they lie in memory, mapped by later starts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.worker import worker
from tests.quantization.checkpoints import write
from tests.quantization.test_gguf_models import MIXED, write_model

PROMPTS = [[5, 17, 80, 3, 64, 11, 2, 9] * 3, [7, 8, 9]]


@pytest.fixture
def generate(make_llm: Callable[..., LLM]) -> Callable[..., list[tuple[list[int], float]]]:
    def run(path: Path, **settings: Any) -> list[tuple[list[int], float]]:
        llm = make_llm(path, skip_tokenizer_init=True, max_model_len=128, **settings)
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1, detokenize=False)
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
        return [(list(each.outputs[0].token_ids), each.outputs[0].cumulative_logprob or 0.0) for each in results]

    return run


@pytest.mark.parametrize("kind", ["gguf", "gptq", "plain"])
def test_a_second_start_maps_the_first_ones_weights(
    kind: str, generate: Callable[..., Any], tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens and likelihoods, to the last bit, and nothing is read from the checkpoint."""
    model = tmp_path / "model"
    if kind == "gguf":
        write_model(model.with_suffix(".gguf"), "qwen3moe", MIXED, "Q4_K")
        model = model.with_suffix(".gguf")
    elif kind == "gptq":
        write(model, "gptq")
    else:
        shutil.copytree(tiny_model, model)
    expected = generate(model)
    folder = tmp_path / "kept"
    assert generate(model, weight_cache=str(folder)) == expected
    (image,) = folder.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(worker, "load_weights", lambda *_, **__: pytest.fail("reads the checkpoint"))
        assert generate(model, weight_cache=str(folder)) == expected
        assert str(image) in Path("/proc/self/maps").read_text()
    # Other settings have files of their own; one whose tensors lie elsewhere is not used, and written again.
    damaged = bytearray(image.read_bytes())
    damaged[20] ^= 255
    image.write_bytes(damaged)
    assert generate(model, weight_cache=str(folder)) == expected
    assert image.read_bytes()[:4096] != bytes(damaged[:4096])
    generate(model, weight_cache=str(folder), dtype="bfloat16")
    assert len(list(folder.iterdir())) == 2


def test_a_folder_that_cannot_be_is_refused(generate: Callable[..., Any], tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="weight_cache .* cannot be made a folder"):
        generate(tiny_model, weight_cache=str(tmp_path / "file" / "folder"))
