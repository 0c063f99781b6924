"""Kernels of a model's layers: one protocol (`base.py`), one implementation per device."""
