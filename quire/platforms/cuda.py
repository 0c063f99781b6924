"""An NVIDIA GPU."""

from __future__ import annotations

import torch


class CudaPlatform:
    """The current CUDA device."""

    ops = "quire.kernels.reference.TorchOps"
    attention = "torch"
    pipeline_depth = 1

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        large = torch.cuda.get_device_properties(self.device).total_memory >= 70 * 2**30
        self.max_num_seqs = 1024 if large else 256
        self.max_num_batched_tokens = 16384 if large else 8192

    @property
    def has_bfloat16(self) -> bool:
        return torch.cuda.is_bf16_supported(including_emulation=False)

    def describe(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def free_memory(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def total_memory(self) -> int:
        return torch.cuda.mem_get_info(self.device)[1]
