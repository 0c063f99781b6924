"""Drafts of MTP layers equal those of transformers' own layers, computed over all tokens without a cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from quire.errors import QuireError
from quire.speculative.draft_checkpoint import DraftCheckpoint
from quire.speculative.mtp import MtpProposer
from tests.models.harness import checkpoint_tensors, loaded_model, random_reference
from tests.speculative.paged import Chunk, DraftRun

VOCAB = 97
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
MIXTURE: dict[str, Any] = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 20, "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
}  # fmt: skip
# The last layers of these are taken off, and predict.
FORMS: dict[str, tuple[type[PretrainedConfig], dict[str, Any], int]] = {
    "deepseek": (DeepseekV3Config, {**MIXTURE, **LATENT}, 1),
    "glm": (Glm4MoeConfig, {**MIXTURE, "head_dim": 16, "use_qk_norm": True}, 1),
    "two layers": (DeepseekV3Config, {**MIXTURE, **LATENT, "num_hidden_layers": 4}, 2),
    "qwen3-next": (Qwen3NextConfig, HYBRID, 1),
    "qwen3.5": (Qwen3_5TextConfig, {k: v for k, v in HYBRID.items() if "expert" not in k and "moe" not in k}, 1),
}


class Target:
    """A random model with layers that predict, and its checkpoint."""

    def __init__(self, form: str, **changes: Any) -> None:
        kind, more, self.count = FORMS[form]
        self.is_qwen = "qwen" in form
        self.model = random_reference(kind(**{**SHAPE, **more, **changes}))
        config = self.model.config
        config.num_hidden_layers -= self.count
        self.first = config.num_hidden_layers
        self.blocks = list(self.model.model.layers)[self.first :]
        self.model.model.layers = nn.ModuleList(list(self.model.model.layers)[: self.first])
        if self.is_qwen:
            config.layer_types = config.layer_types[: self.first]
            config.mtp_num_hidden_layers = self.count
        else:
            config.num_nextn_predict_layers = self.count
        generator, size = torch.Generator().manual_seed(5), config.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        if self.is_qwen:
            shapes = {"mtp.fc.weight": (size, 2 * size)}
            shapes |= {f"mtp.{n}.weight": (size,) for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
        for i in range(0 if self.is_qwen else self.count):
            name = f"model.layers.{self.first + i}"
            shapes |= {f"{name}.{n}.weight": (size,) for n in ("enorm", "hnorm", "shared_head.norm")}
            shapes |= {f"{name}.eh_proj.weight": (size, 2 * size)}
            shapes |= {f"{name}.{n}.weight": (config.vocab_size, size) for n in ("embed_tokens", "shared_head.head")}
        self.own = {
            name: torch.randn(shape, generator=generator) * (0.3 if len(shape) == 1 else 1.5 * min(shape) ** -0.5)
            + (len(shape) == 1 and not self.is_qwen)
            for name, shape in shapes.items()
        }

    def save(self, folder: Path, drop: str = "") -> str:
        folder.mkdir(exist_ok=True)
        raw = self.model.config.to_dict() | {"architectures": [type(self.model).__name__]}
        (folder / "config.json").write_text(json.dumps(raw))
        tensors = {**checkpoint_tensors(self.model), **self.own}
        for i, block in enumerate(self.blocks):
            name = f"mtp.layers.{i}" if self.is_qwen else f"model.layers.{self.first + i}"
            tensors |= {f"{name}.{key}": value for key, value in block.state_dict().items()}
        tensors = {
            name: tensor.clone().contiguous() for name, tensor in tensors.items() if not drop or drop not in name
        }
        save_file(tensors, folder / "model.safetensors")
        return str(folder)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gain = self.own[f"{name}.weight"] + (1 if self.is_qwen else 0)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps) * gain

    def predict(self, number: int, tokens: list[int], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(the predictor's output for the next one, logits), with the tokens whose embeddings it is given."""
        name = "mtp" if self.is_qwen else f"model.layers.{self.first + number}"
        e, h, fc = (
            ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc") if self.is_qwen else ("enorm", "hnorm", "eh_proj")
        )
        table = self.own.get(f"{name}.embed_tokens.weight", self.model.get_input_embeddings().weight)
        joined = torch.cat((self.norm(table[tokens], f"{name}.{e}"), self.norm(hidden, f"{name}.{h}")), -1)
        x = (joined @ self.own[f"{name}.{fc}.weight"].T)[None]
        places = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens),) * 2, float("-inf")).triu(1)[None, None]
        embeddings = self.model.model.rotary_emb(x, places)
        out = self.blocks[number](x, position_embeddings=embeddings, attention_mask=mask, position_ids=places)
        out = (out[0] if isinstance(out, tuple) else out)[0]
        normed = self.norm(out, "mtp.norm" if self.is_qwen else f"{name}.shared_head.norm")
        head = self.own.get(f"{name}.shared_head.head.weight", self.model.get_output_embeddings().weight)
        return (normed if self.is_qwen else out), normed @ head.T

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """After these tokens, of which the target has computed all but the last."""
        hidden = self.model.model(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state[0]
        known, made = list(tokens), []
        for number in range(self.count):
            given = known[number + 1 :]
            feed, logits = self.predict(number, given, hidden[: len(given)])
            last, hidden = hidden[: len(given)], feed
            made.append(int(logits[-1].argmax()))
            known.append(made[-1])
        for _ in range(self.count, count):
            # The last predictor goes on from its own output.
            last = torch.cat((last, feed[-1:]))
            given = known[self.count :]
            feed, logits = self.predict(self.count - 1, given, last)
            made.append(int(logits[-1].argmax()))
            known.append(made[-1])
        return made[:count]


def proposer(folder: Path, target: Target, model: Any, drop: str = "") -> MtpProposer:
    made = MtpProposer(DraftCheckpoint.open(target.save(folder, drop)), model, model.build)
    made.load()
    return made


@pytest.mark.parametrize("form", FORMS)
def test_drafts_are_those_of_transformers_layers(form: str, tmp_path: Path) -> None:
    """Prompts beside decodes, of which some accept drafts, and garbage behind these where there is no state."""
    target = Target(form)
    model = loaded_model(target.model)
    run = DraftRun(model, proposer(tmp_path / "model", target, model))
    a, b = (torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (20, 14))
    wrong = [] if target.is_qwen else [3]  # rejected drafts would be in the states of a hybrid
    if form == "two layers":  # a chunk's end lacks the token after the next: compare without chunks
        run.step([Chunk(0, a[:10], [a[10]])], 3)
    else:
        run.step([Chunk(0, a[:7], next=a[7])], 3)
        found = run.step([Chunk(0, a[7:10], [a[10]]), Chunk(1, b[:5], next=b[5])], 3)
        assert found == {0: target.drafts(a[:11], 3)}
        found = run.step([Chunk(0, [a[10], a[11], *wrong], a[11:13], is_decode=True), Chunk(1, b[5:9], [b[9]])], 3)
        assert found == {0: target.drafts(a[:13], 3), 1: target.drafts(b[:10], 3)}
        assert run.step([Chunk(0, [a[12]], [a[13]], is_decode=True)], 1) == {0: target.drafts(a[:14], 1)}
        return
    assert run.step([Chunk(1, b[:9], [b[9]])], 4) == {1: target.drafts(b[:10], 4)}
    # The second layer's cache at the last position was made with a draft: exact if that was accepted.
    (first, *_) = target.drafts(b[:10], 1)
    found = run.step([Chunk(1, [b[9], first, 3], [first, b[11]], is_decode=True)], 3)
    assert found == {1: target.drafts([*b[:10], first, b[11]], 3)}


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    target = Target("glm")
    model = loaded_model(target.model)
    with pytest.raises(QuireError, match=r"missing from the checkpoint:\n  - model.layers.2.eh_proj.weight"):
        proposer(tmp_path / "part", target, model, drop="eh_proj")
    with pytest.raises(QuireError, match=r"no tensors of model.layers.2"):
        proposer(tmp_path / "none", target, model, drop="model.layers.2.")
    plain = loaded_model(random_reference(LlamaConfig(**SHAPE)))
    with pytest.raises(QuireError, match="LlamaForCausalLM has no layers for multi-token prediction"):
        proposer(tmp_path / "part", target, plain)
