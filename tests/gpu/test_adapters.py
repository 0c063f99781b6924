"""Adapters that PEFT wrote, on a CUDA device: alone, mixed and none, in captured steps, beside drafts, prefix hits,
preemption and bases in few bits. At each position PEFT, in float32 on the CPU, is given the tokens so far: the token
taken must be its best, up to a near tie; those are counted."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from transformers import LlamaConfig, MixtralConfig

from quire import LLM, SamplingParams
from tests.adapters.beside_peft import Base
from tests.adapters.test_pairs import _round
from tests.gpu.target import DEVICE, ON_A_GPU
from tests.speculative.scripted import Tally
from tests.speculative.test_eagle3 import PLAIN, head_weights, save

pytestmark = ON_A_GPU

VOCAB, HIDDEN, INVOCATION = 512, 256, [9, 4]
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 384, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "all": {"target_modules": "all-linear", "lora_alpha": 6},
    "wide": {"rank": 16, "target_modules": "all-linear", "use_rslora": True, "lora_alpha": 4},
    "narrow": {"rank": 1, "target_modules": ["k_proj", "gate_proj", "o_proj"]},
    "dora": {"target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"], "use_dora": True},
    "embeddings": {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "saved": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 2, 40]},
    "activated": {
        "target_modules": ["q_proj", "v_proj"], "alora_invocation_tokens": INVOCATION, "task_type": "CAUSAL_LM"
    },
}  # fmt: skip
MATRICES = ["all", "wide", "narrow", "dora"]
"""Of these, steps are captured."""
OF_EXPERTS: dict[str, dict[str, Any]] = {
    "experts": {"target_modules": ["q_proj"], "target_parameters": EXPERTS},
    "attention": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
}
PROMPTS = [[(7 * i + 3 * j) % VOCAB for j in range(5 + 23 * i)] for i in range(4)]
LIMITS = {
    "float32": (1e-3, 1e-5, 0.005),
    "bfloat16": (1.0, 0.02, 0.15),
    "int4": (1.0, 0.02, 0.15),
    "fp8": (4.0, 0.4, 0.5),
    "experts": (float("inf"), 0.2, 0.3),
}
"""Of what rounding may change: the most that a token's logprob is less than the best one's, the mean of that, and the
share of tokens where it is not zero. fp8 rounds activations too; mixtures in bfloat16 may choose another expert."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    base = Base(tmp_path_factory.mktemp("adapters"), LlamaConfig(**SHAPE))
    for name, settings in KINDS.items():
        base.adapter(name, size=0.08, **settings)
    return base


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Base:
    base = Base(tmp_path_factory.mktemp("experts"), MixtralConfig(**SHAPE, num_local_experts=4))
    for name, settings in OF_EXPERTS.items():
        base.adapter(name, size=0.08, **settings)
    return base


@pytest.fixture
def lora_engine(engine: Callable[..., LLM]) -> Callable[..., LLM]:
    def make(base: Base, **settings: Any) -> LLM:
        defaults = {"skip_tokenizer_init": True, "enable_lora": True, "max_loras": 4, "max_model_len": 512}
        return engine(base.path, **(defaults | settings))

    return make


class Answers:
    """Compares answers with PEFT's, and counts."""

    def __init__(self, base: Base, dtype: str) -> None:
        self.base = base
        self.most, self.mean, self.share = LIMITS[dtype]
        self.gaps: list[float] = []
        """By how much the logprob of each token is less than that of PEFT's best one."""
        self.others: list[float] = []
        """The same of the token that the base would have taken in an adapter's place."""

    def check(self, name: str | None, output: Any) -> None:
        assert output.error is None, (name, output.error)
        prompt, tokens = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        theirs = self.base.logprobs(name, prompt + tokens)[len(prompt) - 1 : -1]
        without = self.base.logprobs(None, prompt + tokens)[len(prompt) - 1 : -1]
        for place, token in enumerate(tokens):
            best = float(theirs[place].max())
            gap = best - float(theirs[place, token])
            assert gap < self.most, f"{name}, token {place} of {len(prompt)} + {len(tokens)}: worse by {gap:.3f}"
            self.gaps.append(gap)
            if name is not None:
                self.others.append(best - float(theirs[place, without[place].argmax()]))

    def report(self, what: str) -> None:
        mean, ties = sum(self.gaps) / len(self.gaps), sum(gap > 0 for gap in self.gaps)
        other = sum(self.others) / len(self.others)
        print(
            f"\n{what}: {len(self.gaps)} tokens, {ties} near ties, worse by {mean:.4f} on average and by at most "
            f"{max(self.gaps):.3f}; the base's tokens would be by {other:.2f}"
        )
        assert mean < self.mean and ties <= self.share * len(self.gaps) + 1, "too many to be near ties"
        assert other > 1.0, "the adapters change too little to be compared"


