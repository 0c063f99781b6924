"""Products with weights in few bits, on NVIDIA GPUs: one module a layout of `kernels/weights`."""
