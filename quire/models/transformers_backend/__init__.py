"""Any causal language model of the transformers library, with this engine's attention, matrices and cache.

`model.py` is the model; `trial.py` finds out what it computes by a run without memory; `attention.py` is what its
attention layers call; `layers.py` are the layers that replace the library's; `parallel.py` how ranks share them.
"""
