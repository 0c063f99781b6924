"""Weights in few bits, in the layouts that kernels read. A 16- or 32-bit weight is a plain tensor."""
