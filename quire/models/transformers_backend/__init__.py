"""Any causal language model of the transformers library, with this engine's attention, matrices and cache.

`model.py` is the model. `library.py` makes the library's, `trial.py` finds out what it computes by a run without
memory, `replacement.py` puts the engine's layers (`layers.py`) into it. `attention.py` is what its attention layers
call, `rotation.py` lets attention rotate, `parallel.py` says how ranks share layers, `names.py` what checkpoints call
their tensors.
"""
