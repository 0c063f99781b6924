"""The load generator of `quire bench serve`: datasets, sending, timing, and metrics."""
