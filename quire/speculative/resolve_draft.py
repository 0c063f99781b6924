"""What a draft's checkpoint is: the method, the number of drafts and the place that its configuration implies."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from quire.config import EngineConfig
from quire.errors import UnsupportedModelError
from quire.loading.files import ModelFiles
from quire.loading.hub import resolve
from quire.loading.model_config import read_raw_config
from quire.speculative.config import (
    DEFAULT_MODEL_DRAFTS,
    DRAFT_MODEL,
    EAGLE,
    EAGLE3,
    MAX_DRAFTS,
    MTP,
    MTP_FAMILIES,
    REFUSED_METHODS,
)


def draft_files(config: EngineConfig) -> ModelFiles | None:
    """The files of the draft, downloaded if necessary; None if there is none, or it is in the target's checkpoint."""
    speculation = config.speculation
    if speculation is None or speculation.model is None:
        return None
    return resolve(
        speculation.model, revision=speculation.revision, download_dir=config.download_dir, token=config.hf_token
    )


def resolve_draft(config: EngineConfig) -> EngineConfig:
    """The configuration with what the draft's checkpoint says filled in: its folder, method, and number of drafts."""
    speculation = config.speculation
    files = draft_files(config)
    if speculation is None or files is None:
        return config
    raw = read_raw_config(files)
    found = dataclasses.replace(
        speculation,
        model=str(files.path),
        revision=None,
        method=method_of(raw, speculation.method, files.name),
        num_speculative_tokens=speculation.num_speculative_tokens or drafts_of(raw),
    )
    return dataclasses.replace(config, speculative_config=found.to_dict())


def method_of(raw: Mapping[str, Any], wanted: str | None, name: str) -> str:
    """The method of a draft with this config.json; a checkpoint of another kind than the one wanted is refused."""
    found = _kind(raw, name)
    if found in REFUSED_METHODS:
        raise UnsupportedModelError(f"the draft {name} is a {found} checkpoint: {REFUSED_METHODS[found]}")
    if found == EAGLE and wanted in (None, EAGLE):
        raise UnsupportedModelError(
            f"the draft {name} is an EAGLE head of the first or second form; only EAGLE-3 heads are supported"
        )
    if wanted is None or wanted == found or (wanted == EAGLE and found == EAGLE3):
        return found
    if wanted == EAGLE3 and found in (EAGLE, DRAFT_MODEL):
        return EAGLE3  # heads in the wild are often configured as plain models; its tensors tell when they are read
    if wanted == MTP and found == DRAFT_MODEL:
        return MTP  # a whole checkpoint with such layers
    raise UnsupportedModelError(
        f"the draft {name} is a {found} checkpoint, but speculative_config says method {wanted!r}"
    )


def drafts_of(raw: Mapping[str, Any]) -> int:
    """Drafts that a checkpoint was trained to make."""
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    count = methods[0].get("speculative_tokens") or DEFAULT_MODEL_DRAFTS
    return max(1, min(int(count), MAX_DRAFTS))


def _kind(raw: Mapping[str, Any], name: str) -> str:
    title = name.rstrip("/").rpartition("/")[2].lower()
    if kind := raw.get("speculators_model_type"):
        kind = str(kind).lower()
        if kind in (EAGLE, EAGLE3, MTP, *REFUSED_METHODS):
            return kind
        raise UnsupportedModelError(
            f"the draft {name} is a speculators checkpoint of type {kind!r}; known: {EAGLE3}, {MTP}"
        )
    family = str(raw.get("model_type") or "")
    architecture = str((raw.get("architectures") or [""])[0]).lower()
    for kind in ("medusa", "mlp_speculator", "dflash", "dspark"):
        if kind in (family, *re.split(r"[-_.]", title)) or kind in architecture or f"{kind}_config" in raw:
            return kind
    if raw.get("parallel_drafting") or "peagle" in architecture:
        return "peagle"
    if EAGLE3 in architecture or "draft_vocab_size" in raw or EAGLE3 in title:
        return EAGLE3
    if EAGLE in architecture or family == EAGLE or "eagle-" in title:
        return EAGLE
    if (family.endswith("_mtp") and family.removesuffix("_mtp") in MTP_FAMILIES) or "mtp" in architecture:
        return MTP
    return DRAFT_MODEL


def describe_head(raw: Mapping[str, Any], name: str) -> dict[str, str] | None:
    """What a checkpoint with this config.json is, if it is a head that drafts for another model; None: it is not.
    Heads that are not supported are refused."""
    architecture = str((raw.get("architectures") or [""])[0]).lower()
    if not (raw.get("speculators_model_type") or "draft_vocab_size" in raw or EAGLE in architecture):
        return None
    if method_of(raw, None, name) != EAGLE3:
        return None
    layer = {**raw, **(raw.get("transformer_layer_config") or {})}
    verifier = ((raw.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    ids = raw.get("eagle_aux_hidden_state_layer_ids") or (raw.get("eagle_config") or {}).get(
        "eagle_aux_hidden_state_layer_ids"
    )
    vocabulary = layer.get("vocab_size")
    return {
        "kind": "EAGLE-3 head" + (" (speculators)" if raw.get("speculators_model_type") else ""),
        "drafts for": f"models with hidden size {raw.get('target_hidden_size') or layer.get('hidden_size')} and "
        f"{vocabulary} tokens" + (f", made for {verifier}" if verifier else ""),
        "vocabulary": f"{raw.get('draft_vocab_size') or vocabulary} of {vocabulary} tokens",
        "layers": f"{layer.get('num_hidden_layers', 1)}, {layer.get('model_type', 'llama')}-like",
        "reads": f"the streams that enter layers {', '.join(map(str, ids))}"
        if ids
        else "the streams that enter three layers of the model, by its depth",
        "drafts": f"{drafts_of(raw)} at a time",
        "use it with": f'--speculative-config \'{{"model": "{name}"}}\'',
    }
