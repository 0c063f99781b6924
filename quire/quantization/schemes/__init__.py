"""How checkpoints say which format each of their matrices has: one module a dialect."""
