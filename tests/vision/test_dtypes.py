"""Encoders in bfloat16, in which models are served, are near those in float32; items of zeros fit the rows they name.

On a GPU inner widths are padded: that changes nothing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.loading.files import local_files
from quire.loading.load import open_checkpoint
from quire.loading.model_config import read_model_config
from quire.vision.loading import load_encoder, make_encoder
from quire.vision.processor import processor_for
from tests.vision import test_gemma4, test_pixtral, test_qwen, test_split, test_tiles
from tests.vision.harness import build_context, picture, tokenizer_of, write

FAMILIES: dict[str, Any] = {
    "qwen2.5-vl": test_qwen.FAMILIES["qwen2.5-vl"],
    "qwen2-vl": test_qwen.FAMILIES["qwen2-vl"],
    "qwen3-vl": test_qwen.FAMILIES["qwen3-vl"],
    "llava": test_tiles.FAMILIES["llava"][0],
    "llava-next": test_tiles.FAMILIES["llava-next"][0],
    "gemma-3": test_tiles.FAMILIES["gemma-3"][0],
    "gemma-4": test_gemma4.FAMILIES["both-ways"],
    "mistral-small-3": test_pixtral.FAMILIES["mistral-small-3"][0],
    "idefics3": test_split.FAMILIES["idefics3"][0],
    "internvl": test_split.FAMILIES["internvl"][0],
}


@pytest.mark.parametrize("name", list(FAMILIES))
def test_bfloat16_is_near_float32(name: str, tmp_path: Path) -> None:
    write(FAMILIES[name], tmp_path)
    files = local_files("tiny", tmp_path)
    config = read_model_config(files)
    processor = processor_for(config, tmp_path, tokenizer_of(FAMILIES[name].specials))
    assert processor is not None
    images = [picture(40, 30, 1), picture(17, 61, 2)]
    placeholder = test_tiles.BOI if name == "gemma-3" else 60
    items = processor.prepare([placeholder, 1, placeholder], images).items
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        encoder: Any = make_encoder(replace(build_context(config), dtype=dtype, kv_format=None))  # type: ignore[arg-type]
        load_encoder(encoder, open_checkpoint(files))
        outputs.append(encoder.encode(items))
    for whole, half in zip(*outputs, strict=True):
        assert half.dtype is torch.bfloat16
        assert (half.float() - whole).norm() < 0.06 * whole.norm()
    for rows in (1, 40, 300):
        blank = encoder.largest(rows)
        (out,) = encoder.encode([blank])
        assert out.shape == (blank.rows, encoder.width)
        assert out.isfinite().all()


@pytest.mark.parametrize("name", ["qwen2.5-vl", "mistral-small-3"])
def test_padded_widths_change_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(FAMILIES[name], tmp_path)
    files = local_files("tiny", tmp_path)
    build = build_context(read_model_config(files))
    plain: Any = make_encoder(build)
    monkeypatch.setattr("quire.vision.layers.padding", lambda width, device: -width % 64)
    padded: Any = make_encoder(build)
    assert sum(each.numel() for each in padded.parameters()) > sum(each.numel() for each in plain.parameters())
    for encoder in (plain, padded):
        load_encoder(encoder, open_checkpoint(files))
    item = plain.largest(6)
    item.arrays["pixels"][:] = np.random.default_rng(0).integers(0, 255, item.arrays["pixels"].shape)
    torch.testing.assert_close(padded.encode([item])[0], plain.encode([item])[0], atol=1e-3, rtol=1e-4)
