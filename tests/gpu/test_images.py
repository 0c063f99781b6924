"""Images on the device: tiny random checkpoints of every family against transformers on the CPU in float32.

In float32 logits are equal up to rounding, with products padded as for speed. In bfloat16 encoders are near those in
float32, whichever way attention is computed. Encoding never waits for the device, and engines draw transformers'
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.kernels.segments import TRITON, WAYS, WHOLE, WINDOWS, attention_ways
from quire.vision import qwen_vit
from quire.vision.processor import Prepared
from quire.vision.qwen_vit import EncoderGraphs
from quire.worker.cuda_graphs import GraphPool
from tests.gpu.target import DEVICE, ON_A_GPU
from tests.models.harness import Target
from tests.vision import test_engine_families, test_gemma4, test_pixtral, test_qwen, test_split, test_tiles
from tests.vision.engine_harness import Case
from tests.vision.harness import Pair, our_logits, pair, picture, read_pair, their_logits, words

pytestmark = ON_A_GPU
SIZES = {"one": [(40, 30)], "several": [(40, 30), (17, 61), (64, 64)]}


@dataclass(frozen=True)
class Kind:
    """A family, its placeholder in prompts, and transformers' inputs for images."""

    family: Any
    placeholder: int
    inputs: Callable[[Pair, list[Any], Prepared], dict[str, Any]]


def _qwen(made: Pair, images: list[Any], prepared: Prepared) -> dict[str, Any]:
    return test_qwen.reference_inputs(made, images, [], prepared)


def _gemma4(made: Pair, images: list[Any], prepared: Prepared) -> dict[str, Any]:
    found = dict(test_gemma4.Gemma4ImageProcessorPil.from_pretrained(made.folder)(images, return_tensors="pt"))
    found.pop("num_soft_tokens_per_image")
    return found | {"mm_token_type_ids": (torch.tensor([prepared.tokens]) == test_gemma4.IMAGE).int()}


def _pixtral(made: Pair, images: list[Any], prepared: Prepared) -> dict[str, Any]:
    return dict(test_pixtral.PixtralImageProcessorPil.from_pretrained(made.folder)(images, return_tensors="pt"))


def _tiles(processor: Any) -> Callable[[Pair, list[Any], Prepared], dict[str, Any]]:
    return lambda made, images, prepared: test_tiles.reference_inputs(
        made, processor.from_pretrained(made.folder), images, prepared
    )


def _split(processor: Any) -> Callable[[Pair, list[Any], Prepared], dict[str, Any]]:
    return lambda made, images, prepared: test_split.reference_inputs(
        made, processor.from_pretrained(made.folder), images
    )


KINDS = {
    **{name: Kind(family, test_qwen.IMAGE, _qwen) for name, family in test_qwen.FAMILIES.items()},
    **{
        name: Kind(family, test_tiles.BOI if name.startswith("gemma") else test_tiles.IMAGE, _tiles(processor))
        for name, (family, processor) in test_tiles.FAMILIES.items()
    },
    **{f"gemma-4-{name}": Kind(family, test_gemma4.IMAGE, _gemma4) for name, family in test_gemma4.FAMILIES.items()},
    **{name: Kind(family, test_pixtral.IMAGE, _pixtral) for name, (family, *_) in test_pixtral.FAMILIES.items()},
    **{
        name: Kind(family, test_split.IMAGE, _split(processor))
        for name, (family, processor) in test_split.FAMILIES.items()
    },
}


