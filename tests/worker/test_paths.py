"""A recorded pass gives the same bits as an eager one, whatever changed between its runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.kernels.cpu.build import library
from quire.kernels.cpu.ops import CpuOps
from quire.kernels.cpu.tape import TapeArena
from quire.kernels.reference import TorchOps
from quire.platforms.base import MemoryArena
from tests.conftest import TINY_VOCAB, write_tiny_model

needs_native = pytest.mark.skipif(library() is None, reason="needs a C++ compiler")
PROMPTS = [[(5 * i + 11 * j) % TINY_VOCAB for j in range(3 + 13 * i)] for i in range(6)]


def generate(folder: Path, **settings: Any) -> tuple[list[list[int]], LLM]:
    """Greedy tokens of requests that join and leave at different steps, and grow over several blocks."""
    params = [SamplingParams(temperature=0, max_tokens=20 + 15 * i, ignore_eos=True) for i in range(len(PROMPTS))]
    with LLM(folder, dtype="float32", device="cpu", block_size=4, **settings) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        llm.llm_engine.check_idle()
    return [list(output.outputs[0].token_ids) for output in outputs], llm


def tape_paths(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every TapeDecodePath made after this."""
    from quire.worker import worker

    made: list[Any] = []
    make: Callable[..., Any] = worker.TapeDecodePath

    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append(make(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(worker, "TapeDecodePath", noted)
    return made


@needs_native
def test_replayed_steps_draw_the_same_tokens_as_eager_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_model(tmp_path)
    made = tape_paths(monkeypatch)
    replayed, _ = generate(folder)
    eager, _ = generate(folder, enforce_eager=True)
    assert replayed == eager
    assert len(made) == 1, "with enforce_eager nothing is recorded"
    assert {shape.rows for shape in made[0]._passes} == set(range(1, len(PROMPTS) + 1))
    assert {shape.width for shape in made[0]._passes} == {1}


@needs_native
def test_hidden_states_of_a_replay_equal_the_eager_ones_bit_for_bit() -> None:
    ops = CpuOps()
    weights = [torch.randn(48, 48) for _ in range(4)]
    gain = torch.rand(48)
    x = torch.randn(3, 48)

    tokens = torch.tensor([0, 1, 2])

    def run() -> torch.Tensor:
        stream = ops.embedding(tokens, x)
        hidden = ops.rms_norm(stream, gain, 1e-5)
        for weight in weights:
            hidden, stream = ops.add_rms_norm(ops.linear(hidden, weight), stream, gain, 1e-5)
        return hidden

    result, replay = ops.capture(run)
    assert replay is not None
    assert torch.equal(result, run())
    x.copy_(torch.randn(3, 48))
    replay()
    assert torch.equal(result, run())


@needs_native
def test_a_pass_with_a_torch_operation_is_not_recorded() -> None:
    ops = CpuOps()
    x, weight = torch.randn(2, 16), torch.randn(16, 16)
    result, replay = ops.capture(lambda: torch.nn.functional.gelu(ops.linear(x, weight)))
    assert replay is None
    assert torch.allclose(result, torch.nn.functional.gelu(x @ weight.T), atol=1e-5)


@needs_native
def test_a_model_with_torch_operations_runs_eagerly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.4)
    model = GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path)
    made = tape_paths(monkeypatch)
    with LLM(tmp_path, dtype="float32", device="cpu", skip_tokenizer_init=True) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
        (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    tokens = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        for _ in range(12):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    assert list(output.outputs[0].token_ids) == tokens[0, 3:].tolist()
    assert not made[0]._passes


def test_the_reference_ops_are_not_recorded() -> None:
    result, replay = TorchOps().capture(lambda: torch.ones(2))
    assert replay is None
    assert result.tolist() == [1, 1]


def test_memory_is_reused_only_when_no_view_of_it_is_left() -> None:
    like = torch.zeros(1)
    with TapeArena() as arena:
        first = like.new_empty(100)
        view = first[10:]
        place = first.data_ptr()
        del first
        second = like.new_empty(100)
        assert second.data_ptr() != place, "a view still uses it"
        del view
        third = like.new_empty(100)
        assert third.data_ptr() == place
    assert len(arena.memory) == 2
    assert arena.torch_ops == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_long_lived_memory_is_zero_aligned_and_apart(dtype: torch.dtype) -> None:
    arena = MemoryArena(torch.device("cpu"))
    tensors = [arena.zeros(shape, dtype) for shape in [(3,), (5, 7), (1,), (9000, 2000), (2, 2)]]
    for i, tensor in enumerate(tensors):
        assert tensor.dtype == dtype
        assert not tensor.any()
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(i + 1)
    assert all((tensor == i + 1).all() for i, tensor in enumerate(tensors))
