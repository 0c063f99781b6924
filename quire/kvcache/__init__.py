"""The KV cache as numbers: which blocks exist, which requests hold them, what they contain. No tensors here."""
