"""LoRA adapters: reading them from disk, slots on the device, the products they add."""
