"""`quire eval` against direct computations in float64 with transformers."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from quire import LLM
from quire.api.evaluate import windows
from quire.api.lm_eval import Scorer

TEXT = "It was a bright cold day, and the clocks were striking thirteen. " * 4


@pytest.fixture(scope="module")
def perturbed(byte_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with noise on its weights."""
    folder = tmp_path_factory.mktemp("perturbed")
    model = LlamaForCausalLM.from_pretrained(byte_llama)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(byte_llama).save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def logprobs(folder: Path, window: int, stride: int) -> tuple[list[torch.Tensor], list[int]]:
    """The distribution before each token but the first, in its first window, and those tokens."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokens = AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    found: dict[int, torch.Tensor] = {}
    for start in range(0, len(tokens), stride):
        part = tokens[start : start + window]
        with torch.no_grad():
            scores = model(torch.tensor([part])).logits[0].log_softmax(-1)
        for place in range(1, len(part)):
            found.setdefault(start + place, scores[place - 1])
    return [found[place] for place in range(1, len(tokens))], tokens[1:]


def loss(distributions: list[torch.Tensor], tokens: list[int]) -> float:
    return -sum(float(each[token]) for each, token in zip(distributions, tokens, strict=True)) / len(tokens)


@pytest.mark.parametrize(("window", "stride"), [(64, 32), (100, 99), (50, 7)])
def test_perplexity_equals_a_float64_computation(quire, byte_llama, text, window, stride):
    ran = quire("eval", byte_llama, "--text", text, "--window", window, "--stride", stride, "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    distributions, tokens = logprobs(byte_llama, window, stride)
    assert found["scored"] == len(tokens) == found["tokens"] - 1
    assert found["perplexity"] == pytest.approx(math.exp(loss(distributions, tokens)), rel=1e-5)
    assert (found["window"], found["stride"], found["against"]) == (window, stride, None)


def test_a_model_equals_itself(quire, byte_llama, text):
    found = json.loads(quire("eval", byte_llama, "--text", text, "--against", byte_llama, "--json").out)
    against = found["against"]
    assert against["mean_kl"] == against["max_kl"] == 0.0
    assert against["greedy_agreement"] == against["perplexity_ratio"] == 1.0
    assert found["window"] == 128 and found["stride"] == 64  # the model's length


def test_the_distance_from_another_model_equals_a_direct_computation(quire, byte_llama, perturbed, text):
    arguments = ("--window", 64, "--stride", 48, "--json")
    found = json.loads(quire("eval", perturbed, "--text", text, "--against", byte_llama, *arguments).out)
    (theirs, tokens), (mine, _) = logprobs(byte_llama, 64, 48), logprobs(perturbed, 64, 48)
    divergences = [float((p.exp() * (p - q)).sum()) for p, q in zip(theirs, mine, strict=True)]
    same = [int(p.argmax() == q.argmax()) for p, q in zip(theirs, mine, strict=True)]
    against = found["against"]
    assert against["mean_kl"] == pytest.approx(sum(divergences) / len(tokens), rel=1e-4)
    assert against["max_kl"] == pytest.approx(max(divergences), rel=1e-4)
    assert against["greedy_agreement"] == pytest.approx(sum(same) / len(tokens))
    assert against["perplexity"] == pytest.approx(math.exp(loss(theirs, tokens)), rel=1e-5)
    assert against["perplexity_ratio"] == pytest.approx(math.exp(loss(mine, tokens) - loss(theirs, tokens)), rel=1e-5)


def test_the_table_names_both_models(quire, byte_llama, perturbed, text):
    ran = quire("eval", perturbed, "--text", text, "--against", byte_llama, "--max-tokens", 40)
    assert ran.code == 0 and "39 tokens scored" in " ".join(ran.out.split())
    assert "perplexity" in ran.out and "KL" in ran.out


def test_every_token_is_scored_once():
    for tokens in (2, 10, 11, 64, 65, 200):
        for window, stride in ((10, 9), (10, 5), (10, 1), (64, 32)):
            scored = [place for span in windows(tokens, window, stride) for place in range(span.first, span.stop)]
            assert scored == list(range(1, tokens))
            assert all(
                span.start < span.first and span.stop - span.start <= window for span in windows(tokens, window, stride)
            )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give --text FILE or --tasks NAMES"),
        (("--text", "nowhere.txt"), "nowhere.txt cannot be read"),
        (("--window", 256), "longer than the model's 128"),
        (("--window", 64, "--stride", 64), "1 to 63"),
        (("--tensor-parallel-size", 2), "on one device"),
        (("--max-tokens", 1), "at least 2"),
    ],
)
def test_what_cannot_be_measured_is_refused(quire, byte_llama, text, arguments, said):
    given = arguments if not arguments or "--text" in arguments else ("--text", text, *arguments)
    ran = quire("eval", byte_llama, *given)
    assert ran.code == 2 and said in ran.err


def test_models_with_other_tokens_are_not_compared(quire, byte_llama, tiny_model, text):
    ran = quire("eval", byte_llama, "--text", text, "--against", tiny_model)
    assert ran.code == 2 and "different vocabularies" in ran.err


def test_tasks_need_lm_eval(quire, byte_llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    ran = quire("eval", byte_llama, "--tasks", "arc_easy")
    assert ran.code == 2 and "pip install lm-eval" in ran.err


def test_tasks_are_run_on_the_engine(quire, byte_llama, monkeypatch):
    """lm-eval's interface: requests with `args`, answers in their order."""

    def simple_evaluate(model, tasks, **options):
        requests = [SimpleNamespace(args=("It was a bright", " cold day"))]
        score, greedy = model.loglikelihood(requests)[0]
        (whole,) = model.loglikelihood_rolling([SimpleNamespace(args=(TEXT,))])
        (generated,) = model.generate_until([SimpleNamespace(args=("It was", {"until": ["."], "max_gen_toks": 5}))])
        return {"results": {tasks[0]: {"score": score, "greedy": greedy, "whole": whole, "generated": generated}}}

    interface = ModuleType("lm_eval.api.model")
    interface.LM = type("LM", (), {"__init__": lambda self: None})
    package = ModuleType("lm_eval")
    package.simple_evaluate = simple_evaluate
    for name, module in (
        ("lm_eval", package),
        ("lm_eval.api", ModuleType("lm_eval.api")),
        (interface.__name__, interface),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    ran = quire("eval", byte_llama, "--tasks", "some_task", "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)["some_task"]
    model = LlamaForCausalLM.from_pretrained(byte_llama, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(byte_llama)
    tokens = tokenizer("It was a bright cold day")["input_ids"]
    with torch.no_grad():
        scores = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    after = len(tokenizer("It was a bright")["input_ids"])
    wanted = sum(float(scores[place - 1][tokens[place]]) for place in range(after, len(tokens)))
    assert found["score"] == pytest.approx(wanted, rel=1e-5)
    assert found["greedy"] is False and math.isfinite(found["whole"]) and found["whole"] < 0


def test_long_contexts_lose_their_beginning(byte_llama):
    with LLM(str(byte_llama), device="cpu", num_gpu_blocks_override=32) as llm:
        scorer = Scorer(llm)
        long, short = scorer.continuations([(TEXT, " end"), (TEXT[-100:], " end")])
    assert math.isfinite(long[0]) and long[0] == pytest.approx(short[0], rel=0.2)
