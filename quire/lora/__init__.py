"""vLLM's package for adapters: `from quire.lora.request import LoRARequest`."""
