"""Products with weights in 8-bit codes: quantized activations, GEMMs of few and of many rows."""
