"""Kernels in Triton: one file an idea. Imported only where triton is there; on a CPU they run in its interpreter."""
