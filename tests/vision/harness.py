"""A tiny random checkpoint of a model that sees, written by transformers, beside ours read from the same folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quire.distributed.groups import Ranks
from quire.layers.attention.base import AttentionInputs, Deepstack
from quire.layers.build_context import BuildContext, collect_targets, create_weights
from quire.loading.files import local_files
from quire.loading.load import load_weights, open_checkpoint
from quire.loading.model_config import read_model_config
from quire.models.registry import model_class
from quire.vision.loading import load_encoder, make_encoder
from quire.vision.processor import Prepared, processor_for
from tests.models.harness import PLAIN, PagedRun, Target, assert_same

TEXT = 60
"""Ids below this are text; special tokens follow."""


@dataclass(frozen=True)
class Family:
    """What a test needs to know of one."""

    model: Callable[[], Any]
    """Makes transformers' model."""
    specials: Mapping[str, int]
    preprocessor: Mapping[str, Any] = field(default_factory=dict)
    """preprocessor_config.json."""
    files: Mapping[str, Any] = field(default_factory=dict)
    """Other JSON files of the folder."""
    rename: Callable[[str], str] | None = None
    """The names of another published layout, from those that transformers writes."""
    as_in_memory: bool = False
    """Whether the file has the names of transformers' modules, where it writes others."""
    change: Callable[[str, torch.Tensor], torch.Tensor] | None = None
    """Another form of some tensors, by the names that transformers writes."""
    config: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Another form of config.json."""


@dataclass
class Pair:
    """The reference, and ours."""

    reference: Any
    folder: Path
    config: Any
    model: Any
    encoder: Any
    processor: Any
    tokenizer: Any


def tokenizer_of(specials: Mapping[str, int]) -> PreTrainedTokenizerFast:
    """Words w0 w1 … and the family's special tokens."""
    words = {f"w{index}": index for index in range(TEXT - 3)} | {"\n": TEXT - 3, "\n\n": TEXT - 2, "<unk>": TEXT - 1}
    tokenizer = Tokenizer(models.WordLevel(words | dict(specials), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    wrapped.add_special_tokens({"additional_special_tokens": list(specials)})
    return wrapped


def randomize(model: Any, seed: int = 0) -> Any:
    """Weights large enough that logits are not flat and every part matters."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.data = 0.3 * noise + (1.0 if name.endswith("weight") else 0.0)
        else:
            matrix = parameter.flatten(1)
            parameter.data = noise * (1.2 * min(matrix.shape) ** -0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.7)
    model.tie_weights()
    return model.eval()


def write(family: Family, folder: Path) -> Any:
    """A checkpoint in `folder`; returns transformers' model."""
    reference = randomize(family.model().to(torch.float32))
    reference.save_pretrained(folder)
    for name, fields in {"preprocessor_config.json": family.preprocessor, **family.files}.items():
        (folder / name).write_text(json.dumps(fields))
    tokenizer_of(family.specials).save_pretrained(folder)
    if family.rename is not None or family.change is not None:
        rename, change = family.rename or (lambda name: name), family.change or (lambda name, tensor: tensor)
        (path,) = folder.glob("*.safetensors")
        save_file({rename(name): change(name, tensor) for name, tensor in load_file(path).items()}, path)
    if family.as_in_memory:
        (path,) = folder.glob("*.safetensors")
        before, tensors = set(load_file(path)), reference.state_dict()
        assert not before <= set(tensors), "transformers writes these names anyway"
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
    if family.config is not None:
        path = folder / "config.json"
        path.write_text(json.dumps(family.config(json.loads(path.read_text()))))
    return reference


def build_context(
    config: Any, max_model_len: int = 1024, target: Target = PLAIN, dtype: torch.dtype = torch.float32
) -> BuildContext:
    return BuildContext(
        config=config,
        ranks=Ranks(),
        dtype=dtype,
        device=torch.device(target.device),
        ops=target.ops(),
        attention=target.attention(),
        max_model_len=max_model_len,
    )


def pair(family: Family, folder: Path, target: Target = PLAIN, dtype: torch.dtype = torch.float32) -> Pair:
    """Both, from one checkpoint; the reference is on the CPU in float32."""
    return read_pair(write(family, folder), folder, target, dtype)


def read_pair(reference: Any, folder: Path, target: Target = PLAIN, dtype: torch.dtype = torch.float32) -> Pair:
    """The reference, and ours from the folder where it was written."""
    files = local_files("tiny", folder)
    config = read_model_config(files)
    build = build_context(config, target=target, dtype=dtype)
    model = model_class(config.architecture)(build)
    create_weights(model, build)
    checkpoint = open_checkpoint(files)
    load_weights(collect_targets(model), model.ignores, checkpoint, progress=False)
    encoder: Any = make_encoder(build)
    if target is PLAIN:  # on a GPU widths are padded
        for parameter in encoder.parameters():
            parameter.fill_(float("nan"))
    load_encoder(encoder, checkpoint)
    assert not any(parameter.isnan().any() for parameter in encoder.parameters())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return Pair(reference, folder, config, model, encoder, processor_for(config, folder, tokenizer), tokenizer)


class Spliced:
    """A model whose embeddings, positions and features of images are given, as a stage of a `PagedRun`."""

    def __init__(self, model: Any, prepared: Prepared, rows: Sequence[torch.Tensor]) -> None:
        self.model, self.prepared = model, prepared
        size = model.build.config.hidden_size
        device = model.build.device
        places = [torch.arange(span.start, span.start + span.length, device=device) for span in prepared.spans]
        self.places = torch.cat(places)
        values = torch.cat([rows[span.item][span.offset : span.offset + span.length] for span in prepared.spans])
        self.hidden = model.embed(torch.tensor(prepared.tokens, device=device)).clone()
        self.hidden[self.places] = values[:, :size]
        self.deeper = [part for part in values[:, size:].split(size, dim=1) if part.numel()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, tokens: Any, positions: torch.Tensor, kv: Any, inputs: AttentionInputs, hidden: Any) -> Any:
        start, end = int(positions[0]), int(positions[-1]) + 1
        if self.prepared.positions is not None:
            positions = torch.from_numpy(self.prepared.positions[:, start:end]).long().to(positions.device)
        within = (self.places >= start) & (self.places < end)
        if self.deeper:
            inputs.deepstack = Deepstack(self.places[within] - start, [part[within] for part in self.deeper])
        if getattr(self.model, "bidirectional_spans", False):
            for each in inputs.siblings or (inputs,):
                each.visible = [(0, span.start, span.start + span.length) for span in self.prepared.spans]
        return self.model(tokens, positions, kv, inputs, self.hidden[start:end].clone())


@torch.no_grad()
def our_logits(ours: Pair, prepared: Prepared, chunk: int | None = None) -> torch.Tensor:
    """Logits of every token of the prompt."""
    rows = ours.encoder.encode(prepared.items)
    assert [row.shape for row in rows] == [(item.rows, ours.encoder.width) for item in prepared.items]
    run = PagedRun(Spliced(ours.model, prepared, rows), block_size=16)
    size = chunk or len(prepared.tokens)
    chunks = [prepared.tokens[start : start + size] for start in range(0, len(prepared.tokens), size)]
    return torch.cat([run.step({"row": part})["row"] for part in chunks])


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Random pixels over a gradient: every part differs from every other."""
    noise = np.random.default_rng(seed).integers(0, 128, (height, width, 3))
    ramp = np.linspace(0, 127, width)[None, :, None] * np.linspace(0.3, 1, height)[:, None, None]
    return Image.fromarray((noise + ramp).astype(np.uint8))


def words(count: int, seed: int) -> list[int]:
    """Tokens of text."""
    return np.random.default_rng(seed).integers(0, TEXT - 3, count).tolist()


@torch.no_grad()
def their_logits(ours: Pair, prepared: Prepared, **inputs: Any) -> torch.Tensor:
    """transformers' logits for the same tokens and its own pixels."""
    return ours.reference(input_ids=torch.tensor([prepared.tokens]), use_cache=False, **inputs).logits[0]


__all__ = ["Family", "Pair", "assert_same", "our_logits", "pair", "picture", "replace", "their_logits", "words"]