def run(
    answers: Answers, llm: LLM, names: Sequence[str | None], prompts: Sequence[Sequence[int]] = PROMPTS,
    count: int = 24, **more: Any,
) -> list[Any]:  # fmt: skip
    """Every name with every prompt, all at once."""
    pairs = [(name, prompt) for prompt in prompts for name in names]
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, **more)
    outputs = llm.generate(
        [{"prompt_token_ids": list(prompt)} for _, prompt in pairs],
        params,
        use_tqdm=False,
        lora_request=[None if name is None else answers.base.loras[name] for name, _ in pairs],
    )
    for (name, _), output in zip(pairs, outputs, strict=True):
        answers.check(name, output)
    return outputs


def captured(llm: LLM) -> dict[str, int]:
    """Graphs of steps with adapters, by the kind of step."""
    paths = llm.llm_engine.core._executor._worker._runner.paths  # type: ignore[attr-defined]
    found = {}
    for path in paths:
        graphs = [*getattr(path, "_steps", ()), *getattr(path, "_forwards", ())]
        found[type(path).__name__] = sum(getattr(shape, "adapted", False) for shape in graphs)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])
def test_alone_mixed_and_none(lora_engine: Callable[..., LLM], base: Base, dtype: str, eager: bool) -> None:
    answers = Answers(base, dtype)
    llm = lora_engine(base, dtype=dtype, enforce_eager=eager)
    for name in (*MATRICES, None):
        run(answers, llm, [name], PROMPTS[1:2])
    run(answers, llm, [*MATRICES, None])
    if not eager and DEVICE == "cuda":
        found = captured(llm)
        assert found["CapturedDecodePath"] and found["CapturedMixedPath"], found
    run(answers, llm, ["embeddings", None, "all", "saved", "tokens"])  # not captured: they change more than matrices
    run(answers, llm, ["activated", "wide"], [*PROMPTS, [7, 8, *INVOCATION, 5], [*PROMPTS[2], *INVOCATION, 3]])
    run(answers, llm, [None, "dora"])
    answers.report(f"adapters, {dtype}")


