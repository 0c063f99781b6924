"""Mixtures of experts: routing, and each token through the few experts that the router chose for it."""
