"""The parts models are made of. Each knows its rank and which checkpoint tensors it takes."""
