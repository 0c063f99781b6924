"""Vectors as bytes: number formats and byte orders are those of torch and numpy."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
import torch

from quire.server.vector_encoding import as_bytes
from tests.server.conftest import Live

FORMATS = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
}  # fmt: skip


@pytest.mark.parametrize("kind", FORMATS)
def test_numbers_are_rounded_as_torch_rounds(kind: str) -> None:
    generator = np.random.default_rng(3)
    sizes = np.exp2(generator.uniform(-20, 8, 4000))
    whole = torch.arange(256, dtype=torch.uint8).view(FORMATS["fp8_e4m3"]).float()
    exact = whole[whole.isfinite()].numpy()
    ties = (exact[1:] + exact[:-1]) / 2
    vector = np.concatenate([sizes * generator.choice([-1, 1], len(sizes)), exact, ties, [0.0, -0.0]]).astype(
        np.float32
    )
    made = torch.from_numpy(vector).to(FORMATS[kind])  # type: ignore[arg-type]
    wanted = made.view(torch.uint8).numpy().tobytes()
    assert as_bytes(vector, kind, "little") == wanted  # type: ignore[arg-type]
    size = made.element_size()
    swapped = np.frombuffer(wanted, np.uint8).reshape(-1, size)[:, ::-1].tobytes()
    assert as_bytes(vector, kind, "big") == (wanted if size == 1 else swapped)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
def test_binary_responses(live: Live, path: str) -> None:
    texts, name = ["the world", "a word"], "embedding" if path.endswith("s") else "data"
    wanted = [each[name] for each in live.post(path, {"input": texts}).json()["data"]]
    for kind, tolerance in (("float32", 0.0), ("float16", 1e-3), ("bfloat16", 1e-2)):
        for order in ("native", "little", "big"):
            fields = {"input": texts, "embed_dtype": kind, "endianness": order}
            coded = live.post(path, {**fields, "encoding_format": "base64"}).json()["data"]
            whole = live.post(path, {**fields, "encoding_format": "bytes"})
            bare = live.post(path, {**fields, "encoding_format": "bytes_only"})
            assert whole.headers["content-type"] == bare.headers["content-type"] == "application/octet-stream"
            assert bare.content == whole.content and "metadata" not in bare.headers
            told = json.loads(whole.headers["metadata"])
            assert told["usage"]["prompt_tokens"] > 0 and told["model"] == "tiny"
            for index, place in enumerate(told["data"]):
                part = whole.content[place["start"] : place["end"]]
                assert part == base64.b64decode(coded[index][name])
                described = (place["index"], place["embed_dtype"], place["endianness"], place["shape"])
                assert described == (index, kind, order, [64])
                bits = np.frombuffer(part, (">" if order == "big" else "<") + ("u4" if kind == "float32" else "u2"))
                plain = bits.astype(bits.dtype.newbyteorder("=")).copy()
                numbers = torch.from_numpy(plain.view(np.uint8)).view(FORMATS[kind]).float().numpy()
                np.testing.assert_allclose(numbers, wanted[index], atol=tolerance)


def test_many_vectors_do_not_fit_a_header(live: Live) -> None:
    body = {"input": ["a"] * 257, "encoding_format": "bytes"}
    refused = live.post("/v1/embeddings", body)
    assert refused.status_code == 400 and "bytes_only" in refused.json()["error"]["message"]
    for name in ("encoding_format", "embed_dtype", "endianness"):
        answer = live.post("/v1/embeddings", {"input": "a", name: f"bad_{name}"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
