"""Tests of quire.quantization."""
