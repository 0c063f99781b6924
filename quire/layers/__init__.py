"""Layers of models. Each declares the checkpoint tensors that fill its weights on this rank."""
