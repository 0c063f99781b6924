"""The adapter of a request, in vLLM's module: `from quire.lora.request import LoRARequest`."""

from quire.messages.lora import LoRARequest as LoRARequest
