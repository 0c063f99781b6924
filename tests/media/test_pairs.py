"""Images with replicas, a grammar, several sequences and pooling, offline, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import ValidationError
from quire.messages.pooling import PoolingParams
from quire.sampling_params import StructuredOutputsParams
from tests.media.files import noise
from tests.media.test_server import Reference, asked, text_part

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
IMAGES = [noise(40, 24, seed=seed) for seed in (1, 2, 3)]


def talk(image: Any) -> list[dict[str, Any]]:
    return asked({"type": "image_pil", "image_pil": image}, text_part("what?"))


@pytest.fixture(scope="module")
def reference(seeing_model: Path) -> Reference:
    return Reference(seeing_model)


def wanted(reference: Reference, image: Any, count: int = 6) -> list[int]:
    return reference.answer(asked({"type": "image"}, text_part("what?")), [image], count)


def test_several_sequences_read_one_image(
    make_llm: Callable[..., LLM], seeing_model: Path, reference: Reference
) -> None:
    """With top_k 1 each of the sampled sequences is the likeliest one."""
    params = SamplingParams(temperature=1, top_k=1, n=3, max_tokens=6, ignore_eos=True)
    (output,) = make_llm(seeing_model).chat([talk(IMAGES[0])], params, use_tqdm=False)
    assert [list(each.token_ids) for each in output.outputs] == [wanted(reference, IMAGES[0])] * 3


def test_a_grammar_chooses_among_what_it_allows(
    make_llm: Callable[..., LLM], seeing_model: Path, reference: Reference
) -> None:
    """A choice of one-letter answers is the likeliest of them by transformers' logits."""
    llm = make_llm(seeing_model)
    letters = ["a", "b", "c", "d", "e"]
    tokenizer = llm.get_tokenizer()
    ids = [tokenizer.encode(letter, add_special_tokens=False) for letter in letters]
    assert all(len(each) == 1 for each in ids)
    params = SamplingParams(temperature=0, max_tokens=4, structured_outputs=StructuredOutputsParams(choice=letters))
    for image, output in zip(IMAGES, llm.chat([talk(image) for image in IMAGES], params, use_tqdm=False), strict=True):
        logits = first_logits(reference, image)
        assert output.outputs[0].text == letters[int(torch.stack([logits[each[0]] for each in ids]).argmax())]


def first_logits(reference: Reference, image: Any) -> torch.Tensor:
    """transformers' logits of the first token of the answer."""
    found: list[torch.Tensor] = []
    handle = reference.model.lm_head.register_forward_hook(lambda _, __, out: found.append(out[0, -1]))
    try:
        wanted(reference, image, 1)
    finally:
        handle.remove()
    return found[0]


def test_pooling_refuses_images_by_name(make_llm: Callable[..., LLM], seeing_model: Path) -> None:
    llm = make_llm(seeing_model)
    prompt = {"prompt_token_ids": [5, 118, 116, 119, 6], "multi_modal_data": {"image": IMAGES[0]}}
    with pytest.raises(ValidationError, match="images are for generation"):
        llm.encode([prompt], PoolingParams(), use_tqdm=False)  # type: ignore[list-item]


def test_replicas(make_llm: Callable[..., LLM], seeing_model: Path, reference: Reference) -> None:
    llm = make_llm(seeing_model, data_parallel_size=2)
    outputs = llm.chat([talk(image) for image in IMAGES], GREEDY, use_tqdm=False)
    assert [list(each.outputs[0].token_ids) for each in outputs] == [wanted(reference, image) for image in IMAGES]
