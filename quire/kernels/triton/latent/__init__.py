"""Latent attention (MLA): cache entries, products by head, decodes, and prompts."""
