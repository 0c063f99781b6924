"""Native kernels for CPUs: C++ beside the Python that compiles (`build.py`) and calls it (`ops.py`)."""
