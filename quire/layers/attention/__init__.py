"""Attention over pages: the protocol (`base.py`), and one file per backend."""
