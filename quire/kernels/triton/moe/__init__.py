"""Mixtures of experts: routing, and each token through the experts that the router chose for it."""
