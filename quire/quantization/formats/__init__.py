"""How checkpoints store matrices in few bits: one module a family of formats."""