def test_bits_do_not_depend_on_other_adapters(lora_engine: Callable[..., LLM], base: Base) -> None:
    """A row of the base beside rows with adapters has the tokens of an engine without adapters."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    plain = lora_engine(base, enable_lora=False).generate(prompts, params, use_tqdm=False)
    answers = Answers(base, "float32")
    beside = run(answers, lora_engine(base), ["all", None, "wide"])[1::3]
    for mine, other in zip(beside, plain, strict=True):
        assert mine.outputs[0].token_ids == other.outputs[0].token_ids


@pytest.mark.parametrize("rows", [1, 3, 16, 40])
def test_more_rows_and_long_prompts(lora_engine: Callable[..., LLM], base: Base, rows: int) -> None:
    """Prompts of several blocks of tokens with several slots; as many rows as each of the products has kernels for."""
    answers = Answers(base, "bfloat16")
    llm = lora_engine(base, dtype="bfloat16", max_num_seqs=64, num_gpu_blocks_override=2048)
    names = [*MATRICES, None]
    prompts = [[(5 * i + 11 * j) % VOCAB for j in range(3 + (37 * i) % 300)] for i in range(rows)]
    pairs = [(names[i % 5], prompt) for i, prompt in enumerate(prompts)]
    for _ in range(2):
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for _, prompt in pairs],
            params,
            use_tqdm=False,
            lora_request=[None if name is None else base.loras[name] for name, _ in pairs],
        )
        for (name, _), output in zip(pairs, outputs, strict=True):
            answers.check(name, output)
    if rows > 1:
        answers.report(f"{rows} rows")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts(lora_engine: Callable[..., LLM], mixture: Base, dtype: str) -> None:
    answers = Answers(mixture, dtype if dtype == "float32" else "experts")
    llm = lora_engine(mixture, dtype=dtype)
    for _ in range(2):
        run(answers, llm, ["experts", None, "attention"])
    answers.report(f"experts, {dtype}")


@pytest.mark.parametrize("bits", ["int4", "fp8"])
def test_over_a_base_in_few_bits(lora_engine: Callable[..., LLM], base: Base, bits: str) -> None:
    """PEFT runs on the values that the weights in few bits have; fp8 rounds activations too."""
    llm = lora_engine(base, dtype="bfloat16", quantization=bits)
    rounded = copy.copy(base)
    rounded.reference = copy.deepcopy(base.reference).to(DEVICE)
    _round(rounded.reference, llm.llm_engine.core._executor._worker.model)  # type: ignore[attr-defined]
    rounded.reference.cpu()
    rounded._tuned = {}
    for name in ("all", "wide", "dora", "saved"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rounded._tuned[name] = PeftModel.from_pretrained(
                copy.deepcopy(rounded.reference), str(base.folder / name)
            ).eval()
    changed = (rounded.logprobs("all", PROMPTS[2]) - base.logprobs("all", PROMPTS[2])).abs().max()
    assert changed > 0.01
    answers = Answers(rounded, bits)
    for _ in range(2):
        run(answers, llm, ["all", None, "dora", "wide", "saved"])
    answers.report(bits)


@pytest.mark.parametrize("method", ["ngram", "eagle3", "draft_model"])
def test_drafts(lora_engine: Callable[..., LLM], base: Base, tmp_path: Path, method: str) -> None:
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, "tune": False}
    if method == "ngram":
        config["prompt_lookup_min"] = 1
    elif method == "draft_model":
        config["model"] = base.path
    else:
        head = {
            **PLAIN, "vocab_size": VOCAB, "draft_vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 384,
            "target_hidden_size": HIDDEN, "max_position_embeddings": 1024,
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        }  # fmt: skip
        config["model"] = save(tmp_path / "head", head, head_weights(head, vocab=VOCAB, target=HIDDEN))
    answers = Answers(base, "float32")
    llm = lora_engine(base, speculative_config=config)
    tally = Tally(llm)
    for _ in range(2):
        run(answers, llm, ["narrow", None, "all", "dora"], [*PROMPTS, [9, 8, 7] * 12], 40)
    run(answers, llm, ["activated", "saved", None], [*PROMPTS, [7, *INVOCATION, 5]], 12)
    found = captured(llm)
    print(f"\n{method}: {vars(tally)}, graphs {found}")
    answers.report(f"drafts by {method}")
    assert tally.verified > 100 and (tally.accepted > 0 or method == "eagle3")  # a random head is hardly ever right
    assert found.get("CapturedVerifyPath") or DEVICE != "cuda"


def test_prefix_hits_are_not_shared(lora_engine: Callable[..., LLM], base: Base) -> None:
    answers = Answers(base, "float32")
    llm = lora_engine(base, block_size=16)
    prompt = PROMPTS[3]
    whole = (len(prompt) - 1) // 16 * 16
    for name, hit in (("all", 0), ("all", whole), (None, 0), ("dora", 0), ("all", whole), (None, whole)):
        (output,) = run(answers, llm, [name], [prompt])
        assert output.num_cached_tokens == hit, name
    answers.report("prefix hits")


def test_preempted(lora_engine: Callable[..., LLM], base: Base) -> None:
    answers = Answers(base, "float32")
    llm = lora_engine(base, num_gpu_blocks_override=24, block_size=16, max_num_batched_tokens=64, max_num_seqs=8)
    run(answers, llm, [*MATRICES, None], count=40)
    assert llm.llm_engine.core.scheduler.stats.preemptions > 0
    answers.report("preempted")


def test_slots_are_filled_while_steps_run(lora_engine: Callable[..., LLM], base: Base) -> None:
    """Two slots, eight adapters, requests that come while others run: each slot is evicted many times."""
    answers = Answers(base, "float32")
    llm = lora_engine(base, max_loras=2, max_cpu_loras=3)
    for _ in range(2):
        run(answers, llm, [*MATRICES, "saved", None, "tokens"], [*PROMPTS, [7, *INVOCATION, 5]], 10)
    stats = llm.llm_engine.core.scheduler.requests.adapters.stats
    assert stats.evictions > 8 and not stats.failures, vars(stats)
    answers.report("two slots")
