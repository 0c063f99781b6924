"""Weights in few bits: how checkpoints store them (`formats/`) and how they say so (`schemes/`)."""
