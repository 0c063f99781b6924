"""Kernels in Triton: one file an idea. Imported only where triton is installed; on a CPU they run in its interpreter."""
