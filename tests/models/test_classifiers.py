"""Every decoder with a head for classes answers what transformers answers, however its prompt is chunked into steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig

from quire.distributed.groups import Ranks
from quire.errors import UnsupportedModelError
from quire.loading.model_config import ModelConfig
from quire.models.registry import body_of, model_class
from tests.models.harness import PagedRun, assert_same, empty_model, load, loaded_model, random_reference
from tests.models.zoo import ZOO

PROMPT = torch.randint(0, 97, (29,), generator=torch.Generator().manual_seed(3)).tolist()
FAMILIES = [
    "llama", "llama-tied", "mistral-window", "qwen2", "qwen3", "mixtral", "qwen2-moe", "qwen3-moe", "deepseek-v2",
    "deepseek-v3", "gemma-2", "gpt-oss", "gpt-neox", "gpt2",
]  # fmt: skip


def classifier(name: str, **changes: Any) -> Any:
    config = copy.deepcopy(ZOO[name])
    config.num_labels, config.pad_token_id = 3, None
    for field, value in changes.items():
        setattr(config, field, value)
    return random_reference(config, kind=AutoModelForSequenceClassification)


def answers(stages: Any, size: int) -> torch.Tensor:
    """The numbers of the classes, the prompt computed `size` tokens a step."""
    last = stages[-1] if isinstance(stages, list) else stages
    last.logits = last.classify  # of every token
    run = PagedRun(stages)
    return [run.step({"row": PROMPT[i : i + size]})["row"] for i in range(0, len(PROMPT), size)][-1][-1]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_numbers_are_those_of_transformers(name: str) -> None:
    reference = classifier(name)
    assert reference.score.weight.shape[0] == 3 and body_of(type(reference).__name__) is not None
    ours = loaded_model(reference)
    with torch.no_grad():
        wanted = reference(torch.tensor([PROMPT]), use_cache=False).logits[0]
    for size in (29, 7):
        assert_same(answers(ours, size), wanted)


def test_the_head_is_on_the_last_stage() -> None:
    reference = classifier("qwen3")
    stages = [loaded_model(reference, Ranks(pp_rank=rank, pp_size=2)) for rank in range(2)]
    assert stages[0].score is None and stages[1].score is not None
    with torch.no_grad():
        wanted = reference(torch.tensor([PROMPT]), use_cache=False).logits[0]
    assert_same(answers(stages, 7), wanted)


@pytest.mark.parametrize(("method", "count"), [("from_2_way_softmax", 2), ("no_post_processing", 3)])
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_that_is_made_of_tokens(method: str, count: int, tied: bool) -> None:
    """As rerankers are published: a language model, two of whose tokens mean no and yes."""
    reference = random_reference(copy.deepcopy(ZOO["llama-tied" if tied else "llama"]))
    tokens = [11, 60, 4][:count]
    raw = reference.config.to_dict() | {
        "architectures": ["LlamaForSequenceClassification"], "classifier_from_token": tokens, "method": method,
    }  # fmt: skip
    config = ModelConfig.from_dict(raw)
    ours = empty_model(config)
    load(ours, dict(reference.state_dict()))
    with torch.no_grad():
        logits = reference(torch.tensor([PROMPT]), use_cache=False).logits[0, -1, tokens]
    two_way = method == "from_2_way_softmax"
    assert config.class_head is not None and config.class_head.count == (1 if two_way else 3)
    torch.testing.assert_close(answers(ours, 29), logits[1:] - logits[:1] if two_way else logits, atol=1e-4, rtol=1e-4)
    if two_way:
        assert torch.sigmoid(answers(ours, 29)).item() == pytest.approx(logits.softmax(0)[1].item(), abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "labels", "activation"),
    [
        ({}, ("LABEL_0", "LABEL_1"), "softmax"),
        ({"id2label": {"0": "bad", "1": "good", "2": "so so"}}, ("bad", "good", "so so"), "softmax"),
        ({"num_labels": 1}, ("LABEL_0",), "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, ("LABEL_0",), "none"),
        ({"num_labels": 2, "problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), "sigmoid"),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            ("LABEL_0",),
            "none",
        ),
    ],
)
def test_classes_by_the_config(changes: dict[str, Any], labels: tuple[str, ...], activation: str) -> None:
    raw = LlamaConfig().to_dict()
    raw = {key: raw[key] for key in raw if key not in ("id2label", "label2id", "problem_type")}
    head = ModelConfig.from_dict(raw | {"architectures": ["LlamaForSequenceClassification"]} | changes).class_head
    assert head is not None and (head.labels, head.activation) == (labels, activation)
    assert ModelConfig.from_dict(raw | {"architectures": ["LlamaForCausalLM"]} | changes).class_head is None


@pytest.mark.parametrize("architecture", ["BertForSequenceClassification", "UnheardOfForSequenceClassification"])
def test_other_classifiers_are_refused_by_name(architecture: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{architecture} is not implemented: classifiers are decoders"):
        model_class(architecture, "auto")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"method": "from_3_way_softmax"}, "from_3_way_softmax"),
        ({"method": "from_2_way_softmax", "classifier_from_token": [3]}, "two tokens"),
        ({"is_original_qwen3_reranker": True}, "must list tokens"),
        ({"num_labels": 0, "id2label": {}}, None),
        ({"num_labels": -1}, "num_labels"),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}, "Tanh"),
    ],
)
def test_heads_that_mean_nothing_are_refused(fields: dict[str, Any], words: str | None) -> None:
    raw = LlamaConfig().to_dict() | {"architectures": ["LlamaForSequenceClassification"]} | fields
    if words is None:
        assert ModelConfig.from_dict(raw).class_head is not None
        return
    with pytest.raises(Exception, match=words):
        ModelConfig.from_dict(raw)
