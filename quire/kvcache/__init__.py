"""The KV cache as numbers: which blocks exist, who holds them, what they contain. No tensors here."""
