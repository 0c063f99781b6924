"""Kernels for NVIDIA GPUs, in Triton; cuBLASLt where a measured algorithm is faster."""
