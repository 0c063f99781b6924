"""What an encoder of images implements, and how a model receives what it yields.

**Items and spans.** A processor (on the caller's side) turns an image into a `MediaItem` (`messages/media.py`): arrays
for the encoder, the number of rows it yields, and a digest over all that decides them. It puts `rows` placeholder
tokens into the prompt and names them by `Span`s; an item whose rows are not consecutive in the prompt (row separators
between tiles) has several spans, with growing `offset`s. Separator tokens between them are ordinary tokens.

**On the worker.** Before a step computes, the worker calls `encode` with all items the plan names, of several requests
together, and keeps each result by its slot. The step's embeddings are then made like this, on the first stage only:

    hidden = model.embed(tokens)              # [T, hidden_size]; with any embedding scale of the model's own
    hidden[places] = rows[:, :hidden_size]    # of the slots that the plan's splices name; never scaled
    model.forward(tokens, positions, kv, inputs, hidden)

So **a model that takes images has `embed(tokens) -> Tensor`**, and its `forward` takes `hidden` on the first stage too
(`LlamaForCausalLM` and its relatives do both already). `tokens` still has the placeholder ids, for models that look up
something else by token (Gemma 4's per-layer embeddings). Decodes and text steps pass `hidden=None` as before.

**Deepstack.** If `width` is a multiple k + 1 of the hidden size, the further k parts of each row are added to the
residual stream after layers 0 to k - 1. `LlamaModel` does that, and model files with a loop of their own do it too:
`inputs.deepstack.add(layer, hidden, residual)`, in place, after each layer, if `inputs.deepstack` is not None
(`layers.attention.base.Deepstack`). These layers must all be on the first pipeline stage.

**Positions.** A model whose rope has `mrope_section` (`config.rope`; `mrope_interleaved` beside it says which way the
pairs are dealt) may be given positions [3, T], rows t, h and w, in steps that compute chunks of prompts with
`NewRequest.positions`; in all others it gets [T], `position_delta` added. `Attention` takes both, so model files do
nothing about it (`layers/mrope.py`). Positions must be below max_model_len.

**Seeing both ways.** A model whose `bidirectional_spans` is True has the tokens of one span see each other both ways in
its `Attention` layers (but those made with `sees_spans=False`), within their windows; the scheduler never splits such a
span over steps or prefix hits. An image is then one span.

**Weights.** The encoder's submodules are named as in the checkpoint, without the prefix of the whole model; `canonical`
gives the name here of a tensor in any published layout. `loading.py` fills the encoder, at start or when the first item
comes, from the model's own checkpoint; the text model ignores these tensors. Weights are whole on each tensor-parallel
rank and have the model's dtype. An encoder is entered in `registry.py` by the architecture's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from quire.layers.build_context import BuildContext
from quire.messages.media import MediaItem


class VisionEncoder(Protocol):
    """Turns items into embeddings: an `nn.Module` made from the same `BuildContext` as its model."""

    build: BuildContext
    width: int
    """Values of a row: hidden_size * (1 + deepstack layers)."""

    def encode(self, items: Sequence[MediaItem]) -> list[torch.Tensor]:
        """One [rows, width] for each item, on the device, in the model's dtype. Items are images and videos, in any
        mixture of sizes. Under inference mode. Raises for an item that it cannot read: that request alone ends."""
        ...

    # Optional: `parts`, a number, and `encode_parts(items)`, a generator that stops for a moment so many times and then
    # returns what `encode` does. Large images are then encoded over several steps while streams wait for these.

    def canonical(self, name: str) -> str:
        """The name here of a checkpoint's tensor; any other name, if it has no place here."""
        ...

    def largest(self, rows: int) -> MediaItem:
        """An item of zeros with as many rows as one of at most `rows` can have: to measure memory, and to warm up."""
        ...
