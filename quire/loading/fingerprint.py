"""What a model is, in a few bytes: equal fingerprint, equal weights, so that what was computed once can be kept."""

from __future__ import annotations

import json

from blake3 import blake3

from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig


def weights_fingerprint(files: ModelFiles, model: ModelConfig, load_format: str, seed: int) -> bytes:
    """Of the weights: the configuration, and each file's name, size and time of change. Dummy weights: the seed."""
    facts: list[object] = [json.dumps(dict(model.raw), sort_keys=True, default=str)]
    kind = files.kind if load_format == "auto" else load_format
    if kind in (None, "dummy"):
        facts += ["dummy", seed]
    else:
        for path in files.weight_files(kind):
            state = path.stat()
            facts.append((path.name, state.st_size, state.st_mtime_ns))
    return blake3(repr(facts).encode()).digest()


def tokens_fingerprint(model: ModelConfig) -> bytes:
    """Of what token ids mean, as far as the configuration tells: another model's tokens are not to be continued."""
    return blake3(f"{model.architecture} {model.vocab_size} {model.hidden_size} {model.num_layers}".encode()).digest()