def on_the_device() -> Target:
    from quire.kernels.triton.ops import TritonOps
    from quire.layers.attention.triton import TritonPagedAttention

    return Target(DEVICE, TritonOps, TritonPagedAttention)


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def ours(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return pair(kind.family, tmp_path_factory.mktemp("sees"), on_the_device())


@pytest.fixture
def ways() -> Iterator[dict[str, str]]:
    """How attention is computed; as before afterwards."""
    before = dict(attention_ways)
    yield attention_ways
    attention_ways.update(before)


def prompt(made: Pair, kind: Kind, sizes: list[tuple[int, int]]) -> tuple[list[Any], Prepared]:
    images = [picture(*size, seed=index) for index, size in enumerate(sizes)]
    tokens = words(5, 1)
    for index in range(len(images)):
        tokens += [kind.placeholder, *words(3, index)]
    return images, made.processor.prepare(tokens, images)


def assert_near(found: torch.Tensor, theirs: torch.Tensor) -> None:
    """Up to rounding, which tiny encoders with large weights enlarge."""
    assert theirs.std() > 0.3, "a flat reference proves nothing"
    torch.testing.assert_close(found.cpu(), theirs, rtol=0, atol=1e-3 * theirs.abs().max().item())


@pytest.mark.parametrize("sizes", list(SIZES))
def test_logits_are_those_of_transformers(ours: Pair, kind: Kind, sizes: str) -> None:
    images, prepared = prompt(ours, kind, SIZES[sizes])
    theirs = their_logits(ours, prepared, **kind.inputs(ours, images, prepared))
    assert_near(our_logits(ours, prepared), theirs)
    if not getattr(ours.model, "bidirectional_spans", False):
        assert_near(our_logits(ours, prepared, chunk=37), theirs)


def test_bfloat16_is_near_float32(ours: Pair, kind: Kind, ways: dict[str, str]) -> None:
    _, prepared = prompt(ours, kind, SIZES["several"])
    exact = torch.cat(read_pair(ours.reference, ours.folder).encoder.encode(prepared.items))  # as transformers' (CI)
    half = read_pair(ours.reference, ours.folder, on_the_device(), torch.bfloat16)
    for way in WAYS:
        ways.update({WHOLE: way, WINDOWS: way})
        found = torch.cat(half.encoder.encode(prepared.items))
        assert found.dtype is torch.bfloat16 and found.isfinite().all()
        assert (found.float().cpu() - exact).norm() < 0.06 * exact.norm(), way


def test_encoding_does_not_wait_for_the_device(ours: Pair, kind: Kind) -> None:
    _, prepared = prompt(ours, kind, SIZES["several"])
    half = read_pair(ours.reference, ours.folder, on_the_device(), torch.bfloat16)
    for _ in range(2):
        half.encoder.encode(prepared.items)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        half.encoder.encode(prepared.items)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3.5"])
def test_graphs_change_nothing(
    name: str, tmp_path: Path, ways: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ways.update({WHOLE: TRITON, WINDOWS: TRITON})  # heads of these models are too odd for the other ways
    monkeypatch.setattr(qwen_vit, "GRAPH_PATCHES", (64, 256))
    made = pair(test_qwen.FAMILIES[name], tmp_path, on_the_device(), torch.bfloat16)
    slot = SimpleNamespace(buffers=SimpleNamespace(slot=torch.zeros(1, device=DEVICE)))
    given = [prompt(made, KINDS[name], sizes)[1].items for sizes in ([(64, 64)], [(40, 30), (17, 61)], [(24, 24)])]
    alone = [made.encoder.encode(items) for items in given]
    with torch.inference_mode():
        graphs = EncoderGraphs(made.encoder, GraphPool(slot))  # type: ignore[arg-type]
    monkeypatch.setattr(made.encoder, "graphs", graphs)
    for expected, items in zip([*alone, *alone[::-1]], [*given, *given[::-1]], strict=True):
        assert graphs.find(made.encoder.pack(items)) is not None
        for found, own in zip(made.encoder.encode(items), expected, strict=True):
            assert (found.float() - own.float()).norm() < 0.02 * own.float().norm()


@pytest.mark.parametrize("name", list(test_engine_families.FAMILIES))
def test_an_engine_draws_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    family, *more = test_engine_families.FAMILIES[name]
    case = Case(family, tmp_path, *more)
    longest = min(640, case.sighted.config.max_position)
    pictures = test_engine_families.PICTURES
    engine = case.sighted.engine(
        device=DEVICE, max_num_batched_tokens=512, max_num_seqs=4, encoder_cache_tokens=400, max_model_len=longest
    )
    prompts = [(pictures[:1], case.prompt(pictures[:1], 1)), (pictures, case.prompt(pictures, 2, before=19))]
    for images, prepared in [*prompts, *prompts]:  # the second time from cached blocks
        assert engine.answer(prepared, 6) == case.theirs(images, prepared, 6)
    names = [engine.add(prepared, 6) for _, prepared in prompts]
    engine.run()
    for request, (images, prepared) in zip(names, prompts, strict=True):
        assert engine.outputs[request, 0] == case.theirs(images, prepared)
    engine.close()
