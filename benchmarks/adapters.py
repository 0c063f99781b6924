"""What LoRA adapters cost on a CPU: decode steps of 16 rows, alternating in one run.

python benchmarks/adapters.py            # a random model of 0.1 billion parameters, rank 16 on all matrices

`off` is an engine without adapters, `none` one with enable_lora whose rows have none; then 16 rows that share 1, 4 or
16 adapters. Figures are CPU time, so that busy neighbours matter less: the least and the median of rounds, relative to
those of `off`. Set OMP_NUM_THREADS=1: threads that wait for work take CPU time too.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from quire import LLM, SamplingParams
from quire.messages.lora import LoRARequest

ROWS, STEPS, ROUNDS, RANK = 16, 16, 5, 16
CONFIG = LlamaConfig(
    vocab_size=4096, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
    num_key_value_heads=4, max_position_embeddings=512, bos_token_id=0, eos_token_id=1,
)  # fmt: skip


def write_adapter(folder: Path, seed: int) -> None:
    """Rank 16 on every matrix of every layer."""
    generator = torch.Generator().manual_seed(seed)
    hidden, width, kv = CONFIG.hidden_size, CONFIG.intermediate_size, CONFIG.hidden_size // 4
    shapes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (width, hidden), "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
    }  # fmt: skip
    tensors = {}
    for layer in range(CONFIG.num_hidden_layers):
        for name, (rows, columns) in shapes.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) / 100
            tensors[f"{key}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator) / 100
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = [name.rpartition(".")[2] for name in shapes]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def seconds_of(llm: LLM, loras: list[LoRARequest | None]) -> float:
    """Of a decode step with these adapters."""
    prompts = [{"prompt_token_ids": [7 + row, 3, 5]} for row in range(ROWS)]
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, detokenize=False)
    begin = time.process_time()
    llm.generate(prompts, params, use_tqdm=False, lora_request=loras)
    return (time.process_time() - begin) / STEPS


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        LlamaForCausalLM(CONFIG).save_pretrained(folder / "base")
        loras = []
        for number in range(ROWS):
            write_adapter(folder / str(number), number)
            loras.append(LoRARequest(str(number), number + 1, str(folder / str(number))))
        settings = {
            "skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 256,
            "max_num_seqs": ROWS, "disable_log_stats": True,
        }  # fmt: skip
        with (
            LLM(str(folder / "base"), **settings) as off,
            LLM(str(folder / "base"), enable_lora=True, max_loras=ROWS, max_lora_rank=RANK, **settings) as on,
        ):
            cases: dict[str, tuple[LLM, list[LoRARequest | None]]] = {
                "off": (off, [None] * ROWS), "none": (on, [None] * ROWS)
            }  # fmt: skip
            for count in (1, 4, 16):
                cases[f"{count} adapters"] = on, [loras[row % count] for row in range(ROWS)]
            times: dict[str, list[float]] = {case: [] for case in cases}
            for case in (*cases, *(list(cases) * ROUNDS)):  # the first round loads adapters and records passes
                times[case].append(seconds_of(*cases[case]))
            base = times["off"][1:]
            for case, (_, *found) in times.items():
                fastest, median = min(found) / min(base), statistics.median(found) / statistics.median(base)
                print(f"{case:12} {1000 * min(found):7.2f} ms a step: {fastest:.3f} of off (median {median:.3f})")


if __name__ == "__main__":
    main()
