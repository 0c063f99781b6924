"""Kernels of a model's layers: one protocol (`base.py`), one implementation a device."""
